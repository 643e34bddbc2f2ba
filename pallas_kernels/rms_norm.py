"""The root-mean-square norm in plain XLA, and its operands as kernels take them."""

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
