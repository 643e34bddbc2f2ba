"""Rows normalised or gated, and rounded to 8-bit floats, in Pallas' Triton dialect: one kernel, a
row a program. XLA would read them once to find the largest value of each, and once more to round.
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
from pallas_kernels.rms_norm import Norm, Rounded

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
    T, D = x_TD.shape
    norms = {} if norm is None else {"factor": norm.scale_D}
    eps, plus_one = (0.0, False) if norm is None else (norm.eps, norm.plus_one)
    row = partial(_normed_row, eps=eps, plus_one=plus_one)
    return _round(row, {"x": x_TD, **norms}, (T, D), "round_rows", interpret)


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
    biases = {} if bias_2F is None else {"bias": bias_2F}
    operands = {"sums": sums_T2F, "row_scale": row_scale_T1, "scale": scale_2F, **biases}
    row = partial(_gated_row, activation=activation, dtype=dtype)
    return _round(row, operands, (T, F), "round_gated", interpret)


def _round(
    row: Callable[..., jax.Array],
    operands: Mapping[str, jax.Array],
    shape: tuple[int, int],
    name: str,
    interpret: bool,
) -> Rounded:
    """Of each row (refs by name, t, d_B, which of them are there) as float32."""
    T, D = shape
    if D > MAX_WIDTH:
        raise ValueError(f"rows of {D} are wider than {MAX_WIDTH}")
    block = pl.next_power_of_2(D)
    q_TD, scale_T1 = pl.pallas_call(
        partial(_kernel, row=row, names=tuple(operands), block=block),
        grid=(T,),
        out_shape=[
            jax.ShapeDtypeStruct((T, D), E4M3),
            jax.ShapeDtypeStruct((T, 1), jnp.float32),
        ],
        compiler_params=pltriton.CompilerParams(num_warps=min(16, max(4, block // 1024))),
        interpret=interpret,
        name=name,
    )(*operands.values())
    return Rounded(q_TD, scale_T1)


def _kernel(*refs: Any, row: Callable[..., jax.Array], names: tuple[str, ...], block: int) -> None:
    *given, out_ref, scale_ref = refs
    t, d_B = pl.program_id(0), jnp.arange(block)
    live_B = d_B < out_ref.shape[1]
    x_B = row(dict(zip(names, given, strict=True)), t, d_B, live_B)
    scale = row_scale(jnp.max(jnp.abs(x_B)))
    pltriton.store(out_ref.at[t, d_B], to_e4m3(x_B / scale), mask=live_B)
    scale_ref[t, 0] = scale


def _load(ref: Any, live_B: jax.Array) -> jax.Array:
    return pltriton.load(ref, mask=live_B, other=0).astype(jnp.float32)


def _normed_row(
    ref: Mapping[str, Any],
    t: jax.Array,
    d_B: jax.Array,
    live_B: jax.Array,
    *,
    eps: float,
    plus_one: bool,
) -> jax.Array:
    x_B = _load(ref["x"].at[t, d_B], live_B)
    if "factor" not in ref:
        return x_B
    x_B *= lax.rsqrt(jnp.square(x_B).sum() / ref["x"].shape[1] + eps)
    x_B *= _load(ref["factor"].at[d_B], live_B) + plus_one
    return x_B.astype(ref["x"].dtype).astype(jnp.float32)


def _gated_row(
    ref: Mapping[str, Any],
    t: jax.Array,
    d_B: jax.Array,
    live_B: jax.Array,
    *,
    activation: str,
    dtype: Any,
) -> jax.Array:
    def half(which: int) -> jax.Array:
        sums_B = _load(ref["sums"].at[t, which, d_B], live_B)
        y_B = sums_B * ref["row_scale"][t, 0] * _load(ref["scale"].at[which, d_B], live_B)
        y_B = y_B.astype(dtype)
        if "bias" in ref:
            y_B += pltriton.load(ref["bias"].at[which, d_B], mask=live_B, other=0)
        return y_B.astype(jnp.float32)

    gate_B, up_B = half(0), half(1)
    return (ACTIVATIONS[activation](gate_B) * up_B).astype(dtype).astype(jnp.float32)
