"""Weights and activations in 8-bit floats (e4m3), multiplied as such.

Activations are scaled row by row, so that what a token becomes never depends on its neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpaged.quantization.scheme import KERNEL, Arrays, ArraySpec, contract, few_rows, sum_dtype

E4M3 = jnp.float8_e4m3fn
LARGEST = 448.0  # of e4m3


@dataclass(frozen=True)
class Fp8:
    """e4m3 weights with a scale an output, times e4m3 rows with a scale each.

    Attributes:
        per_tensor: quantize with one scale a tensor, which every output then has; loading does not
            care.
    """

    per_tensor: bool = False

    @property
    def storage(self) -> str:
        """Of every weight."""
        return jnp.dtype(E4M3).name

    @property
    def packed(self) -> int:
        """A weight is a number."""
        return 1

    def arrays(self, size: int) -> Mapping[str, ArraySpec]:
        """[*outputs, I] and [*outputs]."""
        return {KERNEL: ArraySpec(E4M3, size), "kernel_scale": ArraySpec(jnp.float32)}

    def quantize(self, weight: jax.Array) -> Arrays:
        """Round to nearest; the largest becomes 448."""
        axes = tuple(range(weight.ndim)) if self.per_tensor else -1
        scale = _scale(jnp.max(jnp.abs(weight), axes, keepdims=True))
        return {
            KERNEL: _round(weight / scale),
            "kernel_scale": jnp.broadcast_to(scale, (*weight.shape[:-1], 1))[..., 0],
        }

    def product(
        self, x_TI: jax.Array, arrays: Mapping[str, jax.Array], fuse: bool, dtype: Any
    ) -> jax.Array:
        """Products of 8-bit floats, scaled after they are summed."""
        kernel, scale = arrays[KERNEL], arrays["kernel_scale"]
        q_TI, scale_T = quantize_rows(x_TI)
        if fuse:
            y = few_rows(q_TI, kernel, scale, row_scale_T=scale_T, dtype=dtype)
            if y is not None:
                return y
        y = contract(q_TI, kernel, dtype=sum_dtype(dtype)).astype(jnp.float32)
        return (y * scale_T.reshape(-1, *(1,) * scale.ndim) * scale).astype(dtype)


def quantize_rows(x_TI: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rows as e4m3 [T, I], and the float32 scale [T] of each."""
    x_TI = x_TI.astype(jnp.float32)
    scale_T = _scale(jnp.max(jnp.abs(x_TI), -1))
    return _round(x_TI / scale_T[:, None]), scale_T


def _scale(largest: jax.Array) -> jax.Array:
    """What values are divided by; zeros stay zeros. A product, since compilers take the freedom to
    make one of a quotient by a constant, or not, and a row must not depend on that.
    """
    return jnp.where(largest > 0, largest * (1 / LARGEST), 1.0)


def _round(x: jax.Array) -> jax.Array:
    """A quotient may come out a bit above the largest, which is no number in e4m3."""
    return jnp.clip(x, -LARGEST, LARGEST).astype(E4M3)
