"""Ragged causal flash attention over pages for Hopper, in Pallas' Mosaic GPU dialect.

A block serves all query heads of one KV head for a tile of query tokens of one sequence. Two
warpgroups of 64 rows each compute; a third one brings pages in by TMA, a page of one KV head at a
time, through a ring of blocks of keys and of values. The computing warpgroups take turns: one
multiplies while the other one does its softmax.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.flash import LOG2_E, MASKED, SMALLEST_SUM, Scoring, check_operands
from pallas_kernels.paged_attention_prefill import _tiles

ROWS = 64  # of a warpgroup: what the tensor core's instruction takes
LANES = 64  # elements of half precision in a swizzled line of shared memory
SWIZZLE = plgpu.SwizzleTransform(128)
TILED = (plgpu.TilingTransform((8, LANES)), SWIZZLE)


@dataclass(frozen=True)
class TuningConfig:
    """How the kernel is laid out on the card; never changes what it computes.

    Attributes:
        block_keys: keys folded at once, a multiple of 64 and of the page size.
        num_stages: blocks of keys and of values in flight.
    """

    block_keys: int
    num_stages: int
    overlap: bool = False
    pingpong: bool = True


def tuning_config(*, H: int) -> TuningConfig:
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
    config: TuningConfig | None = None,
    interpret: Any = None,
) -> jax.Array:
    check_operands(q_TNH, pages_P2KSH, page_table_BM, kv_len_B)
    T, N, H = q_TNH.shape
    P, _, K, S, _ = pages_P2KSH.shape
    dtype = q_TNH.dtype
    if dtype != pages_P2KSH.dtype or dtype not in (jnp.bfloat16, jnp.float16):
        raise ValueError(
            f"queries and pages must both be bfloat16 or float16, "
            f"got {dtype} and {pages_P2KSH.dtype}"
        )
    if H not in (64, 128, 256):
        raise ValueError(f"the head dim must be 64, 128 or 256, got {H}")
    if S not in (16, 32, 64):
        raise ValueError(f"the page size must be 16, 32 or 64, got {S}")
    config = config or tuning_config(H=H)
    G = N // K
    tokens = ROWS // G
    # A copy of queries spans a warpgroup's tokens, which the array must not be shorter than.
    q_TKGH = jnp.pad(q_TNH, ((0, max(0, tokens - T)), (0, 0), (0, 0))).reshape(-1, K, G, H)
    tile_X4 = _tiles(
        query_start_B1, kv_len_B, num_decodes, num_seqs, T=q_TKGH.shape[0], tokens=2 * tokens
    )
    ring = plgpu.SMEM((config.num_stages, config.block_keys, H), dtype, transforms=TILED)
    chunks = H // LANES
    pages = config.block_keys // S
    rows = plgpu.RefUnion(
        plgpu.SMEM((2, chunks, ROWS, LANES), dtype, transforms=TILED),
        [
            [
                plgpu.SMEM((tokens, G, LANES), dtype, transforms=(SWIZZLE,))
                for _ in range(chunks)
            ]
            for _ in range(2)
        ],
    )
    landed = plgpu.Barrier(num_barriers=config.num_stages, num_arrivals=pages)
    consumed = plgpu.Barrier(num_barriers=config.num_stages, num_arrivals=2)
    out_TKGH = plgpu.kernel(
        partial(_kernel, scoring=Scoring(scale, window, softcap), config=config),
        out_type=jax.ShapeDtypeStruct(q_TKGH.shape, dtype),
        scratch_types=(
            rows,
            ring,
            ring,
            plgpu.Barrier(num_barriers=2, num_arrivals=chunks),
            landed,
            landed,
            consumed,
            consumed,
            plgpu.Barrier(num_arrivals=2),
        ),
        grid=(tile_X4.shape[0] * K,),
        grid_names=("tile",),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **({} if interpret is None else {"interpret": interpret}),
    )(tile_X4, q_TKGH, pages_P2KSH.reshape(P * 2 * K, S, H), page_table_BM, kv_len_B)
    return out_TKGH[:T].reshape(T, N, H)


def _kernel(
    tile_ref: Any,
    q_ref: Any,
    pages_ref: Any,
    page_table_ref: Any,
    kv_len_ref: Any,
    out_ref: Any,
    rows_smem: Any,
    k_smem: Any,
    v_smem: Any,
    q_landed: Any,
    k_landed: Any,
    v_landed: Any,
    k_consumed: Any,
    v_consumed: Any,
    turn: Any,
    *,
    scoring: Scoring,
    config: TuningConfig,
) -> None:
    _, K, G, H = q_ref.shape
    S = pages_ref.shape[1]
    tokens, block, stages = ROWS // G, config.block_keys, config.num_stages
    pid, warpgroup = lax.axis_index("tile"), lax.axis_index("warpgroup")
    x, k = lax.div(pid, K), lax.rem(pid, K)
    b, row, rows, position = (tile_ref[x, i] for i in range(4))
    last = position + rows - 1
    kv_len = kv_len_ref[b]
    window = scoring.window

    def first_key(position: Any) -> Any:
        return 0 if window is None else jnp.maximum(position - (window - 1), 0)

    begin = 0 if window is None else lax.div(first_key(position), block)
    end = lax.div(last + block, block)

    operand_smem, copy_smems = rows_smem

    @pl.when((rows > 0) & (warpgroup < 2))
    def _compute() -> None:
        plgpu.set_max_registers(232, action="increase")
        first_row = row + warpgroup * tokens
        for w in range(2):

            @pl.when(warpgroup == w)
            def _(w: int = w) -> None:
                for c, smem in enumerate(copy_smems[w]):
                    plgpu.copy_gmem_to_smem(
                        q_ref.at[pl.ds(first_row, tokens), k, :, pl.ds(c * LANES, LANES)],
                        smem,
                        q_landed.at[w],
                    )

        plgpu.barrier_wait(q_landed.at[warpgroup])
        position_w = position + warpgroup * tokens
        out_RH, _, sum_R = _attend(
            operand_smem.at[warpgroup],
            k_smem,
            v_smem,
            k_landed,
            v_landed,
            k_consumed,
            v_consumed,
            turn,
            first=warpgroup == 0,
            position=position_w,
            kv_len=kv_len,
            begin=begin,
            # blocks that all rows see whole
            begin_all=(
                begin
                if window is None
                else jnp.minimum(lax.div(first_key(last) + (block - 1), block), end)
            ),
            end_all=lax.div(jnp.maximum(position + 1, 0), block),
            end=end,
            G=G,
            scoring=scoring,
            config=config,
        )
        out_RH *= lax.broadcast_in_dim(1 / jnp.maximum(sum_R, SMALLEST_SUM), out_RH.shape, [0])
        out_RH = out_RH.astype(q_ref.dtype)
        for c in range(H // LANES):
            operand_smem[warpgroup, c] = out_RH[:, c * LANES : (c + 1) * LANES]
        plgpu.commit_smem()
        rows_w = jnp.clip(rows - warpgroup * tokens, 0, tokens)
        for w in range(2):
            for c, smem in enumerate(copy_smems[w]):
                lanes = pl.ds(c * LANES, LANES)

                @pl.when((warpgroup == w) & (rows_w == tokens))
                def _(smem: Any = smem, lanes: Any = lanes) -> None:
                    plgpu.copy_smem_to_gmem(
                        smem, out_ref.at[pl.ds(first_row, tokens), k, :, lanes]
                    )

                @pl.when((warpgroup == w) & (rows_w < tokens))
                def _(smem: Any = smem, lanes: Any = lanes) -> None:
                    @pl.loop(0, rows_w)
                    def _(t: jax.Array) -> None:
                        plgpu.copy_smem_to_gmem(smem.at[t], out_ref.at[first_row + t, k, :, lanes])

        plgpu.wait_smem_to_gmem(0)

    @pl.when((rows > 0) & (warpgroup == 2))
    def _load() -> None:
        plgpu.set_max_registers(40, action="decrease")

        @pl.loop(begin, end)
        def _(i: jax.Array) -> None:
            slot = lax.rem(i - begin, stages)
            refilled = i - begin >= stages
            # Pages that no row sees are not read: others may hold anything.
            column_J = [
                jnp.clip(i * (block // S) + j, lax.div(first_key(position), S) if window is not None else 0, lax.div(last, S))
                for j in range(block // S)
            ]
            page_J = [(page_table_ref[b, column] * 2) * K + k for column in column_J]
            for offset, smem, landed, consumed in (
                (0, k_smem, k_landed, k_consumed),
                (K, v_smem, v_landed, v_consumed),
            ):

                @pl.when(refilled)
                def _(consumed: Any = consumed) -> None:
                    plgpu.barrier_wait(consumed.at[slot])

                for j, page in enumerate(page_J):
                    plgpu.copy_gmem_to_smem(
                        pages_ref.at[page + offset],
                        smem.at[slot, pl.ds(j * S, S)],
                        landed.at[slot],
                    )


def _attend(
    q_smem: Any,
    k_smem: Any,
    v_smem: Any,
    k_landed: Any,
    v_landed: Any,
    k_consumed: Any,
    v_consumed: Any,
    turn: Any,
    *,
    first: Any,
    position: Any,
    kv_len: Any,
    begin: Any,
    begin_all: Any,
    end_all: Any,
    end: Any,
    G: int,
    scoring: Scoring,
    config: TuningConfig,
) -> Any:
    stages, block, H = k_smem.shape
    dtype = k_smem.dtype
    end_all = jnp.clip(end_all, begin_all, end)

    def take_turn() -> None:
        if config.pingpong:
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(turn)

    def masked(i: Any, score_RC: jax.Array) -> jax.Array:
        # Row r is token r // G: it sees key c if c <= position + r // G.
        iota = partial(
            plgpu.broadcasted_iota, jnp.int32, (ROWS, block), layout=plgpu.Layout.WGMMA
        )
        r_RC, c_RC = iota(0), iota(1)
        key_RC = (c_RC + (i * block - position)) * G
        sees_RC = r_RC >= key_RC
        if scoring.window is not None:
            sees_RC &= r_RC < key_RC + scoring.window * G
        return jnp.where(sees_RC, score_RC, MASKED)

    def clean(i: Any, slot: Any) -> None:
        # Slots beyond the sequence may hold anything, NaN included. Both warpgroups do this,
        # with the same result.
        @pl.when((i + 1) * block > kv_len)
        def _() -> None:
            for r in range(0, block, 64):
                for c in range(0, H, LANES):
                    ref = v_smem.at[slot, pl.ds(r, 64), pl.ds(c, LANES)]
                    v = plgpu.load(ref, layout=plgpu.Layout.WGMMA)
                    key = plgpu.broadcasted_iota(
                        jnp.int32, (64, LANES), 0, layout=plgpu.Layout.WGMMA
                    ) + (i * block + r)
                    ref[...] = jnp.where(key < kv_len, v, jnp.zeros_like(v))
            plgpu.commit_smem()

    def scores(slot: Any) -> jax.Array:
        def multiply(acc: Any) -> jax.Array:
            for c in range(H // LANES):
                plgpu.wgmma(
                    acc,
                    q_smem.at[c],
                    k_smem.at[slot, :, pl.ds(c * LANES, LANES)].transpose((1, 0)),
                )
            take_turn()
            return acc[...]

        return pl.run_scoped(multiply, plgpu.ACC((ROWS, block), jnp.float32))

    def fold(i: Any, carry: Any, *, mask: bool) -> Any:
        out_RH, max_R, sum_R = carry
        slot = lax.rem(i - begin, stages)
        score_RC = scores(slot)
        plgpu.barrier_arrive(k_consumed.at[slot])
        if scoring.softcap is not None:
            score_RC = jnp.tanh(score_RC * (scoring.scale / scoring.softcap))
            factor = scoring.softcap * LOG2_E
        else:
            factor = scoring.scale * LOG2_E
        if mask:
            score_RC = masked(i, score_RC)
        new_max_R = jnp.maximum(max_R, score_RC.max(axis=1) * factor)
        decay_R = jnp.exp2(max_R - new_max_R)
        weight_RC = jnp.exp2(
            score_RC * factor - lax.broadcast_in_dim(new_max_R, score_RC.shape, [0])
        )
        out_RH *= lax.broadcast_in_dim(decay_R, out_RH.shape, [0])
        sum_R *= decay_R
        weight16_RC = weight_RC.astype(dtype)
        sum_R += weight_RC.sum(axis=1)
        out_RH, sum_R, new_max_R, weight16_RC = lax.optimization_barrier(
            (out_RH, sum_R, new_max_R, weight16_RC)
        )
        if config.pingpong:
            plgpu.barrier_arrive(turn)
        plgpu.barrier_wait(v_landed.at[slot])
        if mask:
            clean(i, slot)
        if config.pingpong:
            plgpu.barrier_wait(turn)

        def multiply(acc: Any) -> None:
            plgpu.wgmma(acc, weight16_RC, v_smem.at[slot])

            @pl.when(i + 1 < end)
            def _() -> None:
                plgpu.barrier_wait(k_landed.at[lax.rem(i + 1 - begin, stages)])

        out_RH = pl.run_state(multiply)(plgpu.ACC.init(out_RH))
        plgpu.barrier_arrive(v_consumed.at[slot])
        return out_RH, new_max_R, sum_R

    def full(shape: tuple[int, ...], value: float, layout: Any) -> jax.Array:
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    carry = (
        full((ROWS, H), 0, plgpu.Layout.WGMMA),
        full((ROWS,), MASKED, plgpu.Layout.WGMMA.reduce(1)),
        full((ROWS,), 0, plgpu.Layout.WGMMA.reduce(1)),
    )

    @pl.when(begin < end)
    def _() -> None:
        plgpu.barrier_wait(k_landed.at[0])

    pl.when(jnp.logical_not(first))(take_turn)
    if scoring.window is not None:
        carry = lax.fori_loop(begin, begin_all, partial(fold, mask=True), carry)
    carry = lax.fori_loop(begin_all, end_all, partial(fold, mask=False), carry)
    carry = lax.fori_loop(end_all, end, partial(fold, mask=True), carry)
    pl.when(first)(take_turn)
    return carry
