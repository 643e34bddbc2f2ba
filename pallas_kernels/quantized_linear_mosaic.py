"""Products with kernels stored in 8 or 4 bits for Hopper, in Pallas' Mosaic GPU dialect."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu

E4M3 = jnp.float8_e4m3fn
LINE = 128  # bytes of swizzled shared memory
WARPGROUPS = 2  # that compute
SWIZZLE = plgpu.SwizzleTransform(LINE)
COMPUTE_REGISTERS, LOAD_REGISTERS = 232, 40


@dataclass(frozen=True)
class TuningConfig:
    block_out: int
    block_rows: int
    chunks: int
    num_stages: int
    programs: int = 132
    promote: bool = False


class _Scratch(NamedTuple):
    weights: Any
    rows: Any
    count: Any
    landed: Any
    consumed: Any


def tiled(dtype: Any) -> Any:
    return (plgpu.TilingTransform((8, LINE // jnp.dtype(dtype).itemsize)), SWIZZLE)


def _scratch(config: TuningConfig, kernel_dtype: Any, rows_dtype: Any) -> _Scratch:
    stages, chunks, N = config.num_stages, config.chunks, config.block_rows
    lanes = LINE // jnp.dtype(rows_dtype).itemsize
    columns = chunks * LINE // jnp.dtype(kernel_dtype).itemsize
    boxes = chunks
    return _Scratch(
        weights=plgpu.SMEM(
            (stages, config.block_out, columns), kernel_dtype, transforms=tiled(kernel_dtype)
        ),
        rows=plgpu.RefUnion(
            plgpu.SMEM((stages, boxes, N, lanes), rows_dtype, transforms=(SWIZZLE,)),
            plgpu.SMEM((stages, boxes, N, lanes), rows_dtype, transforms=tiled(rows_dtype)),
        ),
        count=plgpu.SMEM((WARPGROUPS,), jnp.int32),
        landed=plgpu.Barrier(num_barriers=stages, num_arrivals=1 + boxes),
        consumed=plgpu.Barrier(num_barriers=stages, num_arrivals=WARPGROUPS),
    )


def quantized_linear_mosaic(
    x_TD: jax.Array,
    kernel_FX: jax.Array,
    scale_F: jax.Array,
    row_scale_T: jax.Array,
    *,
    config: TuningConfig,
    dtype: Any = jnp.bfloat16,
) -> jax.Array:
    (T, D), F = x_TD.shape, kernel_FX.shape[0]
    W, N = config.block_out, config.block_rows
    tiles = F // W * pl.cdiv(T, N)
    step = config.chunks * LINE // jnp.dtype(kernel_FX.dtype).itemsize
    assert F % W == 0 and kernel_FX.shape[1] % step == 0
    steps = kernel_FX.shape[1] // step
    arrived = jnp.zeros((tiles * WARPGROUPS,), jnp.int32)
    programs = min(config.programs, tiles * steps)
    out, _ = plgpu.kernel(
        partial(_kernel, config=config),
        out_type=(
            jax.ShapeDtypeStruct((T, F), dtype),
            jax.ShapeDtypeStruct((programs, 2, WARPGROUPS, W // WARPGROUPS, N), jnp.float32),
        ),
        scratch_types=(_scratch(config, kernel_FX.dtype, x_TD.dtype),),
        grid=(programs,),
        grid_names=("program",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(x_TD, kernel_FX, scale_F, row_scale_T, arrived)
    return out


def _kernel(
    x_ref: Any,
    kernel_ref: Any,
    scale_ref: Any,
    row_scale_ref: Any,
    arrived_ref: Any,
    out_ref: Any,
    part_ref: Any,
    scratch: _Scratch,
    *,
    config: TuningConfig,
) -> None:
    T, F = out_ref.shape
    W, N = config.block_out, config.block_rows
    stages, _, columns = scratch.weights.shape
    programs, _, _, B, _ = part_ref.shape
    row_blocks = pl.cdiv(T, N)
    steps = kernel_ref.shape[1] // columns
    total = F // W * row_blocks * steps
    program, wg = lax.axis_index("program"), lax.axis_index("warpgroup")
    begin, end = lax.div(program * total, programs), lax.div((program + 1) * total, programs)
    rows_by_tma, rows = scratch.rows
    lanes = rows.shape[-1]

    @pl.when(wg == WARPGROUPS)
    def load() -> None:
        plgpu.set_max_registers(LOAD_REGISTERS, action="decrease")

        @pl.loop(begin, end)
        def fill(s: Any) -> None:
            n = s - begin
            slot = lax.rem(n, stages)
            tile, k = lax.div(s, steps), lax.rem(s, steps)
            block, row_block = lax.div(tile, row_blocks), lax.rem(tile, row_blocks)

            @pl.when(n >= stages)
            def _() -> None:
                plgpu.barrier_wait(scratch.consumed.at[slot])

            plgpu.copy_gmem_to_smem(
                kernel_ref.at[pl.ds(block * W, W), pl.ds(k * columns, columns)],
                scratch.weights.at[slot],
                scratch.landed.at[slot],
            )
            for c in range(rows.shape[1]):
                plgpu.copy_gmem_to_smem(
                    x_ref.at[
                        pl.ds(row_block * N, N), pl.ds((k * rows.shape[1] + c) * lanes, lanes)
                    ],
                    rows_by_tma.at[slot, c],
                    scratch.landed.at[slot],
                )

    def partial_sum(tile: Any, first: Any, last: Any) -> jax.Array:
        def multiply(acc: Any, slot: Any) -> None:
            for c in range(config.chunks):
                plgpu.wgmma(
                    acc,
                    scratch.weights.at[slot, pl.ds(wg * B, B), pl.ds(c * lanes, lanes)],
                    rows.at[slot, c].transpose((1, 0)),
                )

        if config.promote:

            def step(s: Any, sum_BN: jax.Array) -> jax.Array:
                slot = lax.rem(s - begin, stages)
                plgpu.barrier_wait(scratch.landed.at[slot])

                def one(acc: Any) -> jax.Array:
                    multiply(acc, slot)
                    return acc[...]

                part = pl.run_scoped(one, plgpu.ACC((B, N), jnp.float32))
                plgpu.barrier_arrive(scratch.consumed.at[slot])
                return sum_BN + part

            zero = plgpu.layout_cast(jnp.zeros((B, N), jnp.float32), plgpu.Layout.WGMMA)
            return lax.fori_loop(first, last, step, zero)

        def accumulate(acc: Any) -> jax.Array:
            @pl.loop(first, last)
            def step(s: Any) -> None:
                slot = lax.rem(s - begin, stages)
                plgpu.barrier_wait(scratch.landed.at[slot])
                multiply(acc, slot)
                plgpu.wgmma_wait(config.chunks)

                @pl.when(s > first)
                def _() -> None:
                    plgpu.barrier_arrive(scratch.consumed.at[lax.rem(s - 1 - begin, stages)])

            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(scratch.consumed.at[lax.rem(last - 1 - begin, stages)])
            return acc[...]

        return pl.run_scoped(accumulate, plgpu.ACC((B, N), jnp.float32))

    @pl.when(wg < WARPGROUPS)
    def compute() -> None:
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")

        @pl.loop(lax.div(begin, steps), lax.div(end + (steps - 1), steps))
        def each(tile: Any) -> None:
            tile_begin, tile_end = tile * steps, (tile + 1) * steps
            first, last = jnp.maximum(begin, tile_begin), jnp.minimum(end, tile_end)
            sum_BN = partial_sum(tile, first, last)
            whole = (first == tile_begin) & (last == tile_end)
            one = lax.div((tile_begin + 1) * programs - 1, total)
            other = lax.div(tile_end * programs - 1, total)

            @pl.when(jnp.logical_not(whole))
            def _() -> None:
                to = part_ref.at[program, (first == tile_begin).astype(jnp.int32), wg]
                to[...] = sum_BN
                _arrive(arrived_ref.at[tile * WARPGROUPS + wg], scratch.count.at[wg], other - one)

            @pl.when(whole | (scratch.count[wg] == other - one))
            def _() -> None:
                def add(q: Any, sum_BN: jax.Array) -> jax.Array:
                    own = part_ref.at[q, (q == one).astype(jnp.int32), wg]
                    return sum_BN + plgpu.load(own, layout=plgpu.Layout.WGMMA, optimized=False)

                start_BN = sum_BN * whole.astype(jnp.float32)
                sums = lax.fori_loop(one, jnp.where(whole, one, other + 1), add, start_BN)
                block, row_block = lax.div(tile, row_blocks), lax.rem(tile, row_blocks)
                f = pl.ds(block * W + wg * B, B)
                scale_B = plgpu.load(
                    scale_ref.at[f], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False
                )
                row_scale_N = _load_rows(row_scale_ref, row_block * N, N)
                y = sums * lax.broadcast_in_dim(scale_B, (B, N), (0,))
                y = y * lax.broadcast_in_dim(row_scale_N, (B, N), (1,))
                _store(out_ref.at[:, f], y.astype(out_ref.dtype), row_block * N)


def _index(x: Any) -> Any:
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith

    return arith.index_cast(ir.IndexType.get(), x.registers.flat[0])


def _load_rows(ref: Any, first: Any, N: int) -> jax.Array:
    """Values [N] of rows from `first` on; those behind the last are the last's."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, memref

    layout = plgpu.Layout.WGMMA.reduce(0)
    T = ref.shape[0]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())),
        return_type=plgpu.ShapeDtypeStruct((N,), jnp.float32, layout=layout),
    )
    def load(ctx: Any, ref: Any, first: Any) -> Any:
        zero = arith.constant(ir.F32Type.get(), 0.0)
        start = mgpu.FragmentedArray.splat(zero, (N,), layout.to_mgpu())
        first, limit = _index(first), mgpu.utils.c(T - 1, ir.IndexType.get())

        def one(_: Any, at: Any) -> Any:
            return memref.load(ref, [arith.minui(arith.addi(at[0], first), limit)])

        return start.foreach(one, create_array=True)

    return load(ref, first)


def _store(ref: Any, y_BN: jax.Array, first: Any) -> None:
    """Write [B, N] into [T, B] from row `first` on, but rows behind the last."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, memref

    T = ref.shape[0]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA, plgpu.Layout.WG_SPLAT(())),
        return_type=(),
    )
    def store(ctx: Any, ref: Any, y: Any, first: Any) -> Any:
        first, limit = _index(first), mgpu.utils.c(T, ir.IndexType.get())

        def one(value: Any, at: Any) -> None:
            t = arith.addi(at[1], first)
            with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.ult, t, limit)):
                memref.store(value, ref, [t, at[0]])

        y.foreach(one)
        return ()

    store(ref, y_BN, first)


def _arrive(arrived_ref: Any, count_ref: Any, last: Any) -> None:
    """Count a program whose part is written; its number goes to shared memory."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import memref

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.Layout.WG_SPLAT(())))
    def arrive(ctx: Any, arrived: Any, count: Any, last: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        mgpu.utils.warpgroup_barrier()
        with mgpu.utils.single_thread(scope=mgpu.utils.ThreadSubset.WARPGROUP):
            # Counts from 0 to `last`, then anew.
            number = mgpu.utils.inline_ptx(
                "fence.acq_rel.gpu; atom.inc.relaxed.gpu.global.u32 $0, [$1], $2; fence.acq_rel.gpu;",
                mgpu.utils.memref_ptr(arrived),
                last.registers.flat[0],
                result_types=i32,
                has_side_effects=True,
            )
            memref.store(number, count, [])
        mgpu.utils.warpgroup_barrier()
        return ()

    arrive(arrived_ref, count_ref, last)
