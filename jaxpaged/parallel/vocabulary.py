"""Best of logits whose vocabulary is split over devices: candidates travel, logits do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxpaged.parallel.mesh import MODEL
from jaxpaged.parallel.sharding import partition
from pallas_kernels import sampling


def argmax(x_RV: jax.Array, mesh: Mesh | None) -> jax.Array:
    """First of the largest, as `pallas_kernels.sampling.argmax`."""
    if mesh is None:
        return sampling.argmax(x_RV)

    def best(x_RV: jax.Array) -> jax.Array:
        id_R1 = sampling.argmax(x_RV)[:, None]
        value_R1 = jnp.take_along_axis(x_RV, id_R1, axis=-1)
        value_RX, id_RX = _exchange(value_R1, id_R1, x_RV)
        return jnp.take_along_axis(id_RX, sampling.argmax(value_RX)[:, None], axis=-1)[:, 0]

    return _on_parts(best, mesh)(x_RV)


def top_k(x_RV: jax.Array, k: int, mesh: Mesh | None) -> tuple[jax.Array, jax.Array]:
    """The largest, best first, and where they are, as `lax.top_k`."""
    if mesh is None:
        return lax.top_k(x_RV, k)

    def best(x_RV: jax.Array) -> tuple[jax.Array, jax.Array]:
        found = lax.top_k(x_RV, min(k, x_RV.shape[1]))
        value_RX, id_RX = _exchange(*found, x_RV)
        value_RX, at_RX = lax.top_k(value_RX, k)
        return value_RX, jnp.take_along_axis(id_RX, at_RX, axis=-1)

    return _on_parts(best, mesh)(x_RV)


def _exchange(
    value_RX: jax.Array, id_RX: jax.Array, part_RV: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Every device's candidates, side by side in the order of the vocabulary, in one transfer."""
    id_RX += lax.axis_index(MODEL) * part_RV.shape[1]
    both_R2X = jnp.stack((lax.bitcast_convert_type(value_RX, jnp.int32), id_RX), axis=1)
    both_R2X = lax.all_gather(both_R2X, MODEL, axis=2, tiled=True)
    return lax.bitcast_convert_type(both_R2X[:, 0], jnp.float32), both_R2X[:, 1]


def _on_parts(function: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=partition((None, "vocab")),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
