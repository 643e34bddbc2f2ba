"""Paged attention of a mixed step on a GPU: prefill tiles, then decode rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention_decode import paged_attention_decode
from pallas_kernels.paged_attention_prefill import paged_attention_prefill


def paged_attention_triton(
    q_TNH: jax.Array,
    pages_P2KSH: jax.Array,
    page_table_BM: jax.Array,
    *,
    query_start_B1: jax.Array,
    kv_len_B: jax.Array,
    num_decodes: jax.Array,
    num_seqs: jax.Array,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    page_scales: jax.Array | None = None,
    decode_only: bool = False,
    prefill: Callable[..., jax.Array] = paged_attention_prefill,
    interpret: bool = False,
) -> jax.Array:
    """`paged_attention.paged_attention` for NVIDIA GPUs of compute capability 8.0 and up.

    The same arguments and results, with N / K <= 16, H <= 256 (in pages of one byte one that
    `byte_pairs.makes_pairs` has) and S a power of two. The decode
    kernel writes into the prefill kernel's output, so that nothing is copied or added up.
    `prefill` is that kernel, or one with its arguments and results. `interpret` runs the kernels
    on any platform, slowly.

    Raises:
        ValueError: shapes, dtypes or options outside these bounds.
    """
    T, B = q_TNH.shape[0], kv_len_B.shape[0]
    decode = partial(
        paged_attention_decode,
        scale=scale,
        window=window,
        softcap=softcap,
        page_scales=page_scales,
        kv_len_B=kv_len_B,
        num_decodes=num_decodes,
        interpret=interpret,
    )
    if decode_only:
        out_BNH = decode(q_TNH[:B], pages_P2KSH, page_table_BM)
        return out_BNH if T == B else jnp.pad(out_BNH, ((0, T - B), (0, 0), (0, 0)))
    out_TNH = prefill(
        q_TNH,
        pages_P2KSH,
        page_table_BM,
        query_start_B1=query_start_B1,
        kv_len_B=kv_len_B,
        num_decodes=num_decodes,
        num_seqs=num_seqs,
        scale=scale,
        window=window,
        softcap=softcap,
        page_scales=page_scales,
        **({"interpret": True} if interpret else {}),
    )
    return decode(q_TNH, pages_P2KSH, page_table_BM, into_TNH=out_TNH)
