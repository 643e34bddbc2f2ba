"""What kernels in Pallas' Mosaic GPU dialect need beyond it, in Mosaic's own operations.

Elements of arrays are loaded and stored where a function of their indices says, each thread
computing that for its own; parts of sums are handed from program to program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, scf, vector

from pallas_kernels.wide_integers import ELEMENT, RUN, packed, unit, unpack

WGMMA = plgpu.Layout.WGMMA
SPLAT = plgpu.Layout.WG_SPLAT(())
THREADS = 128  # of a warpgroup
SCRATCH = 4 * THREADS  # numbers that a warpgroup needs to add up over its threads


class Outputs(NamedTuple):
    """Which outputs the rows of a warpgroup's tile are.

    Attributes:
        first: the row of the first one among all rows.
        columns: of the result.
        gated: of every sixteen rows eight are gates and eight are their ups.
    """

    first: Any
    columns: int
    gated: bool

    def of_row(self, row: Any, first: Any) -> Any:
        """An index."""
        half, f = self.half_of_row(row, first)
        return arith.addi(f, arith.muli(half, _constant(self.columns)))

    def half_of_row(self, row: Any, first: Any) -> tuple[Any, Any]:
        """1 for ups, else 0, and an index among such."""
        c = _constant
        if not self.gated:
            return c(0), arith.addi(first, row)
        band, at = arith.divui(row, c(16)), arith.remui(row, c(16))
        f = arith.addi(arith.divui(first, c(2)), arith.muli(band, c(8)))
        return arith.divui(at, c(8)), arith.addi(f, arith.remui(at, c(8)))


def load_outputs(ref: Any, outputs: Outputs, B: int) -> jax.Array:
    """Values [B] of a tile's rows from an array of all outputs'."""
    return _load(
        ref, (B,), WGMMA.reduce(1), lambda i, first: [outputs.of_row(i[0], first)], outputs.first
    )


def load_group(ref: Any, group: int, outputs: Outputs, B: int) -> jax.Array:
    """Values [B] of a group from an array [halves, groups, outputs of a half] of a tile's."""

    def at(i: Any, first: Any) -> list[Any]:
        half, f = outputs.half_of_row(i[0], first)
        return [half, _constant(group), f]

    return _load(ref, (B,), WGMMA.reduce(1), at, outputs.first)


def load_block(ref: Any, outputs: Outputs, first: Any, shape: tuple[int, int]) -> jax.Array:
    """Of an array [T, outputs] a tile [B, N], of rows from `first` on.

    Those behind the last are the last's.
    """
    last = ref.shape[0] - 1

    def at(i: Any, output: Any, first: Any) -> list[Any]:
        t = arith.minui(arith.addi(i[1], first), _constant(last))
        return [t, outputs.of_row(i[0], output)]

    return _load(ref, shape, WGMMA, at, outputs.first, first)


def store_block(ref: Any, y_BN: jax.Array, outputs: Outputs, first: Any) -> None:
    """The opposite: rows behind the last are not stored, nor ups, in whose place stands nothing."""
    T = ref.shape[0]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), WGMMA, SPLAT, SPLAT))
    def store(_: Any, ref: Any, y: Any, output: Any, first: Any) -> tuple[()]:
        output, first, less = _index(output), _index(first), arith.CmpIPredicate.ult

        def one(value: Any, i: Any) -> None:
            t = arith.addi(i[1], first)
            live = arith.cmpi(less, t, _constant(T))
            if outputs.gated:
                is_gate = arith.cmpi(less, arith.remui(i[0], _constant(16)), _constant(8))
                live = arith.andi(live, is_gate)
            with mgpu.utils.when(live):
                memref.store(value, ref, [t, outputs.of_row(i[0], output)])

        y.foreach(one)
        return ()

    store(ref, y_BN, outputs.first, first)


def store_rows(ref: Any, y_N: jax.Array, first: Any) -> None:
    """Values of rows from `first` on into an array of all rows'."""
    T = ref.shape[0]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), WGMMA.reduce(0), SPLAT))
    def store(_: Any, ref: Any, y: Any, first: Any) -> tuple[()]:
        first = _index(first)

        def one(value: Any, i: Any) -> None:
            t = arith.addi(i[0], first)
            with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.ult, t, _constant(T))):
                memref.store(value, ref, [t])

        y.foreach(one)
        return ()

    store(ref, y_N, first)


def load_row_sums(ref: Any, first: Any, N: int, scratch_ref: Any) -> jax.Array:
    """Sums [N] over X of an array [X, T], of rows from `first` on.

    Args:
        ref: float32.
        N: a power of two to `THREADS`, which share out the terms.
        scratch_ref: float32[SCRATCH], of this warpgroup.
    """
    X, T = ref.shape
    layout, shares, at_once = WGMMA.reduce(0), THREADS // N, 8

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), SPLAT),
        return_type=plgpu.ShapeDtypeStruct((N,), jnp.float32, layout=layout),
    )
    def add(_: Any, ref: Any, scratch: Any, first: Any) -> Any:
        c, f32, less = _constant, ir.F32Type.get(), arith.CmpIPredicate.ult
        zero = arith.constant(f32, ir.FloatAttr.get(f32, 0.0))
        thread = _thread()
        share, n = arith.divui(thread, c(N)), arith.remui(thread, c(N))
        t = arith.minui(arith.addi(n, _index(first)), c(T - 1))
        loop = scf.ForOp(share, c(X), c(at_once * shares), [zero])
        with ir.InsertionPoint(loop.body):
            (total,) = loop.inner_iter_args
            for i in range(at_once):
                x = arith.addi(loop.induction_variable, c(i * shares))
                value = memref.load(ref, [arith.minui(x, c(X - 1)), t])
                value = arith.select(arith.cmpi(less, x, c(X)), value, zero)
                total = arith.addf(total, value)
            scf.yield_([total])
        memref.store(loop.results[0], scratch, [thread])
        mgpu.utils.warpgroup_barrier()

        sums = _sums_of_shares(scratch, N, shares)
        mgpu.utils.warpgroup_barrier()
        return sums

    return add(ref, scratch_ref, first)


def sum_of_outputs(y_BN: jax.Array, scratch_ref: Any) -> jax.Array:
    """Sums [N] over a warpgroup's tile."""
    N = y_BN.shape[1]

    @plgpu.inline_mgpu(
        arg_types=(WGMMA, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((N,), jnp.float32, layout=WGMMA.reduce(0)),
    )
    def add(_: Any, y: Any, scratch: Any) -> Any:
        c, thread = _constant, _thread()
        warp, lane = arith.divui(thread, c(32)), arith.remui(thread, c(32))
        is_first = arith.cmpi(arith.CmpIPredicate.ult, lane, c(4))
        # A thread has pairs of neighbours, of every eighth row; in a warp four lie side by side.
        for eight in range(N // 8):
            pairs = y.registers[:, eight].flat
            total = pairs[0]
            for pair in pairs[1:]:
                total = arith.addf(total, pair)
            for i in range(2):
                value = vector.extract(total, [], [i])
                for lanes in (4, 8, 16):
                    value = arith.addf(value, mgpu.utils.shfl_bfly(value, lanes))
                n = arith.addi(arith.muli(lane, c(2)), c(8 * eight + i))
                with mgpu.utils.when(is_first):
                    memref.store(value, scratch, [arith.addi(arith.muli(warp, c(N)), n)])
        mgpu.utils.warpgroup_barrier()
        sums = _sums_of_shares(scratch, N, THREADS // 32)
        mgpu.utils.warpgroup_barrier()
        return sums

    return add(y_BN, scratch_ref)


def half_of_bands(x_BN: jax.Array, half: int) -> jax.Array:
    """Of every sixteen rows the first or the last eight, in the place of both."""

    @plgpu.inline_mgpu(
        arg_types=(WGMMA,), return_type=plgpu.ShapeDtypeStruct(x_BN.shape, x_BN.dtype, layout=WGMMA)
    )
    def pick(_: Any, x: Any) -> Any:
        # A thread has the same elements of both, along an axis of two.
        taken = np.repeat(x.registers[:, :, :, :, half : half + 1], 2, axis=4)
        return mgpu.FragmentedArray(_registers=taken, _layout=x.layout, _is_signed=None)

    return pick(x_BN)


def unpack_run(words_BX: jax.Array, run: int, zero_B: jax.Array | None, dtype: Any) -> jax.Array:
    """One run of weights [B, RUN], less zeros, of packed ones [B, X], in `dtype`'s units.

    Every part of a run lies in its words as the tensor core wants it. All is exact.
    """
    B, parts = words_BX.shape[0], packed(words_BX.dtype)
    bits, eights = ELEMENT // parts, RUN // parts // 8
    half = -(2 ** (bits - 1))
    less_B = jnp.full((B,), half, dtype) if zero_B is None else half - zero_B.astype(dtype)
    less_B = plgpu.layout_cast(less_B * unit(dtype), WGMMA.reduce(1))

    @plgpu.inline_mgpu(
        arg_types=(WGMMA, WGMMA.reduce(1)),
        return_type=plgpu.ShapeDtypeStruct((B, RUN), dtype, layout=WGMMA),
    )
    def widen(_: Any, words: Any, less: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        pair = ir.VectorType.get((2,), less.mlir_dtype)
        less = less.broadcast_in_dim((B, 8), (0,), WGMMA.to_mgpu())
        out = np.empty(less.layout.registers_shape((B, RUN)), dtype=object)
        for index in np.ndindex(out.shape):
            band, eight, *rest = index
            part, at = divmod(eight, eights)
            word = words.registers[(band, eights * run + at, *rest)]
            wide = llvm.inline_asm(
                i32,
                [mgpu.utils.bitcast(x, i32) for x in (word, less.registers[(band, 0, *rest)])],
                unpack(bits, part, dtype, offset="$2"),
                "=r,r,r",
            )
            out[index] = mgpu.utils.bitcast(wide, pair)
        return mgpu.FragmentedArray(_registers=out, _layout=words.layout, _is_signed=None)

    return widen(words_BX, less_B)


def part_shape(B: int, N: int) -> tuple[int, int, int]:
    """Of a tile [B, N] as its threads have it, four numbers each at a time."""
    return (B * N // (4 * THREADS), THREADS, 4)


def store_part(part_ref: Any, sum_BN: jax.Array) -> None:
    """Leave a tile for other programs."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), WGMMA))
    def store(_: Any, part: Any, y: Any) -> tuple[()]:
        pairs, at = list(y.registers.flat), [_thread(), _constant(0)]
        for i in range(0, len(pairs), 2):
            four = mgpu.utils.vector_concat(pairs[i : i + 2])
            vector.store(four, part, [_constant(i // 2), *at])
        return ()

    store(part_ref, sum_BN)


def add_part(
    sum_BN: jax.Array, part_ref: Any, own_BN: jax.Array, is_own: jax.Array, is_there: jax.Array
) -> jax.Array:
    """sum + part; sum + own if `is_own`; sum if not `is_there`."""

    @plgpu.inline_mgpu(
        arg_types=(WGMMA, plgpu.RefType(), WGMMA, SPLAT, SPLAT),
        return_type=plgpu.ShapeDtypeStruct(sum_BN.shape, jnp.float32, layout=WGMMA),
    )
    def add(_: Any, y: Any, part: Any, own: Any, is_own: Any, is_there: Any) -> Any:
        is_own, is_there = is_own.registers.flat[0], is_there.registers.flat[0]
        four, at = ir.VectorType.get((4,), ir.F32Type.get()), [_thread(), _constant(0)]
        out = np.empty(y.registers.size, dtype=object)
        for i in range(0, out.size, 2):
            read = vector.load(four, part, [_constant(i // 2), *at])
            for half in range(2):
                old = y.registers.flat[i + half]
                new = mgpu.utils.vector_slice(read, slice(2 * half, 2 * half + 2))
                new = arith.select(is_own, own.registers.flat[i + half], new)
                out[i + half] = arith.select(is_there, arith.addf(old, new), old)
        out = out.reshape(y.registers.shape)
        return mgpu.FragmentedArray(_registers=out, _layout=y.layout, _is_signed=None)

    return add(sum_BN, part_ref, own_BN, is_own, is_there)


def others_arrived(arrived_ref: Any, last: Any, likely: Any, count_ref: Any) -> None:
    """Look whether `last` programs have called `arrive`, if that is likely.

    If so, `count_ref` becomes `last` and `arrived_ref` 0. `count_ref` is in shared memory.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SPLAT, SPLAT, plgpu.RefType()))
    def look(_: Any, arrived: Any, last: Any, likely: Any, count: Any) -> tuple[()]:
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

    look(arrived_ref, last, likely, count_ref)


def arrive(arrived_ref: Any, last: Any, count_ref: Any) -> None:
    """Say that this warpgroup's part is stored; `count_ref` becomes how many were before it.

    After `last` others the count begins anew.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SPLAT, plgpu.RefType()))
    def add(_: Any, arrived: Any, last: Any, count: Any) -> tuple[()]:
        mgpu.utils.warpgroup_barrier()
        with mgpu.utils.single_thread(scope=mgpu.utils.ThreadSubset.WARPGROUP):
            number = mgpu.utils.inline_ptx(
                "fence.acq_rel.gpu;atom.inc.relaxed.gpu.global.u32 $0, [$1], $2;fence.acq_rel.gpu;",
                mgpu.utils.memref_ptr(arrived),
                last.registers.flat[0],
                result_types=ir.IntegerType.get_signless(32),
                has_side_effects=True,
            )
            memref.store(number, count, [])
        mgpu.utils.warpgroup_barrier()
        return ()

    add(arrived_ref, last, count_ref)


def _load(
    ref: Any, shape: tuple[int, ...], layout: Any, at: Callable[..., list[Any]], *scalars: Any
) -> jax.Array:
    """Elements of `ref` at what `at` makes of their own indices and of scalars."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), *(SPLAT for _ in scalars)),
        return_type=plgpu.ShapeDtypeStruct(shape, ref.dtype, layout=layout),
    )
    def load(_: Any, ref: Any, *scalars: Any) -> Any:
        element = ir.MemRefType(ref.type).element_type
        signed = True if isinstance(element, ir.IntegerType) else None
        zero = ir.IntegerAttr.get(element, 0) if signed else ir.FloatAttr.get(element, 0.0)
        start = mgpu.FragmentedArray.splat(
            arith.constant(element, zero), shape, layout.to_mgpu(), is_signed=signed
        )
        given = [_index(x) for x in scalars]
        return start.foreach(
            lambda _, i: memref.load(ref, at(i, *given)), create_array=True, is_signed=signed
        )

    return load(ref, *scalars)


def _sums_of_shares(scratch: Any, N: int, shares: int) -> Any:
    """Sums [N] of as many numbers each, which lie in shared memory N apart."""
    f32 = ir.F32Type.get()
    zero = arith.constant(f32, ir.FloatAttr.get(f32, 0.0))

    def one(_: Any, i: Any) -> Any:
        total = memref.load(scratch, [i[0]])
        for share in range(1, shares):
            value = memref.load(scratch, [arith.addi(i[0], _constant(share * N))])
            total = arith.addf(total, value)
        return total

    layout = WGMMA.reduce(0).to_mgpu()
    return mgpu.FragmentedArray.splat(zero, (N,), layout).foreach(one, create_array=True)


def _index(x: Any) -> Any:
    return arith.index_cast(ir.IndexType.get(), x.registers.flat[0])


def _constant(x: int) -> Any:
    return mgpu.utils.c(x, ir.IndexType.get())


def _thread() -> Any:
    """Its number in the warpgroup."""
    i32 = ir.IntegerType.get_signless(32)
    thread = arith.remui(mgpu.utils.thread_idx(), mgpu.utils.c(THREADS, i32))
    return arith.index_cast(ir.IndexType.get(), thread)
