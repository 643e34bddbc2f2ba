"""Matrix products with a stored kernel."""

from __future__ import annotations

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp


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
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    input_axes: tuple[str | None, ...]
    output_axes: tuple[str | None, ...]
    use_bias: bool = False
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.param(
            "kernel",
            nn.with_logical_partitioning(
                nn.initializers.normal(0.02), (*self.input_axes, *self.output_axes)
            ),
            (*self.inputs, *self.outputs),
            self.dtype,
        )
        # One axis to sum over: given several, XLA may transpose the whole kernel at every step.
        # The axes that come out stay apart, since merging could split one that a mesh shards.
        size = math.prod(self.inputs)
        y = jax.lax.dot_general(
            x.reshape(-1, size),
            kernel.reshape(size, *self.outputs),
            (((1,), (0,)), ((), ())),
            precision=matmul_precision(self.dtype),
        )
        if self.use_bias:
            y += self.param(
                "bias",
                nn.with_logical_partitioning(nn.initializers.zeros, self.output_axes),
                self.outputs,
                self.dtype,
            )
        return y
