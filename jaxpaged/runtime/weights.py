"""Puts a model's weights on the device, one leaf at a time."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import SingleDeviceSharding
from tqdm import tqdm

from jaxpaged.gguf.folder import find_gguf
from jaxpaged.model_files import ModelFilesError
from jaxpaged.models.decoder import Decoder, Params, abstract_params
from jaxpaged.models.prefetch import is_matrix
from jaxpaged.models.spec import ModelSpec
from jaxpaged.models.spread import spread_leaf
from jaxpaged.parallel.sharding import HOST, param_shardings, put, tensor_sharding
from jaxpaged.quantization import KERNEL, Arrays, Quantized
from jaxpaged.runtime.gguf_files import GgufFiles
from jaxpaged.runtime.kv_scales import LEAF, is_kv_scale, load_kv_scales, read_scales
from jaxpaged.runtime.quantized_leaves import Leaves, kernel_leaves, quantize_rows, stored_shape
from jaxpaged.runtime.safetensor_files import (
    INDEX_FILE,
    SINGLE_FILE,
    SafetensorFiles,
    layerless,
    load_leaves,
)

LARGEST_RANDOM = 0.02 * 3**0.5  # a standard deviation of 0.02
# Inside a model folder that `checkpoint.convert` wrote.
ORBAX_FOLDER = "orbax"
SCALES_FILE = "kv_scales.safetensors"  # if the checkpoint had scales of keys and values


def load_params(
    path: Path,
    model: Decoder,
    *,
    device: jax.Device | None = None,
    load_format: str = "auto",
    seed: int = 0,
    progress: bool = True,
    kv_scales: Path | None = None,
) -> Params:
    """The parameters of `model`, in its dtype, on one device or spread over its mesh.

    Args:
        path: the model's folder.
        device: where they go if the model has no mesh; None: the first.
        load_format: safetensors, orbax (what `checkpoint.convert` wrote), gguf, dummy (random
            weights) or auto: whichever of the first three the folder holds.
        seed: of random weights.
        progress: show a bar.
        kv_scales: file of the scales of keys and values, for pages that want them; None: the
            checkpoint's, or 1.

    Raises:
        ModelFilesError: weights are missing, unreadable or do not fit config.json; one line.
        ValueError: the mesh does not divide the model.
    """
    leaves = abstract_leaves(model, device)
    scale_leaves = {name: leaves.pop(name) for name in list(leaves) if name.endswith(LEAF)}
    whole = leaves  # what a checkpoint holds, of all stages
    if model.part is not None:
        every = abstract_leaves(model.clone(part=None), device)
        whole = {name: leaf for name, leaf in every.items() if not name.endswith(LEAF)}
    if load_format == "auto":
        load_format = find_format(path)
    scales = stored_scales(path, load_format) if kv_scales is None else read_scales(kv_scales)
    params: dict[str, jax.Array] = {}
    loaded: Iterator[tuple[str, jax.Array, int]] = iter(())
    if load_format == "orbax":
        if any(layer.quantization.made_while_loading for layer in model.spec.layers):
            raise ModelFilesError(
                f"--quantization reads safetensors or GGUF, and {path} is Orbax: name the folder "
                f"that it was converted from, or leave --quantization out"
            )
        params = flatten_dict(_restore(path, model, leaves, whole), sep="/")
        total = 0
    elif load_format == "dummy":
        loaded = _random_leaves(model, leaves, whole, seed)
        total = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves.values())
    else:
        files = GgufFiles(path) if load_format == "gguf" else SafetensorFiles(path)
        loaded = load_leaves(files, leaves, whole, model.spec)
        total = files.num_bytes * _num_elements(leaves) // _num_elements(whole)
    params |= load_kv_scales(scale_leaves, model.spec, scales, str(kv_scales or path))
    previous: jax.Array | None = None
    with tqdm(
        total=total,
        unit="B",
        unit_scale=True,
        desc="Loading weights",
        disable=not (progress and total),
    ) as bar:
        for name, leaf, num_bytes in loaded:
            params[name] = leaf
            bar.update(num_bytes)
            # Reading runs one leaf ahead of the device and no more: the host stays small.
            jax.block_until_ready(previous)
            previous = leaf
    return unflatten_dict(params, sep="/")


def _num_elements(leaves: Leaves) -> int:
    return sum(leaf.size for leaf in leaves.values())


def abstract_leaves(model: Decoder, device: jax.Device | None = None) -> Leaves:
    """Shape, dtype and sharding of every parameter, by its path; `device` as for `load_params`."""
    boxed = abstract_params(model)
    leaves = flatten_dict(nn.meta.unbox(boxed), sep="/")
    if model.mesh is None:
        shardings = dict.fromkeys(leaves, SingleDeviceSharding(device or jax.local_devices()[0]))
    else:
        shardings = flatten_dict(param_shardings(boxed, model.mesh), sep="/")
    hosted = tuple(f"layers_{index}/" for index in model.host_layers)
    for name in leaves:
        if name.startswith(hosted) and is_matrix(name):
            shardings[name] = shardings[name].with_memory_kind(HOST)
    return {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=shardings[name])
        for name, leaf in leaves.items()
    }


def find_format(path: Path) -> str:
    """What a model folder holds: safetensors, orbax or gguf.

    Raises:
        ModelFilesError: none of them.
    """
    if (path / SINGLE_FILE).exists() or (path / INDEX_FILE).exists():
        return "safetensors"
    if (path / ORBAX_FOLDER).is_dir():
        return "orbax"
    if find_gguf(path) is not None:
        return "gguf"
    raise ModelFilesError(
        f"{path} holds no weights: neither {SINGLE_FILE}, {INDEX_FILE}, a .gguf file nor a folder "
        f"{ORBAX_FOLDER}"
    )


def stored_scales(path: Path, load_format: str) -> Mapping[str, np.ndarray]:
    """The scales of keys and values that a model folder holds, by name; random weights have none.

    Raises:
        ModelFilesError: a file is missing or unreadable.
    """
    if load_format == "safetensors":
        files = SafetensorFiles(path)
        found = filter(is_kv_scale, files.names)
        return {name: files.read(name).astype(np.float32) for name in found}
    kept = path / SCALES_FILE
    return read_scales(kept) if load_format == "orbax" and kept.exists() else {}


def _stored_leaves(model: Decoder, leaves: Leaves) -> Leaves:
    """The leaves as a checkpoint has them, whatever devices share the model: in parts all the same,
    where it has another shape.
    """
    if model.spec == model.spec.stored:
        return leaves
    spec, kv = model.spec.stored, replace(model.kv, num_kv_heads=model.spec.stored.num_kv_heads)
    shapes = flatten_dict(
        nn.meta.unbox(abstract_params(model.clone(spec=spec, kv=kv, mesh=None))), sep="/"
    )
    stored = {}
    for name, leaf in leaves.items():
        shape, sharding = shapes[name].shape, leaf.sharding
        if shape != leaf.shape:
            sharding = tensor_sharding(shape, 0, sharding)
        stored[name] = jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)
    return stored


def _restore(path: Path, model: Decoder, leaves: Leaves, whole: Leaves) -> Params:
    """Read an Orbax checkpoint, each leaf straight into its dtype and sharding."""
    wanted, leaves = leaves, _stored_leaves(model, leaves)
    whole = _stored_leaves(model.clone(part=None), whole)
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
            for name in stored.keys() | whole.keys()
            if name not in stored
            or name not in whole
            or tuple(stored[name].shape) != whole[name].shape
        )
        if wrong:
            raise ModelFilesError(
                f"{folder} does not fit config.json, or another version stores it otherwise (run "
                f"`jaxpaged convert` again): {', '.join(wrong[:4])}"
            )
    tree = unflatten_dict(leaves, sep="/")
    with ocp.PyTreeCheckpointer() as reader:
        asked = ocp.args.PyTreeRestore(
            tree,
            restore_args=ocp.checkpoint_utils.construct_restore_args(tree),
            partial_restore=True,  # of a stage's leaves
        )
        restored = reader.restore(folder, asked)
    flat = flatten_dict(restored, sep="/")
    for name, leaf in wanted.items():
        if leaf.shape != leaves[name].shape:
            spread = functools.partial(spread_leaf, model.spec, name)
            flat[name] = jax.jit(spread, out_shardings=leaf.sharding)(flat[name])
    return unflatten_dict(flat, sep="/")


def _random_leaves(
    model: Decoder, leaves: Leaves, whole: Leaves, seed: int
) -> Iterator[tuple[str, jax.Array, int]]:
    """Small random matrices, no biases, norms that only normalise: to measure speed with.

    They are the same on any number of devices.
    """
    stored = _stored_leaves(model, leaves)
    index_of = {name: index for index, name in enumerate(whole)}
    for name, leaf in leaves.items():
        product, _, kind = name.rpartition("/")
        quantized = model.spec.quantized(name)
        if quantized is not None and kind != "bias":
            if kind == KERNEL:
                kernel = f"{product}/kernel"
                shape = stored_shape(quantized, kernel_leaves(stored, kernel))
                targets = kernel_leaves(leaves, kernel)
                fill = _random_quantized(
                    model.spec, layerless(kernel), quantized, shape, tuple(targets.items())
                )
                for array, made in fill(np.uint32(seed % 2**32), np.uint32(index_of[name])).items():
                    yield f"{product}/{array}", made, made.nbytes
            continue
        constant = {"bias": 0.0, "scale": 0.0 if model.spec.norm_plus_one else 1.0}.get(kind)
        if constant is None:
            make = _random_leaf(model.spec, layerless(name), stored[name].shape, leaf)
            made = make(np.uint32(seed % 2**32), np.uint32(index_of[name]))
        else:
            made = put(np.full(leaf.shape, constant, leaf.dtype), leaf.sharding)
        yield name, made, leaf.size * leaf.dtype.itemsize


@functools.cache
def _random_leaf(
    spec: ModelSpec, name: str, shape: tuple[int, ...], leaf: jax.ShapeDtypeStruct
) -> Any:
    """Compiled once for all layers."""

    def make(seed: jax.Array, index: jax.Array) -> jax.Array:
        return spread_leaf(spec, name, _random(shape, seed, index).astype(leaf.dtype))

    return jax.jit(make, out_shardings=leaf.sharding)


@functools.cache
def _random_quantized(
    spec: ModelSpec,
    name: str,
    quantized: Quantized,
    shape: tuple[int, ...],
    targets: tuple[tuple[str, jax.ShapeDtypeStruct], ...],
) -> Any:
    """Compiled once for all layers: there is a kernel in float32 for a moment, at most."""

    def make(seed: jax.Array, index: jax.Array) -> Arrays:
        return quantize_rows(quantized, spec, name, _random(shape, seed, index), dict(targets))

    return jax.jit(make, out_shardings={array: leaf.sharding for array, leaf in targets})


def _random(shape: tuple[int, ...], seed: jax.Array, index: jax.Array) -> jax.Array:
    """Float32 numbers, evenly distributed. An element is a hash of its index: each device makes its
    own part, where a generator would make the whole on all of them.
    """
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    hashed = sum(
        jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride % 2**32)
        for axis, stride in enumerate(strides)
    )
    for word in (seed, index):
        hashed = _mix(hashed ^ _mix(word + jnp.uint32(0x9E3779B9)))
    return ((hashed >> 8).astype(jnp.float32) * (2.0**-23) - 1) * LARGEST_RANDOM


def _mix(x: jax.Array) -> jax.Array:
    """MurmurHash3's last step: every bit of a word depends on all of them."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
