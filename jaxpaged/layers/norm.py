"""Root-mean-square normalisation."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from pallas_kernels.rms_norm import Norm, rms_norm


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

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.operands()).astype(self.dtype)

    def operands(self) -> Norm:
        """For a product that normalises its rows on the way."""
        return Norm(self.scale, self.eps, self.plus_one)
