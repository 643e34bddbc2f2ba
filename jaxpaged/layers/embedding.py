"""The token embedding, and the head that turns hidden states into logits."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxpaged.layers.linear import matmul_precision


class Embedding(nn.Module):
    """A [V, D] table: looked up by token, or multiplied with to score every token."""

    vocab: int
    width: int
    dtype: Any = jnp.float32

    def setup(self) -> None:
        self.table_VD = self.param(
            "table",
            nn.with_logical_partitioning(nn.initializers.normal(0.02), ("vocab", None)),
            (self.vocab, self.width),
            self.dtype,
        )

    def __call__(self, token_T: jax.Array) -> jax.Array:
        """Rows of the table: [T, D]."""
        return jnp.take(self.table_VD, token_T, axis=0, mode="clip")

    def logits(self, hidden_RD: jax.Array) -> jax.Array:
        """Scores of every token, accumulated and returned in float32: [R, V]."""
        return jnp.einsum(
            "RD,VD->RV",
            hidden_RD,
            self.table_VD,
            precision=matmul_precision(self.dtype),
            preferred_element_type=jnp.float32,
        )
