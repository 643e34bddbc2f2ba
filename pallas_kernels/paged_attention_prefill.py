"""Ragged causal flash attention over pages, in Pallas' Triton dialect.

One program serves all query heads of one KV head for a tile of query tokens of one sequence:
token and head share the tile's rows, so a group of any size fills them. Keys that every row of
the tile sees need no mask; only blocks at the diagonal and at the window's edge get one. Tiles
with more keys come first. The grid is the most tiles that T tokens of B sequences can make;
programs beyond the step's own end at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.byte_pairs import as_pairs
from pallas_kernels.flash import (
    Pages,
    Scoring,
    Softmax,
    check_operands,
    load_rows,
    padded,
    store_rows,
)
from pallas_kernels.page_scales import computed_dtype


@dataclass(frozen=True)
class TuningConfig:
    """How prefill attention is laid out on the card; never changes what it computes.

    Attributes:
        block_rows: rows (query tokens x heads of the group) of a program, a power of two from
            16 to 256.
        block_keys: keys folded at once, a power of two from 16 to 256.
        num_warps: warps of a program, a power of two up to 8.
        num_stages: depth of the load pipeline.
    """

    block_rows: int
    block_keys: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        for name in ("block_rows", "block_keys"):
            value = getattr(self, name)
            if value not in (16, 32, 64, 128, 256):
                raise ValueError(f"{name} must be 16, 32, 64, 128 or 256, got {value}")
        if self.num_warps not in (1, 2, 4, 8):
            raise ValueError(f"num_warps must be 1, 2, 4 or 8, got {self.num_warps}")
        if not 1 <= self.num_stages <= 8:
            raise ValueError(f"num_stages must be from 1 to 8, got {self.num_stages}")


def tuning_config(*, H: int, bytes_per_element: int) -> TuningConfig:
    """The setting for heads of H, chosen by what static shapes tell (H200)."""
    if bytes_per_element == 4:  # no tensor cores: registers hold operands and products
        return TuningConfig(32, 32, 4, 1)
    if padded(H) == 256:
        return TuningConfig(128, 64, 8, 2)
    return TuningConfig(128, 64, 4, 2)


def paged_attention_prefill(
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
    config: TuningConfig | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Causal attention of sequences num_decodes to num_seqs to their own pages.

    Args: as `paged_attention.paged_attention`, with N / K <= 16, H <= 256 and S a power of two;
        `config` is the layout on the card (None: `tuning_config`), `interpret` runs anywhere.

    Returns:
        [T, N, H] in the queries' dtype; rows that belong to no such sequence are 0.

    Raises:
        ValueError: shapes, dtypes or options outside these bounds.
    """
    check_operands(q_TNH, pages_P2KSH, page_table_BM, kv_len_B, page_scales)
    T, N, H = q_TNH.shape
    K = pages_P2KSH.shape[2]
    dtype = computed_dtype(q_TNH.dtype, pages_P2KSH.dtype)
    config = config or tuning_config(H=H, bytes_per_element=dtype.itemsize)
    tile_X4 = prefill_tiles(
        query_start_B1, kv_len_B, num_decodes, num_seqs, T=T, tokens=config.block_rows // (N // K)
    )
    ins = [tile_X4, q_TNH, page_table_BM, as_pairs(pages_P2KSH)]
    ins += [] if page_scales is None else [page_scales]
    return pl.pallas_call(
        partial(
            _prefill_kernel,
            K=K,
            scoring=Scoring(scale, window, softcap),
            config=config,
            stored=pages_P2KSH.dtype,
            dtype=dtype,
        ),
        grid=(tile_X4.shape[0] * K,),
        out_shape=jax.ShapeDtypeStruct(q_TNH.shape, q_TNH.dtype),
        compiler_params=pltriton.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=interpret,
        name="paged_attention_prefill",
    )(*ins)


def prefill_tiles(
    query_start_B1: jax.Array,
    kv_len_B: jax.Array,
    num_decodes: jax.Array,
    num_seqs: jax.Array,
    *,
    T: int,
    tokens: int,
) -> jax.Array:
    """int32[X, 4]: sequence, first row, rows (0: no tile), position of the first row.

    Rows before the prefills and after them are two more stretches, whose rows see nothing.
    Layers of a step share this: XLA computes it once.
    """
    B = kv_len_B.shape[0]
    seq_B = jnp.arange(B)
    ours_B = (seq_B >= num_decodes) & (seq_B < num_seqs)
    begin, end = query_start_B1[num_decodes], query_start_B1[B]
    rows_B = jnp.where(ours_B, jnp.diff(query_start_B1), 0)
    seq_D = jnp.concatenate([seq_B, jnp.zeros(2, seq_B.dtype)])
    start_D = jnp.concatenate([query_start_B1[:-1], jnp.stack([jnp.zeros_like(end), end])])
    rows_D = jnp.concatenate([rows_B, jnp.stack([begin, T - end])])
    position_D = jnp.concatenate([kv_len_B - rows_B, jnp.full(2, -T, jnp.int32)])
    tiles_D = (rows_D + (tokens - 1)) // tokens
    stop_D = jnp.cumsum(tiles_D)
    x_X = jnp.arange(-(-T // tokens) + B + 2)
    d_X = (stop_D[None, :] <= x_X[:, None]).sum(axis=1)
    found_X, d_X = d_X < B + 2, jnp.minimum(d_X, B + 1)
    done_X = (x_X - (stop_D - tiles_D)[d_X]) * tokens
    rows_X = jnp.where(found_X, jnp.minimum(rows_D[d_X] - done_X, tokens), 0)
    position_X = position_D[d_X] + done_X
    tile_X4 = jnp.stack([seq_D[d_X], start_D[d_X] + done_X, rows_X, position_X], axis=1)
    return tile_X4[jnp.argsort(jnp.where(found_X, -position_X, T))].astype(jnp.int32)


def _prefill_kernel(
    tile_ref: Any,
    q_ref: Any,
    page_table_ref: Any,
    pages_ref: Any,
    *rest: Any,
    K: int,
    scoring: Scoring,
    config: TuningConfig,
    stored: Any,
    dtype: Any,
) -> None:
    *scale_ref, out_ref = rest
    pid = pl.program_id(0)
    x, k = lax.div(pid, K), lax.rem(pid, K)
    b, row, rows, position = (tile_ref[x, i] for i in range(4))
    G, block, window = q_ref.shape[1] // K, config.block_keys, scoring.window
    r_R = jnp.arange(config.block_rows)
    t_R, n_R = lax.div(r_R, G), k * G + lax.rem(r_R, G)
    live_R = t_R < rows
    last = position + rows - 1

    def first_key(position: Any) -> Any:
        return 0 if window is None else jnp.maximum(position - (window - 1), 0)

    @pl.when(rows > 0)
    def _() -> None:
        # Rows beyond the tile compute what its last token does, and are not stored.
        filled_R = jnp.minimum(t_R, rows - 1)
        q_RH = load_rows(q_ref, row + filled_R, n_R)
        position_R = position + filled_R
        scales = scale_ref[0] if scale_ref else None
        pages = Pages(pages_ref, scales, page_table_ref, k, stored, dtype)
        q, scored = pages.meet(q_RH, scoring)

        def fold(i: jax.Array, softmax: Softmax) -> Softmax:
            key_C = i * block + jnp.arange(block)
            return pages.fold(softmax, b, key_C, q, None, scored)

        def fold_masked(i: jax.Array, softmax: Softmax) -> Softmax:
            key_C = i * block + jnp.arange(block)
            sees_RC = key_C[None, :] <= position_R[:, None]
            if window is not None:
                sees_RC &= key_C[None, :] > (position_R - window)[:, None]
            # Only keys that some row sees are read: others may be anything, NaN included.
            read_C = jnp.clip(key_C, first_key(position), last)
            return pages.fold(softmax, b, read_C, q, sees_RC, scored)

        softmax = pages.start(config.block_rows, q_RH.shape[1])
        end = lax.div(last + block, block)
        begin_all = jnp.int32(0)  # blocks that all rows see whole: begin_all to end_all
        if window is not None:
            begin = lax.div(first_key(position), block)
            begin_all = jnp.minimum(lax.div(first_key(last) + (block - 1), block), end)
            softmax = lax.fori_loop(begin, begin_all, fold_masked, softmax)
        end_all = jnp.clip(lax.div(jnp.maximum(position + 1, 0), block), begin_all, end)
        softmax = lax.fori_loop(begin_all, end_all, fold, softmax)
        softmax = lax.fori_loop(end_all, end, fold_masked, softmax)
        store_rows(out_ref, row + t_R, n_R, value=pages.normalised(softmax), live_R=live_R)
