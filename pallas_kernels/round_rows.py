"""Rows normalised, gated or added up, and rounded to 8-bit floats, in Pallas' Triton dialect: one
kernel, a row a program. XLA would read a row to find its largest value, and again to round it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.product_parts import ACTIVATIONS
from pallas_kernels.rms_norm import Norm, Rounded, Rows

E4M3 = jnp.float8_e4m3fn
LARGEST = 448.0  # of e4m3
MAX_WIDTH = 32768  # of a row, which a program holds in its registers


def row_scale(largest: jax.Array) -> jax.Array:
    """What values are divided by; zeros stay zeros. A product, since compilers take the freedom to
    make one of a quotient by a constant, or not, and a row must not depend on that.
    """
    return jnp.where(largest > 0, largest * (1 / LARGEST), 1.0)


def to_e4m3(x: jax.Array) -> jax.Array:
    """A quotient may come out a bit above the largest, which is no number in e4m3."""
    return jnp.clip(x, -LARGEST, LARGEST).astype(E4M3)


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
    row = partial(_plain_row, eps=eps, plus_one=plus_one)
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
    row = partial(_gated_row, activation=activation, dtype=dtype)
    return _round(row, operands, (T, F), "round_gated", interpret)[0]


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
    row = partial(_added_row, eps=norm.eps, plus_one=norm.plus_one)
    name = "round_added"
    rounded, (x_TD,) = _round(row, operands, sums_TD.shape, name, interpret, residual_TD.dtype)
    return Rows(x_TD, rounded=rounded)


def _round(
    row: Callable[..., jax.Array],
    operands: Mapping[str, jax.Array | None],
    shape: tuple[int, ...],
    name: str,
    interpret: bool,
    made_dtype: Any = None,
) -> tuple[Rounded, list[jax.Array]]:
    """Round each row, and keep in `made_dtype` what it was before its norm.

    Args:
        row: (refs by name, t, d_B, which of them are there): float32 [B], and may fill "made".
    """
    T, D = shape
    if D > MAX_WIDTH:
        raise ValueError(f"rows of {D} are wider than {MAX_WIDTH}")
    block, given = pl.next_power_of_2(D), {key: x for key, x in operands.items() if x is not None}
    outs = {
        "q": jax.ShapeDtypeStruct((T, D), E4M3),
        "q_scale": jax.ShapeDtypeStruct((T, 1), jnp.float32),
    }
    if made_dtype is not None:
        outs["made"] = jax.ShapeDtypeStruct((T, D), made_dtype)
    results = pl.pallas_call(
        partial(_kernel, row=row, names=(*given, *outs), block=block),
        grid=(T,),
        out_shape=list(outs.values()),
        compiler_params=pltriton.CompilerParams(num_warps=min(16, max(4, block // 1024))),
        interpret=interpret,
        name=name,
    )(*given.values())
    return Rounded(*results[:2]), results[2:]


def _kernel(*refs: Any, row: Callable[..., jax.Array], names: tuple[str, ...], block: int) -> None:
    ref = dict(zip(names, refs, strict=True))
    t, d_B = pl.program_id(0), jnp.arange(block)
    live_B = d_B < ref["q"].shape[1]
    x_B = row(ref, t, d_B, live_B)
    scale = row_scale(jnp.max(jnp.abs(x_B)))
    pltriton.store(ref["q"].at[t, d_B], to_e4m3(x_B / scale), mask=live_B)
    ref["q_scale"][t, 0] = scale


def _load(ref: Any, live_B: jax.Array) -> jax.Array:
    return pltriton.load(ref, mask=live_B, other=0).astype(jnp.float32)


def _scaled(
    ref: Mapping[str, Any], t: jax.Array, at: tuple[Any, ...], live_B: jax.Array, dtype: Any
) -> jax.Array:
    """Sums of a row at these outputs, scaled, with their bias."""
    scale = ref["row_scale"][t, 0]
    y_B = _load(ref["sums"].at[t, *at], live_B) * scale * _load(ref["scale"].at[at], live_B)
    y_B = y_B.astype(dtype)
    if "bias" in ref:
        y_B += pltriton.load(ref["bias"].at[at], mask=live_B, other=0)
    return y_B


def _normed(
    x_B: jax.Array, ref: Mapping[str, Any], d_B: jax.Array, live_B: jax.Array,
    eps: float, plus_one: bool,
) -> jax.Array:  # fmt: skip
    """A row of some dtype, normalised and rounded to it."""
    wide_B = x_B.astype(jnp.float32)
    wide_B *= lax.rsqrt(jnp.square(wide_B).sum() / ref["q"].shape[1] + eps)
    return (wide_B * (_load(ref["factor"].at[d_B], live_B) + plus_one)).astype(x_B.dtype)


def _plain_row(
    ref: Mapping[str, Any], t: jax.Array, d_B: jax.Array, live_B: jax.Array,
    *, eps: float, plus_one: bool,
) -> jax.Array:  # fmt: skip
    x_B = pltriton.load(ref["x"].at[t, d_B], mask=live_B, other=0)
    if "factor" in ref:
        x_B = _normed(x_B, ref, d_B, live_B, eps, plus_one)
    return x_B.astype(jnp.float32)


def _gated_row(
    ref: Mapping[str, Any], t: jax.Array, d_B: jax.Array, live_B: jax.Array,
    *, activation: str, dtype: Any,
) -> jax.Array:  # fmt: skip
    gate_B, up_B = (
        _scaled(ref, t, (which, d_B), live_B, dtype).astype(jnp.float32) for which in (0, 1)
    )
    return (ACTIVATIONS[activation](gate_B) * up_B).astype(dtype).astype(jnp.float32)


def _added_row(
    ref: Mapping[str, Any], t: jax.Array, d_B: jax.Array, live_B: jax.Array,
    *, eps: float, plus_one: bool,
) -> jax.Array:  # fmt: skip
    x_B = _scaled(ref, t, (d_B,), live_B, ref["made"].dtype)
    x_B += pltriton.load(ref["residual"].at[t, d_B], mask=live_B, other=0)
    pltriton.store(ref["made"].at[t, d_B], x_B, mask=live_B)
    return _normed(x_B, ref, d_B, live_B, eps, plus_one).astype(jnp.float32)
