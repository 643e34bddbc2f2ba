"""Paged attention as the models use it: write the step's keys and values, then attend.

The one place that knows which implementation runs where. An implementation ("backend") is one
entry of a table; models pass its name on and never look inside.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import struct

from jaxpaged.arrays.kv_pages import KVPages
from jaxpaged.arrays.step_batch import StepBatch
from pallas_kernels.byte_pairs import makes_pairs
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention_prefill_mosaic import paged_attention_prefill_mosaic
from pallas_kernels.paged_attention_triton import paged_attention_triton
from pallas_kernels.rope_write import Written, rope_write, rope_write_reference

E4M3_CAPABILITY = 8.9  # from this compute capability on Triton converts float8_e4m3fn


@dataclass(frozen=True)
class AttentionCase:
    """What decides which implementations can run."""

    platform: str  # as jax.Device.platform
    compute_capability: float  # 9.0: Hopper; 0 where there is none
    dtype: jnp.dtype  # of queries
    kv_dtype: jnp.dtype
    queries_per_kv_head: int
    head_dim: int
    page_size: int


def _any(case: AttentionCase) -> bool:
    return case.platform in ("cpu", "gpu", "tpu")


def _triton(case: AttentionCase) -> bool:
    needed = E4M3_CAPABILITY if case.kv_dtype == jnp.float8_e4m3fn else 8
    on_gpu = case.platform == "gpu" and case.compute_capability >= needed
    as_stored = case.kv_dtype.itemsize > 1 or makes_pairs(case.head_dim)
    return on_gpu and as_stored and case.queries_per_kv_head <= 16 and case.head_dim <= 256


def _mosaic(case: AttentionCase) -> bool:
    return (
        _triton(case)
        and case.compute_capability == 9
        and case.dtype == case.kv_dtype
        and case.dtype in (jnp.bfloat16, jnp.float16)
        and case.head_dim in (64, 128, 256)
        and case.page_size in (16, 32, 64)
    )


@dataclass(frozen=True)
class AttentionBackend:
    """Implementations with the signatures of `rope_write_reference` and `paged_attention`."""

    serves: Callable[[AttentionCase], bool]
    write: Callable[..., Written]
    attend: Callable[..., jax.Array]


# The first that serves a case is what "auto" picks. (Mosaic's prefill is faster and right on the
# card by itself, but no whole engine has run it there yet: it has to be asked for.)
BACKENDS: dict[str, AttentionBackend] = {
    "triton": AttentionBackend(_triton, rope_write, paged_attention_triton),
    "mosaic": AttentionBackend(
        _mosaic,
        rope_write,
        partial(paged_attention_triton, prefill=paged_attention_prefill_mosaic),
    ),
    "xla": AttentionBackend(_any, rope_write_reference, paged_attention),
}


def attention_backend(requested: str, case: AttentionCase) -> str:
    """Name of the backend that runs; `requested` is a name or "auto".

    Raises:
        ValueError: no such backend, or it does not serve the case.
    """
    able = [name for name, backend in BACKENDS.items() if backend.serves(case)]
    if requested == "auto" and able:
        return able[0]
    if requested not in able:
        raise ValueError(
            f"attention backend {requested!r} does not run on {case.platform} with this model and "
            f"KV pages of {jnp.dtype(case.kv_dtype).name}: choose from {', '.join(['auto', *able])}"
        )
    return requested


@struct.dataclass
class WritePlaces:
    """Where the step's tokens go in the pages of one KV group."""

    page_T: jax.Array  # int32; padding goes to page 0, the null page
    slot_T: jax.Array  # int32


def write_places(batch: StepBatch, group: int, page_size: int) -> WritePlaces:
    """Compute, once a step for each KV group, where its tokens' keys and values go."""
    T, B = batch.token_T.shape[0], batch.kv_len_B.shape[0]
    column_T = batch.position_T // page_size
    page_T = batch.page_tables[group][batch.seq_T, column_T]
    live_T = jnp.arange(T) < batch.query_start_B1[B]
    return WritePlaces(jnp.where(live_T, page_T, 0), batch.position_T % page_size)


def attend(
    qkv_TKXH: jax.Array,
    pages: KVPages,
    layer_scales_2K: jax.Array | None,
    scales: tuple[jax.Array, jax.Array] | None,
    rope: tuple[jax.Array, jax.Array],
    batch: StepBatch,
    places: WritePlaces,
    *,
    backend: str,
    norm_eps: float,
    norm_plus_one: bool,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[jax.Array, KVPages]:
    """Causal self-attention of one layer over its KV group's pages.

    Args:
        qkv_TKXH: each KV head's G queries, its key and its value (X = G + 2).
        pages: this layer's array of the pool.
        layer_scales_2K: of its keys and values, where pages of this dtype have such.
        scales: of the queries' and of the keys' norm; None: the model has none.
        rope: cos and sin tables of the tokens' positions.
        batch: the step, with the page table of the layer's KV group alone.
        places: `write_places` of that group.
        backend: a name from `attention_backend`.
        norm_eps, norm_plus_one: as `layers.norm.RMSNorm`.
        scale, window, softcap: as `pallas_kernels.paged_attention.paged_attention`.

    Returns:
        [T, K * G, H] attention output (0 for padding) and the pages, updated in place if donated.
    """
    ops, (page_table_BM,) = BACKENDS[backend], batch.page_tables
    q_TNH, values_P2KSH, page_scales = ops.write(
        qkv_TKXH,
        *rope,
        pages.values_P2KSH,
        places.page_T,
        places.slot_T,
        scales,
        page_scales=layer_scales_2K if pages.scale_P2KS is None else pages.scale_P2KS,
        eps=norm_eps,
        plus_one=norm_plus_one,
    )
    out_TNH = ops.attend(
        q_TNH,
        values_P2KSH,
        page_table_BM,
        query_start_B1=batch.query_start_B1,
        kv_len_B=batch.kv_len_B,
        num_decodes=batch.num_decodes,
        num_seqs=batch.num_seqs,
        scale=scale,
        window=window,
        softcap=softcap,
        page_scales=page_scales,
        decode_only=batch.decode_only,
    )
    return out_TNH, KVPages(values_P2KSH, None if pages.scale_P2KS is None else page_scales)
