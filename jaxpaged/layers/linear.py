"""Matrix products with a stored kernel."""

from __future__ import annotations

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from pallas_kernels.rms_norm import Norm, Rows, half_norm, rms_norm
from pallas_kernels.small_batch_linear import (
    ACTIVATIONS,
    is_faster,
    small_batch_linear,
)


def matmul_precision(dtype: Any) -> jax.lax.Precision | None:
    """float32 means float32: no TF32, no bfloat16 passes. Smaller types keep the default."""
    return jax.lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else None


class Linear(nn.Module):
    """[T, *inputs] to [T, *outputs] by a kernel of shape [*inputs, *outputs], plus a bias.

    Attributes:
        inputs: sizes of the axes that are summed over.
        outputs: sizes of the axes that come out.
        input_axes, output_axes: their logical names (None: never split), for parallel/sharding.py.
        use_bias: add a vector of shape [*outputs].
        dtype: of the weights and of the result.
        fuse: few rows may take a kernel that does all of this at once, where that is faster.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    input_axes: tuple[str | None, ...]
    output_axes: tuple[str | None, ...]
    use_bias: bool = False
    dtype: Any = jnp.float32
    fuse: bool = False

    @nn.compact
    def __call__(
        self,
        rows: Rows,
        *,
        norm: Norm | None = None,
        activation: str | None = None,
        residual: jax.Array | None = None,
        next_norm: Norm | None = None,
    ) -> Rows:
        """The product of normalised rows, made activation(gate) * up, added to a residual.

        Args:
            rows: [T, *inputs], or their merger; half normed by `norm` or not at all.
            norm: of the rows, over all of the inputs.
            activation: a name from `ACTIVATIONS`; the outputs are then (2, F), gates first, and
                [T, F] comes out.
            residual: [T, *outputs].
            next_norm: of the result, which may begin here.
        """
        kernel = self.param(
            "kernel",
            nn.with_logical_partitioning(
                nn.initializers.normal(0.02), (*self.input_axes, *self.output_axes)
            ),
            (*self.inputs, *self.outputs),
            self.dtype,
        )
        bias = None
        if self.use_bias:
            bias = self.param(
                "bias",
                nn.with_logical_partitioning(nn.initializers.zeros, self.output_axes),
                self.outputs,
                self.dtype,
            )
        # One axis to sum over: given several, XLA may transpose the whole kernel at every step.
        # The axes that come out stay apart, since merging could split one that a mesh shards.
        size = math.prod(self.inputs)
        x_TI, kernel = rows.x.reshape(-1, size), kernel.reshape(size, *self.outputs)
        if self.fuse and not (norm and norm.plus_one) and not (next_norm and next_norm.plus_one):
            gated = activation is not None
            merged = kernel if gated else kernel.reshape(size, -1)
            if is_faster(x_TI, merged, activation):
                half = norm and (rows.half_normed or half_norm(x_TI, norm.scale_D))
                y, half_normed = small_batch_linear(
                    half or x_TI,
                    merged,
                    eps=norm.eps if norm else 0.0,
                    bias=bias,
                    activation=activation,
                    residual_TF=residual,
                    next_scale_F=next_norm.scale_D if next_norm else None,
                )
                return Rows(y if gated else y.reshape(-1, *self.outputs), half_normed)
        if norm is not None:
            x_TI = rms_norm(x_TI, norm).astype(self.dtype)
        y = jax.lax.dot_general(
            x_TI, kernel, (((1,), (0,)), ((), ())), precision=matmul_precision(self.dtype)
        )
        if bias is not None:
            y += bias
        if activation is not None:
            y = y.astype(jnp.float32)
            y = (ACTIVATIONS[activation](y[:, 0]) * y[:, 1]).astype(self.dtype)
        return Rows(y if residual is None else residual + y)
