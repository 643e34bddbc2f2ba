"""The root-mean-square norm in plain XLA, and its two halves as kernels share them out."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Norm(NamedTuple):
    """Operands of a root-mean-square norm over D.

    Attributes:
        scale_D: factors, less 1 if `plus_one`.
        eps: added to the mean square.
    """

    scale_D: jax.Array
    eps: float
    plus_one: bool


def rms_norm(x: jax.Array, norm: Norm) -> jax.Array:
    """x / rms(x) * factor over the last axis, in float32."""
    x = x.astype(jnp.float32)
    x *= lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + norm.eps)
    return x * (norm.scale_D.astype(jnp.float32) + norm.plus_one)


class HalfNormed(NamedTuple):
    """Rows that a norm has multiplied by its factors and not yet divided by their roots.

    A product can be divided as well as its rows: what makes the rows does the first half, and the
    product over them the second.

    Attributes:
        scaled_TD: the rows times the factors.
        square_XT: float32, sums of squares of X parts of each row before that.
    """

    scaled_TD: jax.Array
    square_XT: jax.Array


def row_root(square_XT: jax.Array, D: int, eps: float) -> jax.Array:
    """What a norm multiplies rows [T] of D terms by, of the sums of squares of their X parts."""
    return lax.rsqrt(square_XT.sum(axis=0) / D + eps)


class Rounded(NamedTuple):
    """Rows in 8-bit floats.

    Attributes:
        q_TD: e4m3.
        scale_T1: float32, of each row; each device has its own for its part of rows that are split.
    """

    q_TD: jax.Array
    scale_T1: jax.Array


class Rows(NamedTuple):
    """Rows, and what else the kernel that made them has made of them.

    Attributes:
        half_normed: the first half of the norm that comes next.
        rounded: for a product of 8-bit floats, normalised if a norm comes first.
    """

    x: jax.Array
    half_normed: HalfNormed | None = None
    rounded: Rounded | None = None


def half_norm(x_TD: jax.Array, scale_D: jax.Array) -> HalfNormed:
    """The first half of a norm without `plus_one`."""
    square_1T = jnp.square(x_TD.astype(jnp.float32)).sum(axis=-1)[None]
    return HalfNormed(x_TD * scale_D, square_1T)
