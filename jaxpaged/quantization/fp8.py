"""Weights and activations in 8-bit floats (e4m3), multiplied as such.

Activations are scaled row by row, so that what a token becomes never depends on its neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpaged.quantization.scheme import (
    KERNEL,
    Around,
    Arrays,
    ArraySpec,
    contract,
    few_rows,
    few_rows_fit,
    finished,
    sum_dtype,
)
from pallas_kernels.product_parts import NOT_IN_KERNELS
from pallas_kernels.rms_norm import Rows
from pallas_kernels.round_rows import (
    E4M3,
    MAX_WIDTH,
    round_added,
    round_gated,
    round_rows,
    row_scale,
    to_e4m3,
)


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
    def rounds_rows(self) -> bool:
        """By a scale each."""
        return True

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
        scale = row_scale(jnp.max(jnp.abs(weight), axes, keepdims=True))
        return {
            KERNEL: to_e4m3(weight, scale),
            "kernel_scale": jnp.broadcast_to(scale, (*weight.shape[:-1], 1))[..., 0],
        }

    def product(self, x_TI: jax.Array, arrays: Mapping[str, jax.Array], dtype: Any) -> jax.Array:
        """Products of 8-bit floats, scaled after they are summed."""
        q_TI, scale_T = quantize_rows(x_TI)
        sums = contract(q_TI, arrays[KERNEL], dtype=sum_dtype(dtype))
        return _scaled(sums, scale_T[:, None], arrays, dtype)

    def fused(
        self, rows: Rows, arrays: Mapping[str, jax.Array], around: Around, dtype: Any
    ) -> Rows | None:
        """Rows are normalised and rounded by one kernel. Few are multiplied by another; of more,
        XLA makes sums, and what follows those is rounded for the next product, too.
        """
        norm, bias, activation, residual, next_norm = around
        if rows.x.shape[1] > MAX_WIDTH:
            return None
        q_TI, scale_T1 = rows.rounded or round_rows(rows.x, norm)
        if few_rows_fit(q_TI.shape, E4M3, arrays, activation):
            plain = around._replace(norm=None, next_norm=None)
            return few_rows(q_TI, arrays, plain, scale_T1[:, 0], dtype=dtype)
        sums, scale = contract(q_TI, arrays[KERNEL], dtype=sum_dtype(dtype)), arrays["kernel_scale"]
        fits = sums.shape[-1] <= MAX_WIDTH
        if residual is not None and next_norm is not None and sums.ndim == 2 and fits:
            return round_added(sums, scale_T1, scale, residual, next_norm, bias)
        y = finished(_scaled(sums, scale_T1, arrays, dtype), dtype, bias, activation, residual)
        if activation in (None, NOT_IN_KERNELS) or not fits:
            return Rows(y)
        # What is not needed of the two is not computed.
        rounded = round_gated(sums, scale_T1, scale, activation, bias, dtype=dtype)
        return Rows(y, rounded=rounded)


def _scaled(
    sums: jax.Array, scale_T1: jax.Array, arrays: Mapping[str, jax.Array], dtype: Any
) -> jax.Array:
    """Products [T, *outputs] of their sums in 8-bit floats."""
    scale = arrays["kernel_scale"]
    y = sums.astype(jnp.float32) * scale_T1.reshape(-1, *(1,) * scale.ndim) * scale
    return y.astype(dtype)


def quantize_rows(x_TI: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rows as e4m3 [T, I], and the float32 scale [T] of each."""
    x_TI = x_TI.astype(jnp.float32)
    scale_T = row_scale(jnp.max(jnp.abs(x_TI), -1))
    return to_e4m3(x_TI, scale_T[:, None]), scale_T
