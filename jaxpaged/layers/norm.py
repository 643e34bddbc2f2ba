"""Root-mean-square normalisation."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp


def rms_normalize(x: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) over the last axis, in float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)


class RMSNorm(nn.Module):
    """x / rms(x) * factor over the last axis: float32 inside, `dtype` out.

    Attributes:
        plus_one: the stored scale is factor - 1, as Gemma has it.
    """

    size: int
    eps: float
    plus_one: bool = False
    dtype: Any = jnp.float32

    def setup(self) -> None:
        init = nn.initializers.zeros if self.plus_one else nn.initializers.ones
        self.scale = self.param(
            "scale", nn.with_logical_partitioning(init, (None,)), (self.size,), self.dtype
        )

    def factor(self) -> jax.Array:
        """What the normalised input is multiplied by, in float32."""
        return self.scale.astype(jnp.float32) + self.plus_one

    def __call__(self, x: jax.Array) -> jax.Array:
        return (rms_normalize(x, self.eps) * self.factor()).astype(self.dtype)
