"""Reads Hugging Face checkpoints: tensors by name, leaves by rule."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import jax
import ml_dtypes  # noqa: F401  teaches NumPy, and so safetensors, the name bfloat16
import numpy as np
from jax.sharding import NamedSharding
from safetensors import SafetensorError, safe_open

from jaxpaged.model_files import ModelFilesError, read_json
from jaxpaged.models import checkpoint_rules
from jaxpaged.models.checkpoint_rules import Pack
from jaxpaged.models.spec import ModelSpec
from jaxpaged.models.spread import spread_leaf
from jaxpaged.parallel.sharding import put, tensor_sharding
from jaxpaged.runtime.kv_scales import is_kv_scale

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
FLOAT_TYPES = ("F32", "BF16", "F16")  # as the files spell them
DERIVED = ".rotary_emb.inv_freq"  # follows from config.json; old checkpoints hold it all the same
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

Leaves = dict[str, jax.ShapeDtypeStruct]  # by path in the parameter tree, each with its sharding


class SafetensorFiles:
    """The tensors of a model folder: one file, or several with an index.

    Raises:
        ModelFilesError: a file is missing or is no safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        names = [SINGLE_FILE]
        if not (path / SINGLE_FILE).exists() and (path / INDEX_FILE).exists():
            weight_map = read_json(path / INDEX_FILE).get("weight_map", {})
            names = sorted(set(weight_map.values()))
        self.num_bytes = 0
        self._file_of: dict[str, Any] = {}
        for name in names:
            try:
                file = safe_open(path / name, framework="numpy")
            except FileNotFoundError:
                raise ModelFilesError(f"{path / name} is missing") from None
            except (SafetensorError, OSError) as error:
                raise ModelFilesError(f"{path / name} is unreadable: {error}") from error
            self.num_bytes += (path / name).stat().st_size
            self._file_of.update(dict.fromkeys(file.keys(), file))

    @property
    def names(self) -> set[str]:
        return set(self._file_of)

    def read(self, name: str) -> np.ndarray:
        """A tensor as it is stored: float32, bfloat16 or float16."""
        dtype = self._file_of[name].get_slice(name).get_dtype()
        if dtype not in FLOAT_TYPES:
            raise ModelFilesError(
                f"{self.path}: {name} is {dtype}; supported: {', '.join(FLOAT_TYPES)}"
            )
        return self._file_of[name].get_tensor(name)


def load_leaves(
    files: SafetensorFiles, leaves: Leaves, whole: Collection[str], spec: ModelSpec
) -> Iterator[tuple[str, jax.Array, int]]:
    """Every leaf with its name and the bytes read for it, packed on the device in its dtype.

    No device of a mesh is given more of a tensor than its part.

    Args:
        whole: names of the leaves of the whole model, where `leaves` are those of a stage.

    Raises:
        ModelFilesError: tensors are missing, unexpected or of another shape than config.json says.
    """
    rules = [
        rule.at(layer) if "{layer}" in rule.leaf else rule
        for rule in checkpoint_rules(spec)
        for layer in range(len(spec.layers) if "{layer}" in rule.leaf else 1)
    ]
    rules = [rule for rule in rules if rule.leaf in whole]
    _check_names(files, {name for rule in rules for name in rule.tensors}, spec)
    for rule in rules:
        if rule.leaf not in leaves:
            continue
        tensors = [files.read(name) for name in rule.tensors]
        target = leaves[rule.leaf]
        pack = _packing(rule.pack, spec, layerless(rule.leaf), target)
        try:
            leaf = pack(*(_put(tensor, rule.split_axis, target) for tensor in tensors))
        except TypeError:  # a reshape or concatenation that does not come out even
            leaf = None
        if leaf is None or leaf.shape != target.shape:
            shapes = ", ".join(
                f"{name} {list(tensor.shape)}"
                for name, tensor in zip(rule.tensors, tensors, strict=True)
            )
            raise ModelFilesError(f"{files.path}: shapes do not fit config.json: {shapes}")
        yield rule.leaf, leaf, sum(tensor.nbytes for tensor in tensors)
        if spec.tie_embeddings and rule.tensors == (EMBEDDING,) and HEAD in files.names:
            _check_tied(files, tensors[0])


def _put(tensor: np.ndarray, split_axis: int, target: jax.ShapeDtypeStruct) -> jax.Array:
    sharding = target.sharding
    if isinstance(sharding, NamedSharding):
        sharding = tensor_sharding(tensor.shape, split_axis, sharding)
    return put(tensor, sharding)


def layerless(leaf: str) -> str:
    """What a leaf is called in every layer."""
    return "/" + leaf.partition("/")[2] if leaf.startswith("layers_") else leaf


@functools.cache
def _packing(pack: Pack, spec: ModelSpec, name: str, target: jax.ShapeDtypeStruct) -> Any:
    """Compiled once for all layers."""

    def make(*tensors: jax.Array) -> jax.Array:
        return spread_leaf(spec, name, pack(spec.stored, *tensors).astype(target.dtype))

    return jax.jit(make, out_shardings=target.sharding)


def _check_names(files: SafetensorFiles, wanted: set[str], spec: ModelSpec) -> None:
    optional = {HEAD} if spec.tie_embeddings else set()
    found = {name for name in files.names if not name.endswith(DERIVED) and not is_kv_scale(name)}
    problems = [
        f"{what} {', '.join(sorted(names)[:4])}"
        + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        for what, names in (
            ("lacks", wanted - found),
            ("has unexpected", found - wanted - optional),
        )
        if names
    ]
    if problems:
        raise ModelFilesError(f"{files.path}: the checkpoint {'; it '.join(problems)}")


def _check_tied(files: SafetensorFiles, embedding: np.ndarray) -> None:
    if not np.array_equal(files.read(HEAD), embedding):
        raise ModelFilesError(
            f"{files.path}: {HEAD} differs from {EMBEDDING}, but config.json ties them "
            f"(tie_word_embeddings)"
        )
