"""The token embedding, and the head that turns hidden states into logits."""

from __future__ import annotations

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jaxpaged.layers.linear import matmul_precision
from jaxpaged.parallel.sharding import split_lookup
from pallas_kernels.peer_sum import Peers, is_supported, peer_sum


class Embedding(nn.Module):
    """A [V, D] table: looked up by token, or multiplied with to score every token.

    Attributes:
        mesh: the devices that share the table; None: one has all of it.
    """

    vocab: int
    width: int
    dtype: Any = jnp.float32
    mesh: Mesh | None = None

    def setup(self) -> None:
        self.table_VD = self.param(
            "table",
            nn.with_logical_partitioning(nn.initializers.normal(0.02), ("vocab", None)),
            (self.vocab, self.width),
            self.dtype,
        )

    def __call__(self, token_T: jax.Array, peers: Peers | None = None) -> jax.Array:
        """Rows of the table: [T, D]; `peers` as for `Linear`."""
        if self.mesh is None:
            return jnp.take(self.table_VD, token_T, axis=0, mode="clip")
        token_T = jnp.clip(token_T, 0, self.vocab - 1)
        return split_lookup(partial(_lookup, peers=peers), self.mesh)(token_T, self.table_VD)

    def logits(self, hidden_RD: jax.Array) -> jax.Array:
        """Scores of every token, accumulated and returned in float32: [R, V]."""
        return jnp.einsum(
            "RD,VD->RV",
            hidden_RD,
            self.table_VD,
            precision=matmul_precision(self.dtype),
            preferred_element_type=jnp.float32,
        )


def _lookup(token_T: jax.Array, table_VD: jax.Array, axis: str, peers: Peers | None) -> jax.Array:
    """Rows of a table, of which this device has a part."""
    rank, V = lax.axis_index(axis), table_VD.shape[0]
    row_T = token_T - rank * V
    found_TD = jnp.take(table_VD, row_T, axis=0, mode="clip")
    found_TD = jnp.where(((row_T >= 0) & (row_T < V))[:, None], found_TD, 0)
    if peers is not None and is_supported(found_TD, peers.addresses_N2.shape[0]):
        return peer_sum(found_TD, peers, rank).x
    return lax.psum(found_TD, axis)
