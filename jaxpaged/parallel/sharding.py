"""Logical axes to mesh axes: the only file that says what tensor parallelism splits."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpaged.parallel.mesh import MODEL

# Everything unnamed is whole on every device.
RULES = (("kv_heads", MODEL), ("ffn", MODEL), ("vocab", MODEL))

KV_PAGES_AXES = (None, None, "kv_heads", None, None)  # [P, 2, K, S, H]


def param_shardings(abstract_params: Any, mesh: Mesh) -> Any:
    """A sharding for every leaf of `models.decoder.abstract_params`.

    Raises:
        ValueError: an axis that is to be split does not divide by the mesh axis.
    """
    specs = nn.get_partition_spec(abstract_params)
    shapes = nn.meta.unbox(abstract_params)

    def sharding(path: Any, logical: PartitionSpec, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        spec = PartitionSpec(*nn.logical_to_mesh_axes(logical, RULES))
        for size, name, axis in zip(leaf.shape, logical, spec, strict=False):
            if axis is not None and size % mesh.shape[axis]:
                raise ValueError(
                    f"{name} {size} does not divide by {mesh.shape[axis]} devices "
                    f"({jax.tree_util.keystr(path, simple=True, separator='/')})"
                )
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(
        sharding, specs, shapes, is_leaf=lambda x: isinstance(x, PartitionSpec)
    )


def kv_pages_sharding(mesh: Mesh) -> NamedSharding:
    """Of each [P, 2, K, S, H] array: a device holds the heads whose queries it computes."""
    return NamedSharding(mesh, PartitionSpec(*nn.logical_to_mesh_axes(KV_PAGES_AXES, RULES)))


def replicated(mesh: Mesh) -> NamedSharding:
    """Whole on every device: tokens, tables and hidden states."""
    return NamedSharding(mesh, PartitionSpec())
