"""Ragged causal flash attention over pages for Hopper, in Pallas' Mosaic GPU dialect.

A block of threads serves all query heads of one KV head for a tile of query tokens of one
sequence. Two warpgroups of 64 rows (token, head) each compute; a third one brings pages in by TMA,
a page of one KV head at a time, through a ring of blocks of keys and of values. The computing
warpgroups take turns: one multiplies while the other one does its softmax.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.flash import LOG2_E, MASKED, SMALLEST_SUM, Scoring, check_operands
from pallas_kernels.paged_attention_prefill import prefill_tiles

ROWS = 64  # of a warpgroup: what the tensor core's instruction takes
LANES = 64  # elements of half precision in a line of swizzled shared memory
WARPGROUPS = 2  # that compute
# Below all scores, far above MASKED times their factor: a masked key weighs 0 also before a row
# has seen any, where the two would only nearly cancel.
LOWEST = -1e20
SWIZZLE = plgpu.SwizzleTransform(128)
TILED = (plgpu.TilingTransform((8, LANES)), SWIZZLE)
# A warpgroup's registers a thread; the three share 64 Ki.
COMPUTE_REGISTERS, LOAD_REGISTERS = 232, 40


@dataclass(frozen=True)
class TuningConfig:
    """How the kernel is laid out on the card; never changes what it computes.

    Attributes:
        block_keys: keys folded at once, 64 or 128.
        num_stages: blocks of keys and of values in flight, from 2.
    """

    block_keys: int
    num_stages: int

    def __post_init__(self) -> None:
        if self.block_keys not in (64, 128):
            raise ValueError(f"block_keys must be 64 or 128, got {self.block_keys}")
        if self.num_stages < 2:
            raise ValueError(f"num_stages must be at least 2, got {self.num_stages}")


def tuning_config(*, H: int) -> TuningConfig:
    """The setting for heads of H (H200)."""
    return TuningConfig(64, 2) if H == 256 else TuningConfig(128, 2)


def paged_attention_prefill_mosaic(
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
) -> jax.Array:
    """As `paged_attention_prefill.paged_attention_prefill`, on compute capability 9.0 alone.

    There is no interpret mode: that of this dialect knows no two views of one shared memory.

    Raises:
        ValueError: queries and pages that are not both bfloat16 or both float16, head dims other
            than 64, 128 and 256, pages of other than 16, 32 or 64 tokens, and what the other
            kernel refuses.
    """
    check_operands(q_TNH, pages_P2KSH, page_table_BM, kv_len_B, page_scales)
    T, N, H = q_TNH.shape
    _, _, K, S, _ = pages_P2KSH.shape
    dtype = q_TNH.dtype
    if dtype != pages_P2KSH.dtype or dtype not in (jnp.bfloat16, jnp.float16):
        raise ValueError(
            "queries and pages must both be bfloat16 or both float16, "
            f"got {dtype} and {pages_P2KSH.dtype}"
        )
    if H not in (64, 128, 256):
        raise ValueError(f"the head dim must be 64, 128 or 256, got {H}")
    if S not in (16, 32, 64):
        raise ValueError(f"the page size must be 16, 32 or 64, got {S}")
    config = config or tuning_config(H=H)
    tokens = ROWS * K // N
    # A copy spans a warpgroup's tokens, which the array must not be shorter than.
    q_TNH = jnp.pad(q_TNH, ((0, max(0, tokens - T)), (0, 0), (0, 0)))
    tile_X4 = prefill_tiles(
        query_start_B1,
        kv_len_B,
        num_decodes,
        num_seqs,
        T=q_TNH.shape[0],
        tokens=WARPGROUPS * tokens,
    )
    # The lengths come with the tiles, an array made here: the kernel's arguments must begin at
    # multiples of 256 bytes, and a caller's lengths may be a slice of something.
    tile_X5 = jnp.concatenate([tile_X4, kv_len_B[tile_X4[:, :1]].astype(jnp.int32)], axis=1)
    q_TKGH = q_TNH.reshape(-1, K, N // K, H)
    out_TKGH = plgpu.kernel(
        partial(_kernel, scoring=Scoring(scale, window, softcap)),
        out_type=jax.ShapeDtypeStruct(q_TKGH.shape, dtype),
        scratch_types=(_scratch(config, G=N // K, S=S, H=H, dtype=dtype),),
        grid=(tile_X5.shape[0] * K,),
        grid_names=("tile",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(tile_X5, q_TKGH, pages_P2KSH.reshape(-1, S, H), page_table_BM)
    return out_TKGH.reshape(-1, N, H)[:T]


class _Scratch(NamedTuple):
    """Shared memory and barriers of a block of threads."""

    rows: Any  # queries, then outputs: see `_scratch`
    k: Any  # [stages, C, H]
    v: Any
    q_landed: Any  # per warpgroup
    k_landed: Any  # per stage, as all below
    v_landed: Any
    k_consumed: Any
    v_consumed: Any
    turn: Any  # to use the tensor cores


def _scratch(config: TuningConfig, *, G: int, S: int, H: int, dtype: Any) -> _Scratch:
    """What `_kernel` is given.

    Rows lie in chunks of 64 lanes. One view of them, [warpgroup, chunk, row, lane], is for the
    tensor core, the other one, of [token, head, lane] for each warpgroup and chunk, for TMA. They
    share the memory: lines of 128 bytes in the same order, swizzled by their addresses alone.
    """
    stages, chunks = config.num_stages, H // LANES
    chunk = plgpu.SMEM((ROWS // G, G, LANES), dtype, transforms=(SWIZZLE,))
    ring = plgpu.SMEM((stages, config.block_keys, H), dtype, transforms=TILED)
    landed = plgpu.Barrier(num_barriers=stages, num_arrivals=config.block_keys // S)
    consumed = plgpu.Barrier(num_barriers=stages, num_arrivals=WARPGROUPS)
    return _Scratch(
        rows=plgpu.RefUnion(
            plgpu.SMEM((WARPGROUPS, chunks, ROWS, LANES), dtype, transforms=TILED),
            [[chunk] * chunks for _ in range(WARPGROUPS)],
        ),
        k=ring,
        v=ring,
        q_landed=plgpu.Barrier(num_barriers=WARPGROUPS, num_arrivals=chunks),
        k_landed=landed,
        v_landed=landed,
        k_consumed=consumed,
        v_consumed=consumed,
        turn=plgpu.Barrier(num_arrivals=WARPGROUPS),
    )


class _Tile(NamedTuple):
    """Consecutive tokens of a sequence, for one KV head."""

    b: Any
    k: Any
    row: Any  # of the first token
    rows: Any  # tokens; 0: no tile
    position: Any  # of the first token
    kv_len: Any  # of the sequence
    first_page: Any  # pages that some token sees
    last_page: Any
    first_key: Any  # of the first page
    begin: Any  # blocks that some token sees
    begin_all: Any  # blocks that all tokens see whole
    end_all: Any
    end: Any


def _tile(tile_ref: Any, *, K: int, S: int, block: int, window: int | None) -> _Tile:
    pid = lax.axis_index("tile")
    x, k = lax.div(pid, K), lax.rem(pid, K)
    b, row, rows, position, kv_len = (tile_ref[x, i] for i in range(5))
    last = position + rows - 1
    end = lax.div(last + block, block)
    first_page: Any = 0
    begin: Any = 0
    begin_all: Any = 0
    if window is not None:
        first_seen = jnp.maximum(position - (window - 1), 0)
        first_seen_by_last = jnp.maximum(last - (window - 1), 0)
        first_page, begin = lax.div(first_seen, S), lax.div(first_seen, block)
        begin_all = jnp.minimum(lax.div(first_seen_by_last + (block - 1), block), end)
    return _Tile(
        b,
        k,
        row,
        rows,
        position,
        kv_len,
        first_page,
        last_page=lax.div(last, S),
        first_key=first_page * S,
        begin=begin,
        begin_all=begin_all,
        end_all=jnp.clip(lax.div(jnp.maximum(position + 1, 0), block), begin_all, end),
        end=end,
    )


def _kernel(
    tile_ref: Any,
    q_ref: Any,
    pages_ref: Any,
    page_table_ref: Any,
    out_ref: Any,
    scratch: _Scratch,
    *,
    scoring: Scoring,
) -> None:
    _, K, G, _ = q_ref.shape
    tile = _tile(
        tile_ref, K=K, S=pages_ref.shape[1], block=scratch.k.shape[1], window=scoring.window
    )
    warpgroup = lax.axis_index("warpgroup")

    @pl.when((tile.rows > 0) & (warpgroup < WARPGROUPS))
    def compute() -> None:
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        before = warpgroup * (ROWS // G)
        _load_queries(scratch, q_ref.at[:, tile.k], tile.row + before, warpgroup)
        out_RH = _attend(
            scratch,
            tile,
            warpgroup,
            position=tile.position + before,
            kv_len=tile.kv_len,
            G=G,
            scoring=scoring,
        )
        _store_rows(
            scratch,
            out_ref.at[:, tile.k],
            tile.row + before,
            jnp.clip(tile.rows - before, 0, ROWS // G),
            warpgroup,
            out_RH.astype(out_ref.dtype),
        )

    @pl.when((tile.rows > 0) & (warpgroup == WARPGROUPS))
    def load() -> None:
        plgpu.set_max_registers(LOAD_REGISTERS, action="decrease")
        _load_pages(scratch, tile, pages_ref, page_table_ref, K)


def _load_pages(
    scratch: _Scratch, tile: _Tile, pages_ref: Any, page_table_ref: Any, K: int
) -> None:
    """Keep the rings of keys and values filled; `pages_ref` is [P * 2 * K, S, H]."""
    stages, block, _ = scratch.k.shape
    S = pages_ref.shape[1]

    @pl.loop(tile.begin, tile.end)
    def fill(i: Any) -> None:
        n = i - tile.begin
        slot = lax.rem(n, stages)
        # Pages that no row sees are not read: they may be anything.
        column_J = [
            jnp.clip(i * (block // S) + j, tile.first_page, tile.last_page)
            for j in range(block // S)
        ]
        page_J = [page_table_ref[tile.b, column] * 2 * K + tile.k for column in column_J]
        for offset, ring, landed, consumed in (
            (0, scratch.k, scratch.k_landed, scratch.k_consumed),
            (K, scratch.v, scratch.v_landed, scratch.v_consumed),
        ):

            @pl.when(n >= stages)
            def _(consumed: Any = consumed) -> None:
                plgpu.barrier_wait(consumed.at[slot])

            for j, page in enumerate(page_J):
                to = ring.at[slot, pl.ds(j * S, S)]
                plgpu.copy_gmem_to_smem(pages_ref.at[page + offset], to, landed.at[slot])


def _load_queries(scratch: _Scratch, q_TGH: Any, first: Any, warpgroup: Any) -> None:
    """Bring a warpgroup's tokens in, and wait for them."""
    _, chunks = scratch.rows
    for w in range(WARPGROUPS):

        @pl.when(warpgroup == w)
        def _(w: int = w) -> None:
            for c, chunk in enumerate(chunks[w]):
                lanes = pl.ds(c * LANES, LANES)
                source = q_TGH.at[pl.ds(first, chunk.shape[0]), :, lanes]
                plgpu.copy_gmem_to_smem(source, chunk, scratch.q_landed.at[w])

    plgpu.barrier_wait(scratch.q_landed.at[warpgroup])


def _store_rows(
    scratch: _Scratch, out_TGH: Any, first: Any, count: Any, warpgroup: Any, out_RH: jax.Array
) -> None:
    """Write a warpgroup's first `count` tokens: those behind them are another tile's."""
    rows_smem, chunks = scratch.rows
    for c in range(len(chunks[0])):
        rows_smem[warpgroup, c] = out_RH[:, c * LANES : (c + 1) * LANES]
    plgpu.commit_smem()
    for w in range(WARPGROUPS):
        for c, chunk in enumerate(chunks[w]):
            lanes, tokens = pl.ds(c * LANES, LANES), chunk.shape[0]

            @pl.when((warpgroup == w) & (count == tokens))
            def whole(chunk: Any = chunk, lanes: Any = lanes, tokens: int = tokens) -> None:
                plgpu.copy_smem_to_gmem(chunk, out_TGH.at[pl.ds(first, tokens), :, lanes])

            @pl.when((warpgroup == w) & (count < tokens))
            def part(chunk: Any = chunk, lanes: Any = lanes) -> None:
                @pl.loop(0, count)
                def _(t: Any) -> None:
                    plgpu.copy_smem_to_gmem(chunk.at[t], out_TGH.at[first + t, :, lanes])

    plgpu.wait_smem_to_gmem(0)


def _attend(
    scratch: _Scratch,
    tile: _Tile,
    warpgroup: Any,
    *,
    position: Any,
    kv_len: Any,
    G: int,
    scoring: Scoring,
) -> jax.Array:
    """Attention of a warpgroup's rows, float32[R, H]; `position` is that of row 0."""
    stages, block, H = scratch.k.shape
    dtype = scratch.k.dtype
    rows_smem, _ = scratch.rows
    q_smem = rows_smem.at[warpgroup]
    factor = LOG2_E * (scoring.scale if scoring.softcap is None else scoring.softcap)

    def take_turn() -> None:
        plgpu.barrier_arrive(scratch.turn)
        plgpu.barrier_wait(scratch.turn)

    def fold(i: Any, carry: tuple[jax.Array, ...], *, masked: bool) -> tuple[jax.Array, ...]:
        out_RH, max_R, sum_R = carry
        slot = lax.rem(i - tile.begin, stages)
        next_slot = lax.rem(i + 1 - tile.begin, stages)

        def multiply_keys(acc: Any) -> jax.Array:
            for c in range(H // LANES):
                k_CL = scratch.k.at[slot, :, pl.ds(c * LANES, LANES)]
                plgpu.wgmma(acc, q_smem.at[c], k_CL.transpose((1, 0)))
            take_turn()
            return acc[...]

        score_RC = pl.run_scoped(multiply_keys, plgpu.ACC((ROWS, block), jnp.float32))
        plgpu.barrier_arrive(scratch.k_consumed.at[slot])
        if scoring.softcap is not None:
            score_RC = jnp.tanh(score_RC * (scoring.scale / scoring.softcap))
        if masked:
            sees_RC = _sees(i * block - position, (ROWS, block), G, scoring.window)
            score_RC = jnp.where(sees_RC, score_RC, MASKED)
        # The maxima carry the factor, so that weights take one multiply-add before the power.
        new_max_R = jnp.maximum(max_R, score_RC.max(axis=1) * factor)
        decay_R = jnp.exp2(max_R - new_max_R)
        weight_RC = jnp.exp2(
            score_RC * factor - lax.broadcast_in_dim(new_max_R, score_RC.shape, [0])
        )
        out_RH *= lax.broadcast_in_dim(decay_R, out_RH.shape, [0])
        sum_R *= decay_R
        half_RC = weight_RC.astype(dtype)
        sum_R += weight_RC.sum(axis=1)
        # All of the softmax comes before the other warpgroup's turn ends.
        out_RH, sum_R, new_max_R, half_RC = lax.optimization_barrier(
            (out_RH, sum_R, new_max_R, half_RC)
        )
        plgpu.barrier_arrive(scratch.turn)
        plgpu.barrier_wait(scratch.v_landed.at[slot])
        if masked:
            # Slots behind the sequence may hold anything, NaN included, and the page with them
            # also stands for pages before the window. Both warpgroups clear the same rows.
            @pl.when((i + 1) * block > kv_len)
            def clear() -> None:
                _clear(scratch.v.at[slot], tile.first_key - i * block, kv_len - i * block)

        plgpu.barrier_wait(scratch.turn)

        def multiply_values(acc: Any) -> None:
            plgpu.wgmma(acc, half_RC, scratch.v.at[slot])

            @pl.when(i + 1 < tile.end)
            def wait() -> None:
                plgpu.barrier_wait(scratch.k_landed.at[next_slot])

        out_RH = pl.run_state(multiply_values)(plgpu.ACC.init(out_RH))
        plgpu.barrier_arrive(scratch.v_consumed.at[slot])
        return out_RH, new_max_R, sum_R

    carry = _full((ROWS, H), 0), _full((ROWS,), LOWEST), _full((ROWS,), 0)

    @pl.when(tile.begin < tile.end)
    def wait() -> None:
        plgpu.barrier_wait(scratch.k_landed.at[0])

    # The second warpgroup is half a step behind the first one. Both fold the same blocks, also
    # those that only the other one's rows see.
    pl.when(warpgroup == 1)(take_turn)
    if scoring.window is not None:
        carry = lax.fori_loop(tile.begin, tile.begin_all, partial(fold, masked=True), carry)
    carry = lax.fori_loop(tile.begin_all, tile.end_all, partial(fold, masked=False), carry)
    carry = lax.fori_loop(tile.end_all, tile.end, partial(fold, masked=True), carry)
    pl.when(warpgroup == 0)(take_turn)
    out_RH, _, sum_R = carry
    return out_RH * lax.broadcast_in_dim(1 / jnp.maximum(sum_R, SMALLEST_SUM), (ROWS, H), [0])


def _sees(first_key: Any, shape: tuple[int, int], G: int, window: int | None) -> jax.Array:
    """Which rows see which keys; `first_key` counts from the position of row 0.

    Row r belongs to token r // G and sees key c if c <= r // G; multiplying is cheaper.
    """
    iota = partial(plgpu.broadcasted_iota, jnp.int32, shape, layout=plgpu.Layout.WGMMA)
    r_RC, c_RC = iota(0), (iota(1) + first_key) * G
    sees_RC = r_RC >= c_RC
    return sees_RC if window is None else sees_RC & (r_RC < c_RC + window * G)


def _clear(v_CH: Any, begin: Any, end: Any) -> None:
    """Set the rows before `begin` and from `end` on to 0."""
    iota = plgpu.broadcasted_iota(jnp.int32, (ROWS, LANES), 0, layout=plgpu.Layout.WGMMA)
    C, H = v_CH.shape
    for c in range(0, C, ROWS):
        for h in range(0, H, LANES):
            part = v_CH.at[pl.ds(c, ROWS), pl.ds(h, LANES)]
            v = plgpu.layout_cast(part[...], plgpu.Layout.WGMMA)
            live = (iota + c >= begin) & (iota + c < end)
            part[...] = jnp.where(live, v, jnp.zeros_like(v))
    plgpu.commit_smem()


def _full(shape: tuple[int, ...], value: float) -> jax.Array:
    layout = plgpu.Layout.WGMMA if len(shape) == 2 else plgpu.Layout.WGMMA.reduce(1)
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)
