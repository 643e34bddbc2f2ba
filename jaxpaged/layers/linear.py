"""Matrix products with a stored kernel."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp


def matmul_precision(dtype: Any) -> jax.lax.Precision | None:
    """float32 means float32: no TF32, no bfloat16 passes. Smaller types keep the default."""
    return jax.lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else None


class Einsum(nn.Module):
    """`einsum(equation, x, kernel)`, plus a bias over the output axes that the kernel owns.

    Attributes:
        equation: such as "TD,DKXH->TKXH"; T, the tokens, is the one axis the kernel lacks.
        shape: of the kernel, in the order of its letters.
        axes: logical names of the kernel's axes (None: never split), for parallel/sharding.py.
        use_bias: whether there is a bias.
        dtype: of the kernel and of the result.
    """

    equation: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    use_bias: bool = False
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.param(
            "kernel",
            nn.with_logical_partitioning(nn.initializers.normal(0.02), self.axes),
            self.shape,
            self.dtype,
        )
        y = jnp.einsum(self.equation, x, kernel, precision=matmul_precision(self.dtype))
        if self.use_bias:
            inputs, output = self.equation.split("->")
            letters = inputs.split(",")[1]
            owned = [letters.index(letter) for letter in output if letter in letters]
            y += self.param(
                "bias",
                nn.with_logical_partitioning(
                    nn.initializers.zeros, tuple(self.axes[i] for i in owned)
                ),
                tuple(self.shape[i] for i in owned),
                self.dtype,
            )
        return y
