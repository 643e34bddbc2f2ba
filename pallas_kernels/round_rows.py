"""Rows normalised, gated or added up, and rounded to 8-bit floats, in Pallas' Triton dialect: one
kernel, which has a row in a program's registers. XLA would read a row to find its largest value,
and again to round it.

Where gated rows are fewer than the card has room for, several programs share one: each puts its
part's largest value where every other of them has a place for it, and waits until its own places
have been filled. An empty one holds `EMPTY`; whoever has read a word empties its place again, so
one array serves all calls of a program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial, reduce
from itertools import chain, islice
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.dependents import let_next_start
from pallas_kernels.elementwise import elementwise
from pallas_kernels.product_parts import ACTIVATIONS
from pallas_kernels.rms_norm import Norm, Rounded, Rows

E4M3 = jnp.float8_e4m3fn
LARGEST = 448.0  # of e4m3
SMALLEST = 2.0**-100  # rows of nothing larger do not fill e4m3's range
MAX_WIDTH = 32768  # of a row, which a program holds in its registers
PER_CORE = 2  # programs of 16-bit sums that run at once on a multiprocessor, by their registers
AHEAD = 4  # arrays of each input that a program asks for at once
EMPTY = -1  # the sign bit is set, as in no largest value, NaN or not

# The compiler takes an instruction or more for each value, some at a quarter of the rate.
_TO_BFLOAT16 = "cvt.rn.bf16x2.f32 $0, $2, $1;"
_TO_FLOAT32 = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
# 1 / (1 + 2^(-x log2(e))), at most 2^-16 off: bfloat16 has 2^-9.
_SIGMOID = """
mul.f32 $0, $1, 0fBFB8AA3B;
ex2.approx.ftz.f32 $0, $0;
add.f32 $0, $0, 0f3F800000;
rcp.approx.ftz.f32 $0, $0;
"""
# Activations that are products with a sigmoid of this.
GATED_BY: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "silu": lambda x: x,
    "gelu_pytorch_tanh": lambda x: x * (2 * (2 / np.pi) ** 0.5 * (1 + 0.044715 * x * x)),
}

Loads = list[jax.Array]


class Layout(NamedTuple):
    """How rows are laid out on the card; never changes what is computed.

    Attributes:
        block: values that a program has in an array, a power of two.
        num_warps: of a program.
        programs: of a row, a power of two.
    """

    block: int
    num_warps: int
    programs: int = 1


def row_layout(D: int) -> Layout:
    """A program a row, which is one array."""
    block = pl.next_power_of_2(D)
    return Layout(block, min(16, max(4, block // 1024)))


def added_layout(D: int) -> Layout:
    """A program a row; a thread has four neighbours of each array (H200)."""
    num_warps = min(16, max(4, pl.next_power_of_2(D) // 1024))
    return Layout(4 * 32 * num_warps, num_warps)


def gated_layout(T: int, F: int, sums_bytes: int = 2) -> Layout:
    """A thread has four neighbours of each array, all of whose scales it reads at once (H200). Sums
    of more bytes take more registers: fewer programs are sure to run at once.
    """
    programs = 1
    while 2 * programs * T <= most_sharing() * 2 // sums_bytes and F // programs >= 4096:
        programs *= 2
    num_warps = 16 if F // programs >= 8192 else 8
    return Layout(4 * 32 * num_warps, num_warps, programs)


@cache
def most_sharing() -> int:
    """Programs of 16-bit sums that may share rows: they wait for each other, so the card has room
    for all.
    """
    device = jax.devices()[0]
    return PER_CORE * getattr(device, "core_count", 0)  # of a CPU there is none


def row_scale(largest: jax.Array) -> jax.Array:
    """What values are divided by; zeros stay zeros, and there is a reciprocal. A product, since
    compilers take the freedom to make one of a quotient by a constant, or not, and a row must not
    depend on that.
    """
    return jnp.where(largest > 0, jnp.maximum(largest, SMALLEST) * (1 / LARGEST), 1.0)


def to_e4m3(x: jax.Array, scale: jax.Array, *, clip: bool = True) -> jax.Array:
    """Values times a scale's reciprocal: a division each would take longer than all else.

    Args:
        clip: what comes out a bit above the largest, which is no number in e4m3.
    """
    x *= 1 / scale
    return (jnp.clip(x, -LARGEST, LARGEST) if clip else x).astype(E4M3)


def round_rows(x_TD: jax.Array, norm: Norm | None = None, *, interpret: bool = False) -> Rounded:
    """Rows, normalised if need be, in e4m3.

    Args:
        x_TD: in any float; normalised rows are rounded to its dtype first, as they are elsewhere.
        norm: over D.
        interpret: run on any platform, slowly.

    Raises:
        ValueError: rows wider than `MAX_WIDTH`.
    """
    eps, plus_one = (0.0, False) if norm is None else (norm.eps, norm.plus_one)
    row = partial(_plain_row, eps=eps, plus_one=plus_one, on_card=not interpret)
    operands = {"x": x_TD, "factor": None if norm is None else norm.scale_D}
    return _round(row, operands, x_TD.shape, "round_rows", interpret)[0]


def round_gated(
    sums_T2F: jax.Array,
    row_scale_T1: jax.Array,
    scale_2F: jax.Array,
    activation: str,
    bias_2F: jax.Array | None = None,
    *,
    dtype: Any,
    interpret: bool = False,
) -> Rounded:
    """activation(gate) * up of a product's sums that are yet to be scaled, in e4m3.

    Args:
        sums_T2F: in any float.
        row_scale_T1, scale_2F: float32, of rows and outputs.
        activation: a name from `ACTIVATIONS`, but not gelu by the error function.
        bias_2F: added to what is scaled.
        dtype: what gates, ups and their products are rounded to first, as they are elsewhere.
        interpret: run on any platform, slowly.

    Raises:
        ValueError: rows wider than `MAX_WIDTH`.
    """
    T, _, F = sums_T2F.shape
    operands = {
        "sums": sums_T2F, "row_scale": row_scale_T1, "scale": scale_2F, "bias": bias_2F,
    }  # fmt: skip
    layout = gated_layout(T, F, sums_T2F.dtype.itemsize)
    if interpret:  # programs run one after the other: none can wait for the next
        layout = layout._replace(programs=1)
    row = partial(_gated_row, activation=activation, dtype=dtype, on_card=not interpret)
    return _round(row, operands, (T, F), "round_gated", interpret, layout=layout)[0]


def round_added(
    sums_TD: jax.Array,
    row_scale_T1: jax.Array,
    scale_D: jax.Array,
    residual_TD: jax.Array,
    norm: Norm,
    bias_D: jax.Array | None = None,
    *,
    interpret: bool = False,
) -> Rows:
    """A product's sums that are yet to be scaled, added to a residual; and that, normalised, in
    e4m3.

    Args:
        sums_TD: in any float.
        row_scale_T1, scale_D: float32, of rows and outputs.
        residual_TD: its dtype is what is scaled and added is rounded to, as elsewhere.
        norm: over D.
        bias_D: added to what is scaled.
        interpret: run on any platform, slowly.

    Raises:
        ValueError: rows wider than `MAX_WIDTH`.
    """
    operands = {
        "sums": sums_TD, "row_scale": row_scale_T1, "scale": scale_D, "bias": bias_D,
        "residual": residual_TD, "factor": norm.scale_D,
    }  # fmt: skip
    row = partial(_added_row, eps=norm.eps, plus_one=norm.plus_one, on_card=not interpret)
    name = "round_added"
    rounded, (x_TD,) = _round(
        row, operands, sums_TD.shape, name, interpret,
        made_dtype=residual_TD.dtype, layout=added_layout(sums_TD.shape[1]),
    )  # fmt: skip
    return Rows(x_TD, rounded=rounded)


def _round(
    row: Callable[..., list[jax.Array]],
    operands: Mapping[str, jax.Array | None],
    shape: tuple[int, ...],
    name: str,
    interpret: bool,
    *,
    made_dtype: Any = None,
    layout: Layout | None = None,
) -> tuple[Rounded, list[jax.Array]]:
    """Round each row, and keep in `made_dtype` what it was before its norm.

    Args:
        row: (refs by name, t, columns [B] of some arrays): those arrays, and may fill "made".
        layout: None: `row_layout`.
    """
    T, D = shape
    if D > MAX_WIDTH:
        raise ValueError(f"rows of {D} are wider than {MAX_WIDTH}")
    block, num_warps, programs = layout or row_layout(D)
    given = {key: x for key, x in operands.items() if x is not None}
    if programs > 1:
        given["largest"] = jnp.full((T, programs, programs), EMPTY, jnp.int32)
    outs = {
        "q": jax.ShapeDtypeStruct((T, D), E4M3),
        "q_scale": jax.ShapeDtypeStruct((T, 1), jnp.float32),
    }
    if made_dtype is not None:
        outs["made"] = jax.ShapeDtypeStruct((T, D), made_dtype)
    results = pl.pallas_call(
        partial(
            _kernel,
            row=row,
            names=(*given, *outs),
            block=block,
            programs=programs,
            on_card=not interpret,
        ),
        grid=(T * programs,),
        out_shape=list(outs.values()),
        compiler_params=pltriton.CompilerParams(num_warps=num_warps),
        interpret=interpret,
        name=name,
    )(*given.values())
    return Rounded(*results[:2]), results[2:]


def _kernel(
    *refs: Any,
    row: Callable[..., list[jax.Array]],
    names: tuple[str, ...],
    block: int,
    programs: int,
    on_card: bool,
) -> None:
    ref = dict(zip(names, refs, strict=True))
    D = ref["q"].shape[1]
    pid = let_next_start(pl.program_id(0), on_card)
    # Offsets then cannot overflow, and those of columns become parts of instructions.
    pid &= pl.next_power_of_2(programs * ref["q"].shape[0]) - 1
    t, part = lax.div(pid, programs), lax.rem(pid, programs)
    blocks = pl.cdiv(D, programs * block)
    columns = [(part * blocks + i) * block + jnp.arange(block) for i in range(blocks)]
    values = row(ref, t, columns)
    largest = jnp.max(_wide(reduce(jnp.maximum, map(jnp.abs, values)), on_card))
    if programs > 1:
        largest = _largest_of_row(largest, ref["largest"], t, part)
    scale = row_scale(largest)
    for d_B, x_B in zip(columns, values, strict=True):
        # The card's own conversion clips, and keeps NaN.
        q_B = to_e4m3(_wide(x_B, on_card), scale, clip=not on_card)
        pltriton.store(ref["q"].at[t, d_B], q_B, mask=d_B < D)
    ref["q_scale"][t, 0] = scale


def _largest_of_row(largest: jax.Array, place_ref: Any, t: jax.Array, part: jax.Array) -> jax.Array:
    """Of all parts, by way of places [T, parts, parts that send]."""
    other_P = jnp.arange(place_ref.shape[1])
    part_P = jnp.full_like(other_P, part)
    sent = lax.bitcast_convert_type(largest, jnp.int32)  # in the floats' order: none is negative
    pltriton.store(place_ref.at[t, other_P, part_P], jnp.full_like(other_P, sent))
    own_P = place_ref.at[t, part_P, other_P]
    word_P = lax.while_loop(
        lambda word_P: word_P.min() == EMPTY,
        lambda _: pltriton.load(own_P, volatile=True),
        jnp.full_like(other_P, EMPTY),
    )
    pltriton.debug_barrier()  # all warps have read the words
    pltriton.store(own_P, jnp.full_like(other_P, EMPTY))
    return lax.bitcast_convert_type(word_P.max(), jnp.float32)


def _load(ref: Any, live_B: jax.Array) -> jax.Array:
    return pltriton.load(ref, mask=live_B, other=0)


def _ahead(loads: Iterable[Loads], on_card: bool) -> Iterable[Loads]:
    """Loads, the first of which are asked for before anything waits for one of them. The compiler
    would ask for fewer; of all together it often takes so many registers that a multiprocessor has
    no room for a second program.
    """
    rest = iter(loads)
    first = list(islice(rest, AHEAD))
    if on_card:
        pltriton.debug_barrier()  # which loads do not pass
    return chain(first, rest)


def _cast(x_B: jax.Array, dtype: Any, on_card: bool) -> jax.Array:
    """Float32s rounded to some dtype."""
    if not on_card or dtype != jnp.bfloat16:
        return x_B.astype(dtype)
    return elementwise(_TO_BFLOAT16, "=r,f,f", x_B, dtype=dtype, pack=2)


def _wide(x_B: jax.Array, on_card: bool) -> jax.Array:
    """As float32s."""
    if not on_card or x_B.dtype != jnp.bfloat16:
        return x_B.astype(jnp.float32)
    return elementwise(_TO_FLOAT32, "=&f,=f,r", x_B, dtype=jnp.float32, pack=2)


def _activated(gate_B: jax.Array, activation: str, on_card: bool) -> jax.Array:
    if not on_card or activation not in GATED_BY:
        return ACTIVATIONS[activation](gate_B)
    sigmoid_of_B = GATED_BY[activation](gate_B)
    return gate_B * elementwise(_SIGMOID, "=&f,f", sigmoid_of_B, dtype=jnp.float32)


def _scaled(
    sums_B: jax.Array, ref: Mapping[str, Any], t: jax.Array, at: tuple[Any, ...], live_B: jax.Array,
    dtype: Any, on_card: bool,
) -> jax.Array:  # fmt: skip
    """Sums of a row at these outputs, scaled, with their bias."""
    y_B = _wide(sums_B, on_card) * ref["row_scale"][t, 0] * _load(ref["scale"].at[at], live_B)
    y_B = _cast(y_B, dtype, on_card)
    if "bias" in ref:
        y_B += _load(ref["bias"].at[at], live_B)
    return y_B


def _normed(
    values: list[jax.Array], columns: list[jax.Array], ref: Mapping[str, Any], *, eps: float,
    plus_one: bool, on_card: bool,
) -> list[jax.Array]:  # fmt: skip
    """A row of some dtype, normalised and rounded to it."""
    D, dtype = ref["q"].shape[1], values[0].dtype
    factors = [_wide(_load(ref["factor"].at[d_B], d_B < D), on_card) for d_B in columns]
    wide = [_wide(x_B, on_card) for x_B in values]
    root = lax.rsqrt(reduce(jnp.add, map(jnp.square, wide)).sum() / D + eps)
    return [
        _cast(x_B * root * (factor_B + 1 if plus_one else factor_B), dtype, on_card)
        for x_B, factor_B in zip(wide, factors, strict=True)
    ]


def _plain_row(
    ref: Mapping[str, Any], t: jax.Array, columns: list[jax.Array],
    *, eps: float, plus_one: bool, on_card: bool,
) -> list[jax.Array]:  # fmt: skip
    values = [_load(ref["x"].at[t, d_B], d_B < ref["q"].shape[1]) for d_B in columns]
    if "factor" in ref:
        values = _normed(values, columns, ref, eps=eps, plus_one=plus_one, on_card=on_card)
    return values


def _gated_row(
    ref: Mapping[str, Any], t: jax.Array, columns: list[jax.Array],
    *, activation: str, dtype: Any, on_card: bool,
) -> list[jax.Array]:  # fmt: skip
    F = ref["q"].shape[1]
    sums = ([_load(ref["sums"].at[t, which, d_B], d_B < F) for which in (0, 1)] for d_B in columns)
    values = []
    for d_B, pair in zip(columns, _ahead(sums, on_card), strict=True):
        gate_B, up_B = (
            _wide(_scaled(sums_B, ref, t, (which, d_B), d_B < F, dtype, on_card), on_card)
            for which, sums_B in enumerate(pair)
        )
        values.append(_cast(_activated(gate_B, activation, on_card) * up_B, dtype, on_card))
    return values


def _added_row(
    ref: Mapping[str, Any], t: jax.Array, columns: list[jax.Array],
    *, eps: float, plus_one: bool, on_card: bool,
) -> list[jax.Array]:  # fmt: skip
    D = ref["q"].shape[1]
    pairs = (
        [_load(ref[name].at[t, d_B], d_B < D) for name in ("sums", "residual")] for d_B in columns
    )
    made = [
        _scaled(sums_B, ref, t, (d_B,), d_B < D, ref["made"].dtype, on_card) + residual_B
        for d_B, (sums_B, residual_B) in zip(columns, _ahead(pairs, on_card), strict=True)
    ]
    values = _normed(made, columns, ref, eps=eps, plus_one=plus_one, on_card=on_card)
    for d_B, x_B in zip(columns, made, strict=True):  # no load has to wait for these
        pltriton.store(ref["made"].at[t, d_B], x_B, mask=d_B < D)
    return values
