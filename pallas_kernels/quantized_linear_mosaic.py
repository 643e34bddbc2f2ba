"""Products with kernels stored in 8 or 4 bits for Hopper, in Pallas' Mosaic GPU dialect.

The kernel is the left operand, [outputs, terms], as in quantized_linear. One warpgroup brings its
tiles and those of the rows in by TMA, through a ring that takes most of the shared memory; the
others multiply: 8-bit floats by 8-bit floats from shared memory, integers after they were widened
in registers. The steps of all blocks' sums lie in a row, of which each multiprocessor has an equal
part, so none waits for others. A sum that several had a part of is added up by the one that comes
last, always in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, scf, vector

from pallas_kernels.product_parts import ACTIVATIONS, result_shapes
from pallas_kernels.rms_norm import HalfNormed, Rows

E4M3 = jnp.float8_e4m3fn
PROGRAMS = 132  # multiprocessors of an H100 or H200
PACKED = 4  # weights of four bits in an element, the first in the lowest bits
RUN = 64  # terms of which the first, second, third and last sixteen share elements
LINE = 128  # bytes of swizzled shared memory
WARPGROUPS = 2  # that multiply
SWIZZLE = plgpu.SwizzleTransform(LINE)
# A warpgroup's registers a thread; the three share 64 Ki.
COMPUTE_REGISTERS, LOAD_REGISTERS = 232, 40
PARTS = 2  # of a sum that are read at once
PREFETCH = 2  # steps that scales of groups are asked for ahead
WGMMA = plgpu.Layout.WGMMA
SPLAT = plgpu.Layout.WG_SPLAT(())

# Weights of two elements, as 16-bit floats: put under the bits of 128 (bfloat16) or 1024 (float16)
# they make that plus the weight; `less` is that and what is subtracted, negated.
_UNPACK = """{{
    .reg .b32 a, one;
    mov.b32 one, {one};
    shr.u32 a, $1, {shift};
    lop3.b32 a, a, 0x000F000F, {base}, 0xEA;
    fma.rn.{type}x2 $0, a, one, $2;
}}"""
_CONSTANTS = {
    "bfloat16": {"type": "bf16", "base": 0x43004300, "one": 0x3F803F80},
    "float16": {"type": "f16", "base": 0x64006400, "one": 0x3C003C00},
}
_BASE = {"bfloat16": 128, "float16": 1024}


@dataclass(frozen=True)
class TuningConfig:
    """How a product is laid out on the card.

    Attributes:
        block_out: outputs of a block, a multiple of 128.
        block_rows: rows of a block, a multiple of 8 to 256.
        chunks: lines of 128 bytes of an output's weights in a step.
        num_stages: steps in flight.
        cluster: programs that read the rows together, each for outputs of its own.
        programs: that share the work.
    """

    block_out: int
    block_rows: int
    chunks: int
    num_stages: int
    cluster: int = 1
    programs: int = PROGRAMS
    promote: bool = False


class _Scratch(NamedTuple):
    """Shared memory and barriers of a program."""

    weights: Any  # two views: see `_scratch`
    rows: Any
    count: Any  # per warpgroup: programs that came before
    square: Any  # per warpgroup
    landed: Any  # per stage
    consumed: Any


def _scratch(config: TuningConfig, kernel_dtype: Any, rows_dtype: Any, gated: bool) -> _Scratch:
    """What `_kernel` is given.

    One view of a tile is for the tensor core, the other one for TMA: lines in the same order,
    swizzled by their addresses alone.
    """

    def tiles(chunks: int, lines: tuple[int, ...], dtype: Any) -> plgpu.RefUnion:
        lanes = LINE // jnp.dtype(dtype).itemsize
        tiled = (plgpu.TilingTransform((8, lanes)), SWIZZLE)
        shape = (config.num_stages, chunks)
        return plgpu.RefUnion(
            plgpu.SMEM((*shape, *lines, lanes), dtype, transforms=(SWIZZLE,)),
            plgpu.SMEM((*shape, int(np.prod(lines)), lanes), dtype, transforms=tiled),
        )

    W, stages = config.block_out, config.num_stages
    consumed: Any = plgpu.Barrier(num_barriers=stages, num_arrivals=WARPGROUPS)
    if config.cluster > 1:
        consumed = plgpu.ClusterBarrier(
            collective_axes=("cluster",), num_barriers=stages, num_arrivals=WARPGROUPS
        )
    terms = LINE // jnp.dtype(kernel_dtype).itemsize * packed_in(kernel_dtype)
    boxes = config.chunks * terms * jnp.dtype(rows_dtype).itemsize // LINE
    return _Scratch(
        weights=tiles(config.chunks, (W // 16, 2, 8) if gated else (W,), kernel_dtype),
        rows=tiles(boxes, (config.block_rows,), rows_dtype),
        count=plgpu.SMEM((WARPGROUPS,), jnp.int32),
        square=plgpu.SMEM((WARPGROUPS, 128), jnp.float32),
        landed=plgpu.Barrier(num_barriers=stages, num_arrivals=config.chunks + boxes),
        consumed=consumed,
    )


def packed_in(dtype: Any) -> int:
    """Weights in an element."""
    return PACKED if dtype == jnp.uint16 else 1


def quantized_linear_mosaic(
    x: jax.Array | HalfNormed,
    kernel_FX: jax.Array,
    scale: jax.Array,
    *,
    zero_GF: jax.Array | None = None,
    row_scale_T: jax.Array | None = None,
    eps: float = 0.0,
    bias_F: jax.Array | None = None,
    activation: str | None = None,
    residual_TF: jax.Array | None = None,
    next_scale_F: jax.Array | None = None,
    dtype: Any = None,
    config: TuningConfig | None = None,
) -> Rows:
    x_TD, square_XT = x if isinstance(x, HalfNormed) else (x, None)
    (T, D), F = x_TD.shape, kernel_FX.shape[0]
    groups = scale.shape[0] if scale.ndim == 2 else 1
    if dtype is None:
        dtype = jnp.bfloat16 if x_TD.dtype == E4M3 else x_TD.dtype
    assert config is not None
    W, N, gated = config.block_out, config.block_rows, activation is not None
    columns = F // 2 if gated else F
    step = config.chunks * LINE // jnp.dtype(kernel_FX.dtype).itemsize
    cluster = config.cluster
    tiles, steps = F // (W * cluster) * pl.cdiv(T, N), kernel_FX.shape[1] // step
    assert F % (W * cluster) == 0 and kernel_FX.shape[1] % step == 0
    programs = min(config.programs // cluster, tiles * steps)
    given: dict[str, Any] = {
        "x": x_TD,
        "kernel": kernel_FX.reshape(2, F // 16, 8, -1) if gated else kernel_FX,
        "scale": scale.reshape(groups, F),
        "row_scale": row_scale_T,
        "zero": zero_GF,
        "square": square_XT,
        "bias": bias_F,
        "residual": residual_TF,
        "next_scale": next_scale_F,
        # One array serves all calls of a program: each leaves it as it was.
        "arrived": jnp.zeros((tiles * cluster * WARPGROUPS,), jnp.int32),
    }
    operands = {name: x for name, x in given.items() if x is not None}
    outs = result_shapes(
        (T, columns), dtype, blocks=F // W * WARPGROUPS, begins_norm=next_scale_F is not None
    )
    part = (programs, 2, cluster, WARPGROUPS, W // WARPGROUPS * N // 512, 128, 4)
    outs["part"] = jax.ShapeDtypeStruct(part, jnp.float32)
    results = plgpu.kernel(
        partial(
            _kernel, names=(*operands, *outs), eps=eps, activation=activation, config=config
        ),
        out_type=tuple(outs.values()),
        scratch_types=(_scratch(config, kernel_FX.dtype, x_TD.dtype, gated),),
        grid=(programs,),
        grid_names=("program",),
        cluster=(cluster,) if cluster > 1 else (),
        cluster_names=("cluster",) if cluster > 1 else (),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        kernel_name="quantized_linear",
    )(*operands.values())
    found = dict(zip(outs, results, strict=True))
    half = HalfNormed(found["next"], found["next_square"]) if "next" in found else None
    return Rows(found["out"], half)


def _kernel(
    *refs: Any,
    names: tuple[str, ...],
    eps: float,
    activation: str | None,
    config: TuningConfig,
) -> None:
    scratch: _Scratch
    *refs, scratch = refs  # type: ignore[assignment]
    ref = dict(zip(names, refs, strict=True))
    (T, columns), gated = ref["out"].shape, activation is not None
    F = columns * 2 if gated else columns
    W, N = config.block_out, config.block_rows
    programs, cluster, B = ref["part"].shape[0], config.cluster, W // WARPGROUPS
    row_blocks = pl.cdiv(T, N)
    _, weights = scratch.weights
    steps = ref["kernel"].shape[-1] // (config.chunks * weights.shape[-1])
    total = F // (W * cluster) * row_blocks * steps
    member = lax.axis_index("cluster") if cluster > 1 else 0
    program, wg = lax.axis_index("program"), lax.axis_index("warpgroup")
    begin, end = lax.div(program * total, programs), lax.div((program + 1) * total, programs)

    @pl.when(wg == WARPGROUPS)
    def load() -> None:
        plgpu.set_max_registers(LOAD_REGISTERS, action="decrease")
        _load(scratch, ref, begin, end, steps, row_blocks, cluster, member)

    @pl.when(wg < WARPGROUPS)
    def compute() -> None:
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")

        @pl.loop(lax.div(begin, steps), lax.div(end + (steps - 1), steps))
        def each(tile: Any) -> None:
            tile_begin, tile_end = tile * steps, (tile + 1) * steps
            first, last = jnp.maximum(begin, tile_begin), jnp.minimum(end, tile_end)
            block, row_block = lax.div(tile, row_blocks), lax.rem(tile, row_blocks)
            place = _Place((block * cluster + member) * W + wg * B, columns, gated)
            part = _Slice(first, last, begin, tile_begin)
            if ref["kernel"].dtype == E4M3:
                sum_BN = _sum_floats(scratch, part, wg, B, promote=config.promote)
            else:
                sum_BN = _sum_integers(scratch, ref, part, wg, B, place)
            whole = (first == tile_begin) & (last == tile_end)
            # The programs that have a part of it, and how many there may be.
            one = lax.div((tile_begin + 1) * programs - 1, total)
            other = lax.div(tile_end * programs - 1, total)
            most = min((steps - 2) // (total // programs) + 2, programs)
            count, others = scratch.count.at[wg], other - one

            @pl.when(jnp.logical_not(whole))
            def hand_over() -> None:
                arrived = ref["arrived"].at[(tile * cluster + member) * WARPGROUPS + wg]
                # Whoever begins a block does so at last: the others may well be through.
                _look(arrived, count, others, first == tile_begin)

                @pl.when(count[...] != others)
                def _() -> None:
                    own = (first == tile_begin).astype(jnp.int32)
                    _store_part(ref["part"].at[program, own, member, wg], sum_BN)
                    _arrive(arrived, count, others)

            @pl.when(whole | (count[...] == others))
            def finish() -> None:
                def add(i: Any, all_BN: jax.Array) -> jax.Array:
                    for q in [one + i * PARTS + j for j in range(PARTS)]:
                        at = jnp.minimum(q, other)
                        part = ref["part"].at[at, (at == one).astype(jnp.int32), member, wg]
                        all_BN = _add_part(all_BN, part, sum_BN, q == program, q <= other)
                    return all_BN

                if most > 1:
                    all_BN = sum_BN * whole.astype(jnp.float32)
                    ends = jnp.where(whole, 0, lax.div(others + PARTS, PARTS))
                    all_BN = lax.fori_loop(0, ends, add, all_BN)
                else:
                    all_BN = sum_BN
                _finish(all_BN, ref, scratch, place, row_block * N, wg, eps, activation)


class _Place(NamedTuple):
    """Where outputs of a warpgroup lie: of sixteen with a gate eight are gates, eight their ups."""

    first: Any
    columns: int
    gated: bool


class _Slice(NamedTuple):
    """Steps of a tile that a program takes."""

    first: Any
    last: Any
    begin: Any  # of the program
    tile_begin: Any


def _load(
    scratch: _Scratch,
    ref: dict[str, Any],
    begin: Any,
    end: Any,
    steps: int,
    row_blocks: int,
    cluster: int,
    member: Any,
) -> None:
    """Keep the ring filled."""
    weights, tiled = scratch.weights
    rows, _ = scratch.rows
    stages, chunks, W, lanes = tiled.shape
    _, boxes, N, row_lanes = rows.shape

    @pl.loop(begin, end)
    def fill(s: Any) -> None:
        slot = lax.rem(s - begin, stages)
        tile, k = lax.div(s, steps), lax.rem(s, steps)
        block, row_block = lax.div(tile, row_blocks), lax.rem(tile, row_blocks)
        block = block * cluster + member
        landed = scratch.landed.at[slot]

        @pl.when(s - begin >= stages)
        def _() -> None:
            plgpu.barrier_wait(scratch.consumed.at[slot])

        for c in range(chunks):
            x = pl.ds((k * chunks + c) * lanes, lanes)
            to = weights.at[slot, c]
            if weights.ndim > 4:
                source = ref["kernel"].at[:, pl.ds(block * (W // 16), W // 16), :, x]
                to = to.transpose((1, 0, 2, 3))
            else:
                source = ref["kernel"].at[pl.ds(block * W, W), x]
            plgpu.copy_gmem_to_smem(source, to, landed)
        for c in range(boxes):
            # Rows behind the last come as zeros.
            source = ref["x"].at[
                pl.ds(row_block * N, N), pl.ds((k * boxes + c) * row_lanes, row_lanes)
            ]
            plgpu.copy_gmem_to_smem(
                source,
                rows.at[slot, c],
                landed,
                collective_axes=("cluster",) if cluster > 1 else None,
            )

    if cluster > 1:
        # Others' word that they are through must find this program still there.
        @pl.loop(jnp.maximum(begin, end - stages), end)
        def drain(s: Any) -> None:
            plgpu.barrier_wait(scratch.consumed.at[lax.rem(s - begin, stages)])


def _sum_floats(scratch: _Scratch, part: _Slice, wg: Any, B: int, promote: bool) -> jax.Array:
    """Of 8-bit floats with such."""
    (_, weights), (_, rows) = scratch.weights, scratch.rows
    stages, chunks, _, _ = weights.shape
    N = rows.shape[2]

    def multiply(acc: Any, slot: Any) -> None:
        for c in range(chunks):
            kernel = weights.at[slot, c, pl.ds(wg * B, B)]
            plgpu.wgmma(acc, kernel, rows.at[slot, c].transpose((1, 0)))

    def slot_of(s: Any) -> Any:
        return lax.rem(s - part.begin, stages)

    if promote:

        def step(s: Any, sum_BN: jax.Array) -> jax.Array:
            plgpu.barrier_wait(scratch.landed.at[slot_of(s)])

            def one(acc: Any) -> jax.Array:
                multiply(acc, slot_of(s))
                return acc[...]

            new_BN = pl.run_scoped(one, plgpu.ACC((B, N), jnp.float32))
            plgpu.barrier_arrive(scratch.consumed.at[slot_of(s)])
            return sum_BN + new_BN

        return lax.fori_loop(part.first, part.last, step, _zeros(B, N))

    def accumulate(acc: Any) -> jax.Array:
        @pl.loop(part.first, part.last)
        def step(s: Any) -> None:
            plgpu.barrier_wait(scratch.landed.at[slot_of(s)])
            multiply(acc, slot_of(s))
            plgpu.wgmma_wait(chunks)  # for those of the step before

            @pl.when(s > part.first)
            def _() -> None:
                plgpu.barrier_arrive(scratch.consumed.at[slot_of(s - 1)])

        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(scratch.consumed.at[slot_of(part.last - 1)])
        return acc[...]

    return pl.run_scoped(accumulate, plgpu.ACC((B, N), jnp.float32))


def _sum_integers(
    scratch: _Scratch, ref: dict[str, Any], part: _Slice, wg: Any, B: int, place: _Place
) -> jax.Array:
    """Of integers, widened in registers; those of a group are scaled as they come out."""
    (_, weights), (_, rows) = scratch.weights, scratch.rows
    stages, chunks, _, lanes = weights.shape
    _, boxes, N, _ = rows.shape
    dtype, packed = rows.dtype, packed_in(weights.dtype)
    D, groups = ref["x"].shape[1], ref["scale"].shape[0]
    terms = chunks * lanes * packed
    group = D // groups
    runs = min(terms, group) // RUN  # of a group in a step
    parts = terms // RUN // runs
    bands = B // 64

    def scales(s: Any) -> tuple[jax.Array, ...]:
        """And zeros, of each group of a step and each 64 outputs."""
        found = []
        for p in range(parts):
            g = lax.div((s - part.tile_begin) * terms, group) + p
            for m in range(bands):
                at = place._replace(first=place.first + m * 64)
                if groups > 1:
                    found.append(_load_outputs(ref["scale"].at[g], at, 64))
                if "zero" in ref:
                    found.append(_load_outputs(ref["zero"].at[g], at, 64))
        return tuple(found)

    def step(s: Any, carry: Any) -> Any:
        sums, ahead = carry
        slot = lax.rem(s - part.begin, stages)
        current = list(ahead[0])
        ahead = (*ahead[1:], scales(jnp.minimum(s + PREFETCH, part.last - 1)))
        plgpu.barrier_wait(scratch.landed.at[slot])
        layout = WGMMA if packed > 1 else plgpu.Layout.WGMMA_UPCAST_2X
        words = {
            (m, c): plgpu.load(weights.at[slot, c, pl.ds(wg * B + m * 64, 64)], layout=layout)
            for m in range(bands)
            for c in range(chunks)
        }

        def widened(m: int, run: int, zero: jax.Array | None) -> jax.Array:
            c, at = divmod(run * RUN, lanes * packed)
            if packed > 1:
                return _unpack(words[m, c], at // RUN, zero, dtype)
            wide = plgpu.layout_cast(words[m, c], WGMMA)[:, at : at + RUN].astype(dtype)
            return wide if zero is None else wide - zero

        new = list(sums)
        units = [(p, m) for p in range(parts) for m in range(bands)]
        given = []
        for _ in units:
            scale = current.pop(0) if groups > 1 else None
            zero = current.pop(0) if "zero" in ref else None
            if zero is not None:
                width = 16 if packed > 1 else RUN
                zero = lax.broadcast_in_dim(zero.astype(dtype), (64, width), (0,))
            given.append((scale, zero))
        at_once = 2 if N <= 64 else 1
        for u in range(0, len(units), at_once):
            some = units[u : u + at_once]

            def multiply(*accs: Any, u: int = u, some: Any = some) -> list[jax.Array]:
                for i, (p, m) in enumerate(some):
                    for run in range(p * runs, (p + 1) * runs):
                        left = widened(m, run, given[u + i][1])
                        plgpu.wgmma(accs[i], left, rows.at[slot, run].transpose((1, 0)))
                last = len(some) - 1
                return [
                    plgpu.wgmma_accumulator_load(acc, wait_n=runs * (last - i))
                    for i, acc in enumerate(accs)
                ]

            found = pl.run_scoped(multiply, *(plgpu.ACC((64, N), jnp.float32) for _ in some))
            for i, (_, m) in enumerate(some):
                scale, sum_MN = given[u + i][0], found[i]
                if scale is not None:
                    sum_MN *= lax.broadcast_in_dim(scale, (64, N), (0,))
                new[m] = new[m] + sum_MN
        plgpu.barrier_arrive(scratch.consumed.at[slot])
        return tuple(new), ahead

    ahead = tuple(scales(jnp.minimum(part.first + i, part.last - 1)) for i in range(PREFETCH))
    sums, _ = lax.fori_loop(
        part.first, part.last, step, (tuple(_zeros(64, N) for _ in range(bands)), ahead)
    )
    return sums[0] if bands == 1 else _stack(sums)


def _finish(
    sum_BN: jax.Array,
    ref: dict[str, Any],
    scratch: _Scratch,
    place: _Place,
    t: Any,
    wg: Any,
    eps: float,
    activation: str | None,
) -> None:
    """From whole sums to results."""
    B, N = sum_BN.shape
    out = ref["out"]
    along_rows = partial(lax.broadcast_in_dim, shape=(B, N), broadcast_dimensions=(1,))
    along_outputs = partial(lax.broadcast_in_dim, shape=(B, N), broadcast_dimensions=(0,))
    if ref["scale"].shape[0] == 1:
        sum_BN *= along_outputs(_load_outputs(ref["scale"].at[0], place, B))
    if "row_scale" in ref:
        sum_BN *= along_rows(_load_rows(ref["row_scale"], t, N))
    if "square" in ref:
        square_N = _row_squares(ref["square"], scratch.square.at[wg], t, N)
        sum_BN *= along_rows(lax.rsqrt(square_N / ref["x"].shape[1] + eps))
    if "bias" in ref:
        sum_BN += along_outputs(_load_outputs(ref["bias"], place, B).astype(jnp.float32))
    if activation is not None:
        gate, up = (_half(sum_BN, half) for half in (0, 1))
        sum_BN = ACTIVATIONS[activation](gate) * up
    if "residual" in ref:
        sum_BN += _load_block(ref["residual"], place, t, (B, N)).astype(jnp.float32)
    y_BN = sum_BN.astype(out.dtype)
    _store_block(out, y_BN, place, t)
    if "next_scale" in ref:
        factor = _load_outputs(ref["next_scale"], place, B).astype(jnp.float32)
        wide_BN = y_BN.astype(jnp.float32)
        scaled_BN = wide_BN * along_outputs(factor)
        _store_block(ref["next"], scaled_BN.astype(out.dtype), place, t)
        square_N = (wide_BN * wide_BN).sum(axis=0)
        _store_rows(ref["next_square"].at[lax.div(place.first, B)], square_N, t)


def _zeros(*shape: int) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), WGMMA)


# What follows are the dialect's own operations: each thread computes where its elements lie.


def _index(x: Any) -> Any:
    return arith.index_cast(ir.IndexType.get(), x.registers.flat[0])


def _constant(x: int) -> Any:
    return mgpu.utils.c(x, ir.IndexType.get())


def _output(row: Any, first: Any, place: _Place) -> Any:
    """The output of a warpgroup's row."""
    if not place.gated:
        return arith.addi(first, row)
    c = _constant
    band, at = arith.divui(row, c(16)), arith.remui(row, c(16))
    half, at = arith.divui(at, c(8)), arith.remui(at, c(8))
    f = arith.addi(arith.divui(first, c(2)), arith.addi(arith.muli(band, c(8)), at))
    return arith.addi(f, arith.muli(half, c(place.columns)))


def _is_result(row: Any, place: _Place) -> Any:
    """Whether a row's result is stored: that of a gate and its up is with both."""
    c = _constant
    return arith.cmpi(arith.CmpIPredicate.ult, arith.remui(row, c(16)), c(8))


def _elementwise(
    ref: Any, shape: tuple[int, ...], layout: Any, at: Callable[..., Any], *scalars: Any
) -> jax.Array:
    """An array of the elements of `ref` at indices that `at` has of an element's own and scalars'."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), *(SPLAT for _ in scalars)),
        return_type=plgpu.ShapeDtypeStruct(shape, ref.dtype, layout=layout),
    )
    def load(_: Any, ref: Any, *scalars: Any) -> Any:
        element = ir.MemRefType(ref.type).element_type
        signed = True if isinstance(element, ir.IntegerType) else None
        attr = ir.IntegerAttr.get(element, 0) if signed else ir.FloatAttr.get(element, 0.0)
        zero = mgpu.FragmentedArray.splat(
            arith.constant(element, attr), shape, layout.to_mgpu(), is_signed=signed
        )
        indices = [_index(x) for x in scalars]
        return zero.foreach(
            lambda _, i: memref.load(ref, at(i, *indices)), create_array=True, is_signed=signed
        )

    return load(ref, *scalars)


def _load_outputs(ref: Any, place: _Place, B: int) -> jax.Array:
    """Values [B] of a warpgroup's outputs."""
    return _elementwise(
        ref, (B,), WGMMA.reduce(1), lambda i, first: [_output(i[0], first, place)], place.first
    )


def _load_rows(ref: Any, first: Any, N: int) -> jax.Array:
    """Values [N] of rows from `first` on; those behind the last are the last's."""
    last = ref.shape[0] - 1

    def at(i: Any, first: Any) -> list[Any]:
        return [arith.minui(arith.addi(i[0], first), _constant(last))]

    return _elementwise(ref, (N,), WGMMA.reduce(0), at, first)


def _load_block(ref: Any, place: _Place, first: Any, shape: tuple[int, int]) -> jax.Array:
    """Of [T, outputs] a block [B, N], from row `first` on; those behind the last are the last's."""
    last = ref.shape[0] - 1

    def at(i: Any, output: Any, first: Any) -> list[Any]:
        t = arith.minui(arith.addi(i[1], first), _constant(last))
        return [t, _output(i[0], output, place)]

    return _elementwise(ref, shape, WGMMA, at, place.first, first)


def _store_block(ref: Any, y_BN: jax.Array, place: _Place, first: Any) -> None:
    """The opposite; rows behind the last are not stored."""
    T = ref.shape[0]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), WGMMA, SPLAT, SPLAT))
    def store(_: Any, ref: Any, y: Any, output: Any, first: Any) -> Any:
        output, first = _index(output), _index(first)

        def one(value: Any, i: Any) -> None:
            t = arith.addi(i[1], first)
            live = arith.cmpi(arith.CmpIPredicate.ult, t, _constant(T))
            if place.gated:
                live = arith.andi(live, _is_result(i[0], place))
            with mgpu.utils.when(live):
                memref.store(value, ref, [t, _output(i[0], output, place)])

        y.foreach(one)
        return ()

    store(ref, y_BN, place.first, first)


def _store_rows(ref: Any, y_N: jax.Array, first: Any) -> None:
    """Values of rows from `first` on."""
    T = ref.shape[0]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), WGMMA.reduce(0), SPLAT))
    def store(_: Any, ref: Any, y: Any, first: Any) -> Any:
        first = _index(first)

        def one(value: Any, i: Any) -> None:
            t = arith.addi(i[0], first)
            with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.ult, t, _constant(T))):
                memref.store(value, ref, [t])

        y.foreach(one)
        return ()

    store(ref, y_N, first)


def _row_squares(square_ref: Any, smem: Any, first: Any, N: int) -> jax.Array:
    """Sums [N] of the squares [X, T] of rows from `first` on; threads share out the parts."""
    X, T = square_ref.shape
    layout, shares = WGMMA.reduce(0), 128 // N

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), SPLAT),
        return_type=plgpu.ShapeDtypeStruct((N,), jnp.float32, layout=layout),
    )
    def add(_: Any, square: Any, smem: Any, first: Any) -> Any:
        f32, c = ir.F32Type.get(), _constant
        thread = _thread()
        share, n = arith.divui(thread, c(N)), arith.remui(thread, c(N))
        t = arith.minui(arith.addi(n, _index(first)), c(T - 1))
        zero = arith.constant(f32, ir.FloatAttr.get(f32, 0.0))
        at_once = 8
        loop = scf.ForOp(share, c(X), c(at_once * shares), [zero])
        with ir.InsertionPoint(loop.body):
            (total,) = loop.inner_iter_args
            for i in range(at_once):
                x = arith.addi(loop.induction_variable, c(i * shares))
                value = memref.load(square, [arith.minui(x, c(X - 1)), t])
                live = arith.cmpi(arith.CmpIPredicate.ult, x, c(X))
                total = arith.addf(total, arith.select(live, value, zero))
            scf.yield_([total])
        memref.store(loop.results[0], smem, [thread])
        mgpu.utils.warpgroup_barrier()

        def one(_: Any, i: Any) -> Any:
            total = memref.load(smem, [i[0]])
            for other in range(1, shares):
                value = memref.load(smem, [arith.addi(i[0], c(other * N))])
                total = arith.addf(total, value)
            return total

        sums = mgpu.FragmentedArray.splat(zero, (N,), layout.to_mgpu()).foreach(
            one, create_array=True
        )
        mgpu.utils.warpgroup_barrier()
        return sums

    return add(square_ref, smem, first)


def _half(x_BN: jax.Array, half: int) -> jax.Array:
    """Of every sixteen rows the first or the last eight, in both places."""

    @plgpu.inline_mgpu(
        arg_types=(WGMMA,), return_type=plgpu.ShapeDtypeStruct(x_BN.shape, x_BN.dtype, layout=WGMMA)
    )
    def pick(_: Any, x: Any) -> Any:
        # A thread has the same elements of both, along the axis of two.
        taken = np.repeat(x.registers[:, :, :, :, half : half + 1], 2, axis=4)
        return mgpu.FragmentedArray(_registers=taken, _layout=x.layout, _is_signed=None)

    return pick(x_BN)


def _stack(bands: tuple[jax.Array, ...]) -> jax.Array:
    """[64, N] each, one below the other."""
    N = bands[0].shape[1]
    shape = (64 * len(bands), N)

    @plgpu.inline_mgpu(
        arg_types=tuple(WGMMA for _ in bands),
        return_type=plgpu.ShapeDtypeStruct(shape, bands[0].dtype, layout=WGMMA),
    )
    def stack(_: Any, *bands: Any) -> Any:
        registers = np.concatenate([band.registers for band in bands], axis=0)
        return mgpu.FragmentedArray(
            _registers=registers, _layout=bands[0].layout, _is_signed=None
        )

    return stack(*bands)


def _unpack(words: jax.Array, run: int, zero: jax.Array | None, dtype: Any) -> jax.Array:
    """[64, RUN] of words [64, X]: each part's elements lie as the tensor core wants them."""
    name = jnp.dtype(dtype).name
    less = jnp.full((64, 16), -(_BASE[name] + 8), dtype)
    less = plgpu.layout_cast(less, WGMMA) if zero is None else -zero - (_BASE[name] + 8)

    @plgpu.inline_mgpu(
        arg_types=(WGMMA, WGMMA),
        return_type=plgpu.ShapeDtypeStruct((64, RUN), dtype, layout=WGMMA),
    )
    def unpack(_: Any, words: Any, less: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        pair = ir.VectorType.get((2,), less.mlir_dtype)

        def bits(x: Any) -> Any:
            return mgpu.utils.bitcast(x, i32)

        out = np.empty(less.layout.registers_shape((64, RUN)), dtype=object)
        for index in np.ndindex(out.shape):
            m, column, *rest = index
            part, half = divmod(column, 2)
            source = words.registers[(m, 2 * run + half, *rest)]
            wide = llvm.inline_asm(
                i32,
                [bits(source), bits(less.registers[(m, 0, *rest)])],
                _UNPACK.format(shift=4 * part, **_CONSTANTS[name]),
                "=r,r,r",
            )
            out[index] = mgpu.utils.bitcast(wide, pair)
        return mgpu.FragmentedArray(_registers=out, _layout=less.layout, _is_signed=None)

    return unpack(words, less)


def _store_part(part_ref: Any, sum_BN: jax.Array) -> None:
    """A sum as the threads have it: [X, threads, 4]."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), WGMMA))
    def store(_: Any, part: Any, y: Any) -> Any:
        halves, at = list(y.registers.flat), [_thread(), _constant(0)]
        for i in range(0, len(halves), 2):
            four = mgpu.utils.vector_concat(halves[i : i + 2])
            vector.store(four, part, [_constant(i // 2), *at])
        return ()

    store(part_ref, sum_BN)


def _add_part(
    all_BN: jax.Array, part_ref: Any, own_BN: jax.Array, is_own: jax.Array, is_one: jax.Array
) -> jax.Array:
    """all + part, or + own if `is_own`, or as it is if not `is_one`."""

    @plgpu.inline_mgpu(
        arg_types=(WGMMA, plgpu.RefType(), WGMMA, SPLAT, SPLAT),
        return_type=plgpu.ShapeDtypeStruct(all_BN.shape, jnp.float32, layout=WGMMA),
    )
    def add(_: Any, y: Any, part: Any, own: Any, is_own: Any, is_one: Any) -> Any:
        is_own, is_one = is_own.registers.flat[0], is_one.registers.flat[0]
        four = ir.VectorType.get((4,), ir.F32Type.get())
        at = [_thread(), _constant(0)]
        out = np.empty(y.registers.size, dtype=object)
        for i in range(0, out.size, 2):
            read = vector.load(four, part, [_constant(i // 2), *at])
            for half in range(2):
                old = y.registers.flat[i + half]
                new = mgpu.utils.vector_slice(read, slice(2 * half, 2 * half + 2))
                new = arith.select(is_own, own.registers.flat[i + half], new)
                out[i + half] = arith.select(is_one, arith.addf(old, new), old)
        return mgpu.FragmentedArray(
            _registers=out.reshape(y.registers.shape), _layout=y.layout, _is_signed=None
        )

    return add(all_BN, part_ref, own_BN, is_own, is_one)


def _look(arrived_ref: Any, count_ref: Any, last: Any, likely: Any) -> None:
    """If all others have arrived, their number goes to shared memory; a wrong one if not."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), SPLAT, SPLAT))
    def look(_: Any, arrived: Any, count: Any, last: Any, likely: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        last = last.registers.flat[0]
        mgpu.utils.warpgroup_barrier()
        with mgpu.utils.single_thread(scope=mgpu.utils.ThreadSubset.WARPGROUP):
            memref.store(mgpu.utils.c(-1, i32), count, [])
            with mgpu.utils.when(likely.registers.flat[0]):
                number = mgpu.utils.inline_ptx(
                    "ld.acquire.gpu.global.u32 $0, [$1];",
                    mgpu.utils.memref_ptr(arrived),
                    result_types=i32,
                    has_side_effects=True,
                )
                memref.store(number, count, [])
                with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.eq, number, last)):
                    memref.store(mgpu.utils.c(0, i32), arrived, [])
        mgpu.utils.warpgroup_barrier()
        return ()

    look(arrived_ref, count_ref, last, likely)


def _thread() -> Any:
    """Its number in the warpgroup."""
    i32 = ir.IntegerType.get_signless(32)
    thread = arith.remui(mgpu.utils.thread_idx(), mgpu.utils.c(128, i32))
    return arith.index_cast(ir.IndexType.get(), thread)


def _arrive(arrived_ref: Any, count_ref: Any, last: Any) -> None:
    """Count a warpgroup whose part is written; its number goes to shared memory."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), SPLAT))
    def arrive(_: Any, arrived: Any, count: Any, last: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        mgpu.utils.warpgroup_barrier()
        with mgpu.utils.single_thread(scope=mgpu.utils.ThreadSubset.WARPGROUP):
            # Counts from 0 to `last`, then anew.
            number = mgpu.utils.inline_ptx(
                "fence.acq_rel.gpu;"
                "atom.inc.relaxed.gpu.global.u32 $0, [$1], $2;"
                "fence.acq_rel.gpu;",
                mgpu.utils.memref_ptr(arrived),
                last.registers.flat[0],
                result_types=i32,
                has_side_effects=True,
            )
            memref.store(number, count, [])
        mgpu.utils.warpgroup_barrier()
        return ()

    arrive(arrived_ref, count_ref, last)
