"""Products with kernels of integers in 8 or 4 bits for Hopper, in Pallas' Mosaic GPU dialect.

The kernel is the left operand, [outputs, terms], as in quantized_linear, for more rows than that
one serves well. A warpgroup brings tiles of kernel and rows in by TMA, through a ring that takes
most of the shared memory; the others widen integers in registers, from where they go into the
tensor core.

The steps of all blocks' sums lie in a row, of which each program takes an equal part: none waits
for others. A sum that several had a part of is added up by the one that comes last, always in the
same order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.mosaic_elements import (
    SCRATCH,
    WGMMA,
    Outputs,
    add_part,
    arrive,
    half_of_bands,
    load_block,
    load_group,
    load_outputs,
    load_row_sums,
    others_arrived,
    part_shape,
    store_block,
    store_part,
    store_rows,
    sum_of_outputs,
    unpack_run,
)
from pallas_kernels.product_parts import (
    ACTIVATIONS,
    EARLY_ROWS,
    NOT_IN_KERNELS,
    PROGRAMS,
    result_shapes,
)
from pallas_kernels.rms_norm import HalfNormed, Rows
from pallas_kernels.wide_integers import PACKED, RUN, packed, unit

MAX_ROWS = 512  # more cost less elsewhere
LINE = 128  # bytes of swizzled shared memory: of an output's weights in a step
BAND = 64  # outputs of a warpgroup: what the tensor core's instruction takes
WARPGROUPS = 2  # that multiply
BLOCK = WARPGROUPS * BAND  # outputs of a program
# A warpgroup's registers a thread; the three share 64 Ki.
COMPUTE_REGISTERS, LOAD_REGISTERS = 232, 40
SHARED_MEMORY = 216 << 10  # for the ring
LANES = LINE // 2  # terms of a row in such a line
SWIZZLE = plgpu.SwizzleTransform(LINE)
PARTS = 2  # of a sum that are read at once


@dataclass(frozen=True)
class TuningConfig:
    """How a product is laid out on the card.

    Attributes:
        block_rows: rows of a block, a power of two from 8 to 128.
        num_stages: steps in flight, from 2.
        programs: of the grid.
    """

    block_rows: int
    num_stages: int
    programs: int = PROGRAMS

    def __post_init__(self) -> None:
        if self.block_rows not in (8, 16, 32, 64, 128):
            raise ValueError(f"block_rows must be a power of two from 8, got {self.block_rows}")
        if self.num_stages < 2:
            raise ValueError(f"num_stages must be at least 2, got {self.num_stages}")
        if self.programs < 1:
            raise ValueError(f"programs must be positive, got {self.programs}")


def terms_of_step(kernel_dtype: Any) -> int:
    """Terms that a line of weights has."""
    return LINE // jnp.dtype(kernel_dtype).itemsize * packed(kernel_dtype)


def tuning_config(*, T: int, kernel_dtype: Any) -> TuningConfig:
    """The setting for T rows."""
    rows = min(128, max(8, pl.next_power_of_2(T)))
    step = 2 * BAND * LINE + rows * terms_of_step(kernel_dtype) * 2
    # Of few rows a small ring is the faster: 68 us instead of 75 for a 7B layer's with 16.
    return TuningConfig(rows, min(4 if rows <= 16 else 8, SHARED_MEMORY // step))


def min_rows(F: int, kernel_dtype: Any) -> int:
    """Fewer cost less elsewhere."""
    if kernel_dtype == jnp.int16:
        return 17
    return 1 if F >= PROGRAMS * BLOCK else 9  # where each program has outputs of its own


def is_supported(
    *, T: int, D: int, F: int, group: int, rows_dtype: Any, kernel_dtype: Any, gated_zeros: bool
) -> bool:
    """Whether the kernel takes such a product, and is not the slower.

    Args:
        gated_zeros: outputs are gates and ups, and have zeros: several groups in a step then.
    """
    terms = terms_of_step(kernel_dtype)
    return (
        jnp.dtype(kernel_dtype).name in PACKED
        and rows_dtype in (jnp.bfloat16, jnp.float16)
        and min_rows(F, kernel_dtype) <= T <= MAX_ROWS
        and F % BLOCK == 0
        and D % terms == 0
        and D % group == 0
        and group % RUN == 0
        and (group % terms == 0 or terms % group == 0)
        and not (gated_zeros and group >= terms)
    )


@cache
def is_hopper() -> bool:
    """Whether products run on a GPU of compute capability 9.0, and JAX has what they need."""
    device = jax.devices()[0]
    return (
        device.platform == "gpu"
        and device.compute_capability == "9.0"
        and jax.__version_info__ >= (0, 11)
    )


# Layers that begin with other rows than most share its trace, the dearest of all.
@partial(jax.jit, static_argnames=("eps", "activation", "dtype", "config"))
def quantized_linear_mosaic(
    x: jax.Array | HalfNormed,
    kernel_FX: jax.Array,
    scale: jax.Array,
    *,
    zero_GF: jax.Array | None = None,
    eps: float = 0.0,
    bias_F: jax.Array | None = None,
    activation: str | None = None,
    residual_TF: jax.Array | None = None,
    next_scale_F: jax.Array | None = None,
    dtype: Any = None,
    config: TuningConfig | None = None,
) -> Rows:
    """As `quantized_linear.quantized_linear`, on compute capability 9.0 and with JAX 0.11 alone.

    For a kernel in int16 or uint16 and rows in half precision. There is no interpret mode: that of
    this dialect knows none of Mosaic's own operations.

    Raises:
        ValueError: operands outside these bounds, or a residual or a norm after an activation.
    """
    x_TD, square_XT = x if isinstance(x, HalfNormed) else (x, None)
    (T, D), F = x_TD.shape, kernel_FX.shape[0]
    groups = scale.shape[0] if scale.ndim == 2 else 1
    config = config or tuning_config(T=T, kernel_dtype=kernel_FX.dtype)
    fits = is_supported(
        T=MAX_ROWS,
        D=D,
        F=F,
        group=D // groups,
        rows_dtype=x_TD.dtype,
        kernel_dtype=kernel_FX.dtype,
        gated_zeros=activation is not None and zero_GF is not None,
    )
    terms, line = terms_of_step(kernel_FX.dtype), LINE // kernel_FX.dtype.itemsize
    fits = fits and kernel_FX.shape[1] * terms == D * line
    if not fits or scale.shape[-1] != F:
        raise ValueError(
            f"rows of {D} in {x_TD.dtype} do not fit {kernel_FX.shape} in {kernel_FX.dtype} with "
            f"{scale.shape} scales and {config}"
        )
    if activation is not None and (residual_TF is not None or next_scale_F is not None):
        raise ValueError("nothing can be added to gated outputs here")
    if activation == NOT_IN_KERNELS:
        raise ValueError(f"{activation} has no place in a kernel")
    N, gated = config.block_rows, activation is not None
    tiles, parts = F // BLOCK * pl.cdiv(T, N), max(1, terms * groups // D)
    programs = min(config.programs, tiles * (D // terms))
    given: dict[str, Any] = {
        "x": x_TD.reshape(T, -1, LANES),
        "kernel": kernel_FX.reshape(2, F // 16, 8, -1) if gated else kernel_FX,
        "scale": scale.reshape(groups, F),
        "zero": zero_GF,
        "square": square_XT,
        "bias": bias_F,
        "residual": residual_TF,
        "next_scale": next_scale_F,
        # One array serves all calls of a program: each leaves it as it was.
        "arrived": jnp.zeros((tiles, WARPGROUPS), jnp.int32),
    }
    operands = {name: operand for name, operand in given.items() if operand is not None}
    outs = result_shapes(
        (T, F // 2 if gated else F),
        dtype or x_TD.dtype,
        blocks=F // BAND,
        begins_norm=next_scale_F is not None,
    )
    # Each has at most the end of a sum that others began, and the beginning of one that they end.
    part = (programs, 2, WARPGROUPS, *part_shape(BAND, N))
    outs["part"] = jax.ShapeDtypeStruct(part, jnp.float32)
    results = plgpu.kernel(
        partial(_kernel, names=(*operands, *outs), eps=eps, activation=activation, N=N),
        out_type=tuple(outs.values()),
        scratch_types=(
            _scratch(
                config,
                kernel_FX.dtype,
                x_TD.dtype,
                gated=gated,
                groups=0 if groups == 1 else parts,
                zeros=0 if zero_GF is None else parts,
            ),
        ),
        grid=(programs,),
        grid_names=("program",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        kernel_name="quantized_linear",
    )(*operands.values())
    found = dict(zip(outs, results, strict=True))
    half = HalfNormed(found["next"], found["next_square"]) if "next" in found else None
    return Rows(found["out"], half)


class _Scratch(NamedTuple):
    """Shared memory and barriers of a program."""

    weights: Any  # two views, as of rows: see `_scratch`
    rows: Any
    scales: Any  # None: none but at the end
    zeros: Any  # or None
    count: Any  # per warpgroup, as below
    numbers: Any
    landed: Any  # per stage
    consumed: Any


def _scratch(
    config: TuningConfig,
    kernel_dtype: Any,
    rows_dtype: Any,
    *,
    gated: bool,
    groups: int,
    zeros: int,
) -> _Scratch:
    """What `_kernel` is given.

    One view of a tile is for TMA, the other one for the tensor core. They share the memory: lines
    in the same order, swizzled by their addresses alone.

    Args:
        groups, zeros: of a step, that have scales and zeros; 0: none have.
    """
    stages, boxes = config.num_stages, terms_of_step(kernel_dtype) // LANES

    def tiles(shape: tuple[int, ...], lines: tuple[int, ...], dtype: Any) -> plgpu.RefUnion:
        lanes = LINE // jnp.dtype(dtype).itemsize
        tiled = (plgpu.TilingTransform((8, lanes)), SWIZZLE)
        return plgpu.RefUnion(
            plgpu.SMEM((*shape, *lines, lanes), dtype, transforms=(SWIZZLE,)),
            plgpu.SMEM((*shape, math.prod(lines), lanes), dtype, transforms=tiled),
        )

    def of_groups(count: int, dtype: Any) -> Any:
        halves = 1 + gated
        return plgpu.SMEM((stages, halves, count, BLOCK // halves), dtype) if count else None

    copies = 2 + (1 + gated) * (bool(groups) + bool(zeros))
    return _Scratch(
        weights=tiles((stages,), (BLOCK // 16, 2, 8) if gated else (BLOCK,), kernel_dtype),
        rows=tiles((stages, boxes), (config.block_rows,), rows_dtype),
        scales=of_groups(groups, jnp.float32),
        zeros=of_groups(zeros, jnp.int8),
        count=plgpu.SMEM((WARPGROUPS,), jnp.int32),
        numbers=plgpu.SMEM((WARPGROUPS, SCRATCH), jnp.float32),
        landed=plgpu.Barrier(num_barriers=stages, num_arrivals=copies),
        consumed=plgpu.Barrier(num_barriers=stages, num_arrivals=WARPGROUPS),
    )


class _Work(NamedTuple):
    """Steps of a program, among those of all blocks' sums."""

    begin: Any
    end: Any
    steps: int  # of a sum
    row_blocks: int  # side by side for the same outputs: their weights are read from memory once

    def slot(self, step: Any, stages: int) -> Any:
        """Where in the ring a step lies."""
        return lax.rem(step - self.begin, stages)

    def block(self, tile: Any) -> tuple[Any, Any]:
        """Of outputs, and of rows."""
        return lax.div(tile, self.row_blocks), lax.rem(tile, self.row_blocks)


def begin_of(number: Any, programs: int, total: int) -> Any:
    """The first of a program's steps."""
    return lax.div(number * total, programs)


def program_of(step: Any, programs: int, total: int) -> Any:
    """Whose step it is."""
    return lax.div((step + 1) * programs - 1, total)


def _kernel(*refs: Any, names: tuple[str, ...], eps: float, activation: str | None, N: int) -> None:
    *named, scratch = refs
    ref = dict(zip(names, named, strict=True))
    (T, columns), gated = ref["out"].shape, activation is not None
    programs = ref["part"].shape[0]
    row_blocks, steps = pl.cdiv(T, N), ref["x"].shape[1] // scratch.rows[1].shape[1]
    total = columns * (1 + gated) // BLOCK * row_blocks * steps
    own, warpgroup = lax.axis_index("program"), lax.axis_index("warpgroup")
    begin, end = begin_of(own, programs, total), begin_of(own + 1, programs, total)
    work = _Work(begin, end, steps, row_blocks)

    @pl.when(warpgroup == WARPGROUPS)
    def load() -> None:
        plgpu.set_max_registers(LOAD_REGISTERS, action="decrease")
        _load_tiles(scratch, ref, work)

    @pl.when(warpgroup < WARPGROUPS)
    def compute() -> None:
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")

        @pl.loop(lax.div(begin, steps), lax.div(end + (steps - 1), steps))
        def each(tile: Any) -> None:
            block, row_block = work.block(tile)
            outputs = Outputs(block * BLOCK + warpgroup * BAND, columns, gated)
            first, last = tile * steps, (tile + 1) * steps
            mine = jnp.maximum(first, begin), jnp.minimum(last, end)
            numbers = scratch.numbers.at[warpgroup]
            load_root = partial(_load_root, ref, row_block * N, N, numbers, eps)
            # Of few rows it is there when the sum is, of more it would take too many registers.
            early_N = load_root() if N <= EARLY_ROWS else None
            sum_BN = _sum(scratch, work, mine, outputs._replace(first=warpgroup * BAND))
            whole = (first >= begin) & (last <= end)
            # Those who have a part of it.
            one, other = (program_of(s, programs, total) for s in (first, last - 1))
            others = other - one
            count = scratch.count.at[warpgroup]

            @pl.when(jnp.logical_not(whole))
            def hand_over() -> None:
                arrived = ref["arrived"].at[tile, warpgroup]
                # Whoever begins a sum does so at last: the others may well be through.
                others_arrived(arrived, others, first >= begin, count)

                @pl.when(count[...] != others)
                def _() -> None:
                    begins = (own == one).astype(jnp.int32)
                    store_part(ref["part"].at[own, begins, warpgroup], sum_BN)
                    arrive(arrived, others, count)

            @pl.when(whole | (count[...] == others))
            def finish() -> None:
                def add(i: Any, all_BN: jax.Array) -> jax.Array:
                    for q in [one + i * PARTS + j for j in range(PARTS)]:
                        at = jnp.minimum(q, other)
                        begins = (at == one).astype(jnp.int32)
                        part = ref["part"].at[at, begins, warpgroup]
                        all_BN = add_part(all_BN, part, sum_BN, q == own, q <= other)
                    return all_BN

                start_BN = sum_BN * whole.astype(jnp.float32)
                trips = jnp.where(whole, 0, lax.div(others + PARTS, PARTS))
                all_BN = lax.fori_loop(0, trips, add, start_BN)
                root_N = early_N if N <= EARLY_ROWS else load_root()
                _finish(all_BN, root_N, ref, outputs, row_block * N, numbers, activation)


def _load_tiles(scratch: _Scratch, ref: dict[str, Any], work: _Work) -> None:
    """Keep the ring filled."""
    weights, rows = scratch.weights[0], scratch.rows[0]
    stages, boxes, N, _ = rows.shape
    words = scratch.weights[1].shape[2]
    columns = ref["out"].shape[1]
    group = ref["x"].shape[1] * LANES // ref["scale"].shape[0]

    @pl.loop(work.begin, work.end)
    def fill(s: Any) -> None:
        slot, k = work.slot(s, stages), lax.rem(s, work.steps)
        block, row_block = work.block(lax.div(s, work.steps))
        landed, to, x = scratch.landed.at[slot], weights.at[slot], pl.ds(k * words, words)

        @pl.when(s >= work.begin + stages)
        def _() -> None:
            plgpu.barrier_wait(scratch.consumed.at[slot])

        if ref["kernel"].ndim > 2:
            gates_and_ups = ref["kernel"].at[:, pl.ds(block * (BLOCK // 16), BLOCK // 16), :, x]
            plgpu.copy_gmem_to_smem(gates_and_ups, to.transpose((1, 0, 2, 3)), landed)
        else:
            plgpu.copy_gmem_to_smem(ref["kernel"].at[pl.ds(block * BLOCK, BLOCK), x], to, landed)
        # Rows behind the last come as zeros.
        plgpu.copy_gmem_to_smem(
            ref["x"].at[pl.ds(row_block * N, N), pl.ds(k * boxes, boxes)],
            rows.at[slot].transpose((1, 0, 2)),
            landed,
        )
        for name, ring in (("scale", scratch.scales), ("zero", scratch.zeros)):
            if ring is not None:
                _, halves, parts, size = ring.shape
                g = pl.ds(lax.div(k * (boxes * LANES), group), parts)
                for half in range(halves):
                    f = pl.ds(half * columns + block * size, size)
                    plgpu.copy_gmem_to_smem(ref[name].at[g, f], ring.at[slot, half], landed)


def _sum(scratch: _Scratch, work: _Work, mine: tuple[Any, Any], outputs: Outputs) -> jax.Array:
    """A program's part of a sum, [BAND, N]: steps `mine`.

    Sums over a group of terms are scaled as they come out.

    Args:
        outputs: of this warpgroup, among those of the program's block.
    """
    weights, rows = scratch.weights[1], scratch.rows[1]
    stages, boxes, N, _ = rows.shape
    dtype = rows.dtype
    if scratch.scales is None:
        sum_whole = partial(_sum_whole, scratch, work, mine, outputs)
        return pl.run_scoped(sum_whole, plgpu.ACC((BAND, N), jnp.float32))
    parts = scratch.scales.shape[2]
    runs = boxes // parts

    def step(s: Any, sum_BN: jax.Array) -> jax.Array:
        slot = work.slot(s, stages)
        plgpu.barrier_wait(scratch.landed.at[slot])
        words_BX = plgpu.layout_cast(weights[slot, pl.ds(outputs.first, BAND)], WGMMA)

        def values(ring: Any) -> list[Any]:
            if ring is None:
                return [None] * parts
            return [load_group(ring.at[slot], part, outputs, BAND) for part in range(parts)]

        scales, zeros = values(scratch.scales), values(scratch.zeros)

        def multiply(*accs: Any, at: int) -> list[jax.Array]:
            for part, acc in enumerate(accs, at):
                for run in range(part * runs, (part + 1) * runs):
                    right = rows.at[slot, run].transpose((1, 0))
                    plgpu.wgmma(acc, unpack_run(words_BX, run, zeros[part], dtype), right)
            # The first is taken while the tensor core has the second.
            return [
                plgpu.wgmma_accumulator_load(acc, wait_n=runs * behind)
                for behind, acc in reversed(list(enumerate(reversed(accs))))
            ]

        at_once = 2 if parts % 2 == 0 and N <= 64 else 1
        for at in range(0, parts, at_once):
            accs = [plgpu.ACC((BAND, N), jnp.float32)] * at_once
            for i, group_BN in enumerate(pl.run_scoped(partial(multiply, at=at), *accs)):
                scale_B = scales[at + i] * (1 / unit(dtype))
                sum_BN += group_BN * lax.broadcast_in_dim(scale_B, group_BN.shape, (0,))
        plgpu.barrier_arrive(scratch.consumed.at[slot])
        return sum_BN

    start_BN = plgpu.layout_cast(jnp.zeros((BAND, N), jnp.float32), WGMMA)
    return lax.fori_loop(*mine, step, start_BN)


def _sum_whole(
    scratch: _Scratch, work: _Work, mine: tuple[Any, Any], outputs: Outputs, acc: Any
) -> jax.Array:
    """The same where nothing is scaled on the way: the tensor core need not stop between steps.

    It has one run of terms while the next is unpacked.
    """
    weights, rows = scratch.weights[1], scratch.rows[1]
    stages, boxes, _, _ = rows.shape
    first, end = mine

    def done(s: Any) -> None:
        plgpu.barrier_arrive(scratch.consumed.at[work.slot(s, stages)])

    @pl.loop(first, end)
    def step(s: Any) -> None:
        slot, zero_B = work.slot(s, stages), None
        plgpu.barrier_wait(scratch.landed.at[slot])
        words_BX = plgpu.layout_cast(weights[slot, pl.ds(outputs.first, BAND)], WGMMA)
        if scratch.zeros is not None:
            zero_B = load_group(scratch.zeros.at[slot], 0, outputs, BAND)
        for run in range(boxes):
            right = rows.at[slot, run].transpose((1, 0))
            plgpu.wgmma(acc, unpack_run(words_BX, run, zero_B, rows.dtype), right)
            # With four runs in flight across steps the assembler would wait for each of them.
            plgpu.wgmma_wait(0 if run == 3 else 1)
            if run == 0:
                pl.when(s > first)(lambda: done(s - 1))

    sum_BN = plgpu.wgmma_accumulator_load(acc, wait_n=0)
    done(end - 1)
    return sum_BN


def _load_root(ref: dict[str, Any], t: Any, N: int, numbers_ref: Any, eps: float) -> Any:
    """By which N rows from `t` on are multiplied to complete their norm; None: they have none."""
    if "square" not in ref:
        return None
    mean_N = load_row_sums(ref["square"], t, N, numbers_ref) / (ref["x"].shape[1] * LANES)
    return lax.rsqrt(mean_N + eps)


def _finish(
    sum_BN: jax.Array,
    root_N: jax.Array | None,
    ref: dict[str, Any],
    outputs: Outputs,
    t: Any,
    numbers_ref: Any,
    activation: str | None,
) -> None:
    """From a whole sum to results, of rows from `t` on."""
    B, N = sum_BN.shape

    def of_outputs(values_ref: Any) -> jax.Array:
        values_B = load_outputs(values_ref, outputs, B).astype(jnp.float32)
        return lax.broadcast_in_dim(values_B, (B, N), (0,))

    if ref["scale"].shape[0] == 1:
        sum_BN *= of_outputs(ref["scale"].at[0]) * (1 / unit(ref["x"].dtype))
    if root_N is not None:
        sum_BN *= lax.broadcast_in_dim(root_N, (B, N), (1,))
    if "bias" in ref:
        sum_BN += of_outputs(ref["bias"])
    if activation is not None:
        gate_BN, up_BN = (half_of_bands(sum_BN, half) for half in range(2))
        sum_BN = ACTIVATIONS[activation](gate_BN) * up_BN
    if "residual" in ref:
        sum_BN += load_block(ref["residual"], outputs, t, (B, N)).astype(jnp.float32)
    y_BN = sum_BN.astype(ref["out"].dtype)
    store_block(ref["out"], y_BN, outputs, t)
    if "next_scale" in ref:
        # The only rounding, as in the norm: the root is divided by at the end.
        y_BN = y_BN.astype(jnp.float32)
        next_BN = (y_BN * of_outputs(ref["next_scale"])).astype(ref["out"].dtype)
        store_block(ref["next"], next_BN, outputs, t)
        square_N = sum_of_outputs(y_BN * y_BN, numbers_ref)
        store_rows(ref["next_square"].at[lax.div(outputs.first, B)], square_N, t)
