"""Puts a model's weights on the device, one leaf at a time."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import orbax.checkpoint as ocp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, SingleDeviceSharding
from tqdm import tqdm

from jaxpaged.model_files import ModelFilesError
from jaxpaged.models.decoder import Decoder, Params, abstract_params
from jaxpaged.parallel.sharding import param_shardings, replicated
from jaxpaged.runtime.safetensor_files import (
    INDEX_FILE,
    SINGLE_FILE,
    Leaves,
    SafetensorFiles,
    load_leaves,
)

LARGEST_RANDOM = 0.02 * 3**0.5  # a standard deviation of 0.02
ORBAX_FOLDER = "orbax"  # inside a model folder that `checkpoint.convert` wrote


def load_params(
    path: Path,
    model: Decoder,
    *,
    mesh: Mesh | None = None,
    load_format: str = "auto",
    seed: int = 0,
    progress: bool = True,
) -> Params:
    """The parameters of `model`, in its dtype, on the first device or spread over `mesh`.

    Args:
        path: the model's folder.
        load_format: safetensors, orbax (what `checkpoint.convert` wrote), dummy (random weights)
            or auto: whichever of the first two the folder holds.
        seed: of random weights.
        progress: show a bar.

    Raises:
        ModelFilesError: weights are missing, unreadable or do not fit config.json; one line.
        ValueError: the mesh does not divide the model.
    """
    leaves = abstract_leaves(model, mesh)
    if load_format == "auto":
        load_format = _find_format(path)
    if load_format == "orbax":
        return _restore(path, leaves)
    if load_format == "dummy":
        loaded = _random_leaves(leaves, seed, model.spec.norm_plus_one)
        total = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves.values())
    else:
        files = SafetensorFiles(path)
        loaded = load_leaves(files, leaves, model.spec, None if mesh is None else replicated(mesh))
        total = files.num_bytes
    params: dict[str, jax.Array] = {}
    previous = None
    with tqdm(
        total=total, unit="B", unit_scale=True, desc="Loading weights", disable=not progress
    ) as bar:
        for name, leaf, num_bytes in loaded:
            params[name] = leaf
            bar.update(num_bytes)
            # Reading runs one leaf ahead of the device and no more: the host stays small.
            jax.block_until_ready(previous)
            previous = leaf
    return unflatten_dict(params, sep="/")


def abstract_leaves(model: Decoder, mesh: Mesh | None = None) -> Leaves:
    """Shape, dtype and sharding of every parameter, by its path."""
    boxed = abstract_params(model)
    leaves = flatten_dict(nn.meta.unbox(boxed), sep="/")
    if mesh is None:
        shardings = dict.fromkeys(leaves, SingleDeviceSharding(jax.local_devices()[0]))
    else:
        shardings = flatten_dict(param_shardings(boxed, mesh), sep="/")
    return {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=shardings[name])
        for name, leaf in leaves.items()
    }


def _find_format(path: Path) -> str:
    if (path / SINGLE_FILE).exists() or (path / INDEX_FILE).exists():
        return "safetensors"
    if (path / ORBAX_FOLDER).is_dir():
        return "orbax"
    raise ModelFilesError(
        f"{path} holds no weights: neither {SINGLE_FILE}, {INDEX_FILE} nor a folder {ORBAX_FOLDER}"
    )


def _restore(path: Path, leaves: Leaves) -> Params:
    """Read an Orbax checkpoint, each leaf straight into its dtype and sharding."""
    folder = (path / ORBAX_FOLDER).resolve()
    if not folder.is_dir():
        raise ModelFilesError(f"{folder} is missing")
    with ocp.StandardCheckpointer() as checkpointer:
        try:
            stored = flatten_dict(checkpointer.metadata(folder).item_metadata.tree, sep="/")
        except (OSError, ValueError) as error:
            raise ModelFilesError(f"{folder} is no readable Orbax checkpoint: {error}") from error
        wrong = sorted(
            name
            for name in stored.keys() | leaves.keys()
            if name not in stored
            or name not in leaves
            or tuple(stored[name].shape) != leaves[name].shape
        )
        if wrong:
            raise ModelFilesError(f"{folder} does not fit config.json: {', '.join(wrong[:4])}")
        return checkpointer.restore(folder, unflatten_dict(leaves, sep="/"))


def _random_leaves(
    leaves: Leaves, seed: int, norm_plus_one: bool
) -> Iterator[tuple[str, jax.Array, int]]:
    """Small random matrices, no biases, norms that only normalise: to measure speed with."""
    for index, (name, leaf) in enumerate(leaves.items()):
        kind = name.rsplit("/", 1)[-1]
        constant = {"bias": 0.0, "scale": 0.0 if norm_plus_one else 1.0}.get(kind)
        if constant is None:
            made = _random_leaf(leaf)(np.uint32(seed % 2**32), np.uint32(index))
        else:
            made = jax.device_put(np.full(leaf.shape, constant, leaf.dtype), leaf.sharding)
        yield name, made, leaf.size * leaf.dtype.itemsize


@functools.cache
def _random_leaf(leaf: jax.ShapeDtypeStruct) -> Any:
    """Compiled once for all layers, and fast: the device's own generator, evenly distributed."""

    def make(seed: jax.Array, index: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed, impl="rbg"), index)
        return jax.random.uniform(key, leaf.shape, leaf.dtype, -LARGEST_RANDOM, LARGEST_RANDOM)

    return jax.jit(make, out_shardings=leaf.sharding)
