"""Logical axes to mesh axes: the only file that says what tensor parallelism splits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpaged.parallel.mesh import MODEL
from pallas_kernels.rms_norm import Rows

# Axes not named here are whole on every device.
RULES = {"kv_heads": MODEL, "ffn": MODEL, "vocab": MODEL}

HOST = "pinned_host"  # the host's memory that devices copy from by themselves, as JAX names it

KV_PAGES_AXES = (None, None, "kv_heads")  # [P, 2, K, S, H], and scales [P, 2, K, S]
LAYER_SCALES_AXES = (None, "kv_heads")  # [2, K]
QKV_AXES = (None, "kv_heads", None, None)  # [T, K, X, H]
HEADS_AXES = (None, "kv_heads", None)  # [T, N, H]: a KV head's queries lie together


def partition(logical_axes: Sequence[str | None]) -> PartitionSpec:
    """Mesh axes of an array whose axes have these logical names."""
    return PartitionSpec(*(RULES.get(axis) if axis else None for axis in logical_axes))


def param_shardings(boxed_params: Any, mesh: Mesh) -> Any:
    """A sharding for every leaf of `models.decoder.abstract_params`.

    Raises:
        ValueError: an axis that is to be split does not divide by its mesh axis.
    """

    def sharding(path: Any, leaf: nn.LogicallyPartitioned) -> NamedSharding:
        spec = partition(leaf.names)
        for size, name, axis in zip(leaf.value.shape, leaf.names, spec, strict=True):
            if axis is not None and size % mesh.shape[axis]:
                where = jax.tree_util.keystr(path, simple=True, separator="/")
                raise ValueError(
                    f"{name} ({size}) of {where} does not divide by {mesh.shape[axis]} devices"
                )
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(
        sharding, boxed_params, is_leaf=lambda x: isinstance(x, nn.LogicallyPartitioned)
    )


def kv_pages_sharding(mesh: Mesh) -> NamedSharding:
    """Of each array of the pool: a device holds the heads whose queries it computes."""
    return NamedSharding(mesh, partition(KV_PAGES_AXES))


def tensor_sharding(shape: Sequence[int], axis: int, leaf: NamedSharding) -> NamedSharding:
    """Of a checkpoint's tensor on its way into a parameter: in parts, as that is, where it can be.

    Args:
        axis: of the tensor, that becomes the parameter's split one; another is split if that does
            not divide.
    """
    mesh = cast(Mesh, leaf.mesh)
    devices = mesh.shape[MODEL]
    if not leaf.is_fully_replicated:
        axes = range(len(shape))
        for split in (axis, *axes) if axis in axes else axes:
            if shape[split] % devices == 0:
                return NamedSharding(mesh, PartitionSpec(*[None] * split, MODEL))
    return replicated(mesh)


def split_attention(attend: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    """Attention on each device's own heads: none needs another's keys, so nothing is exchanged.

    Args:
        attend: (queries, keys and values of each KV head, pages, their layer's scales, *whole) ->
            (output, pages), where every device gets all of `whole`.
    """
    qkv, pages, heads = partition(QKV_AXES), partition(KV_PAGES_AXES), partition(HEADS_AXES)
    scales = partition(LAYER_SCALES_AXES)

    def split(qkv_TKXH: jax.Array, kv_pages: Any, scales_2K: Any, *whole: Any) -> Any:
        return jax.shard_map(
            attend,
            mesh=mesh,
            in_specs=(qkv, pages, scales, *(PartitionSpec() for _ in whole)),
            out_specs=(heads, pages),
            check_vma=False,
        )(qkv_TKXH, kv_pages, scales_2K, *whole)

    return split


def num_parts(logical_axes: Sequence[str | None], mesh: Mesh | None) -> int:
    """Devices that have a part each of an array whose axes have these logical names."""
    if mesh is None:
        return 1
    return math.prod(mesh.shape[axis] for axis in partition(logical_axes) if axis is not None)


def split_product(
    product: Callable[..., Rows],
    mesh: Mesh,
    weights: Mapping[str, Sequence[str | None]],
    inputs: Sequence[str | None],
    outputs: Sequence[str | None],
) -> Callable[..., Rows]:
    """A product of each device's own part of the weights, so that kernels can make it.

    If outputs are split, nothing is exchanged. If terms of the sum are, `product` adds up what the
    devices have, over the axis that it is given.

    Args:
        product: (rows, weights, axis) -> rows; every device gets all of what it closes over.
        weights, inputs, outputs: logical axes.
    """
    (axis,) = {axis for axis in partition(inputs) if axis is not None} or (None,)
    result = PartitionSpec() if axis else partition((None, *outputs))
    return jax.shard_map(
        partial(product, axis=axis),
        mesh=mesh,
        in_specs=(
            PartitionSpec(None, axis),
            {name: partition(axes) for name, axes in weights.items()},
        ),
        out_specs=result,
        check_vma=False,
    )


def split_lookup(lookup: Callable[..., jax.Array], mesh: Mesh) -> Callable[..., jax.Array]:
    """A lookup in each device's own part of a table [V, D].

    Args:
        lookup: (tokens, part of the table, axis) -> rows: adds up over that axis what devices find.
    """
    return jax.shard_map(
        partial(lookup, axis=RULES["vocab"]),
        mesh=mesh,
        in_specs=(PartitionSpec(), partition(("vocab", None))),
        out_specs=PartitionSpec(),
        check_vma=False,
    )


def replicated(mesh: Mesh) -> NamedSharding:
    """Whole on every device: tokens, tables and hidden states."""
    return NamedSharding(mesh, PartitionSpec())


def put(array: np.ndarray | jax.Array, sharding: jax.sharding.Sharding) -> jax.Array:
    """Onto devices, also of several hosts: each has the whole array, and sends its own ones theirs.

    `jax.device_put` would first compare the hosts' arrays, over the network.
    """
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
