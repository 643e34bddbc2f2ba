"""Rows normalised and rounded to 8-bit floats, in Pallas' Triton dialect: one kernel, a row a
program.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.rms_norm import Norm

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


def round_rows(
    x_TD: jax.Array, norm: Norm | None = None, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Rows, normalised if need be, as e4m3 [T, D], and the float32 scale [T] of each.

    Args:
        x_TD: in any float; normalised rows are rounded to its dtype first, as they are elsewhere.
        norm: over D.
        interpret: run on any platform, slowly.

    Raises:
        ValueError: rows wider than `MAX_WIDTH`.
    """
    T, D = x_TD.shape
    if D > MAX_WIDTH:
        raise ValueError(f"rows of {D} are wider than {MAX_WIDTH}")
    block = pl.next_power_of_2(D)
    norms = () if norm is None else (norm.scale_D,)
    eps, plus_one = (0.0, False) if norm is None else (norm.eps, norm.plus_one)
    return pl.pallas_call(
        partial(_kernel, block=block, eps=eps, plus_one=plus_one),
        grid=(T,),
        out_shape=[
            jax.ShapeDtypeStruct((T, D), E4M3),
            jax.ShapeDtypeStruct((T,), jnp.float32),
        ],
        compiler_params=pltriton.CompilerParams(num_warps=min(16, max(4, block // 1024))),
        interpret=interpret,
        name="round_rows",
    )(x_TD, *norms)


def _kernel(x_ref: Any, *refs: Any, block: int, eps: float, plus_one: bool) -> None:
    *norm_ref, out_ref, scale_ref = refs
    t, d_B = pl.program_id(0), jnp.arange(block)
    D = x_ref.shape[1]
    live_B = d_B < D
    x_B = pltriton.load(x_ref.at[t, d_B], mask=live_B, other=0).astype(jnp.float32)
    if norm_ref:
        factor_B = pltriton.load(norm_ref[0].at[d_B], mask=live_B, other=0).astype(jnp.float32)
        x_B *= lax.rsqrt(jnp.square(x_B).sum() / D + eps)
        x_B = (x_B * (factor_B + plus_one)).astype(x_ref.dtype).astype(jnp.float32)
    scale = row_scale(jnp.max(jnp.abs(x_B)))
    pltriton.store(out_ref.at[t, d_B], to_e4m3(x_B / scale), mask=live_B)
    scale_ref[t] = scale
