"""Reads Hugging Face checkpoints: tensors by name, leaves by rule."""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any

import jax
import ml_dtypes  # teaches NumPy, and so safetensors, the name bfloat16
import numpy as np
from jax.sharding import NamedSharding
from safetensors import SafetensorError, safe_open

from jaxpaged.model_files import ModelFilesError, read_json
from jaxpaged.models import checkpoint_rules
from jaxpaged.models.checkpoint_rules import Pack, Rule
from jaxpaged.models.spec import ModelSpec
from jaxpaged.models.spread import spread_leaf
from jaxpaged.parallel.sharding import put, tensor_sharding
from jaxpaged.quantization import (
    FLOATS,
    KERNEL,
    Quantized,
    Source,
    Types,
    UnsupportedQuantizationError,
)
from jaxpaged.runtime.gguf_files import GgufFiles
from jaxpaged.runtime.kv_scales import is_kv_scale
from jaxpaged.runtime.quantized_leaves import (
    Leaves,
    kernel_leaves,
    pack_parts,
    part_names,
    quantized_kernel,
)

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
UNUSED = (
    ".rotary_emb.inv_freq",  # follows from config.json; old checkpoints hold it all the same
    ".self_attn.q_scale",  # of queries, which stay as they are
)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class SafetensorFiles:
    """The tensors of a model folder: one file, or several with an index.

    Raises:
        ModelFilesError: a file is missing or is no safetensors file, or an index names none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        names = [SINGLE_FILE]
        if not (path / SINGLE_FILE).exists() and (path / INDEX_FILE).exists():
            names = _indexed_files(path / INDEX_FILE)
        self.num_bytes = 0
        self._file_of: dict[str, Any] = {}
        self._path_of: dict[str, Path] = {}
        for name in names:
            try:
                file = safe_open(path / name, framework="numpy")
            except FileNotFoundError:
                raise ModelFilesError(f"{path / name} is missing") from None
            except (SafetensorError, OSError) as error:
                raise ModelFilesError(f"{path / name} is unreadable: {error}") from error
            self.num_bytes += (path / name).stat().st_size
            self._file_of.update(dict.fromkeys(file.keys(), file))
            self._path_of.update(dict.fromkeys(file.keys(), path / name))

    @property
    def names(self) -> set[str]:
        return set(self._file_of)

    def read(self, name: str, types: Types = FLOATS) -> np.ndarray:
        """A tensor as it is stored.

        Raises:
            ModelFilesError: it is of none of these types.
        """
        dtype = self._file_of[name].get_slice(name).get_dtype()
        if dtype not in types:
            raise ModelFilesError(
                f"{self.path}: {name} is {dtype}, but by config.json it has to be "
                f"{' or '.join(types)}: correct quantization_config there, or save the checkpoint "
                f"anew in the format that it names"
            )
        if dtype == "F8_E4M3":
            return self._read_e4m3(name)
        return self._file_of[name].get_tensor(name)

    def _read_e4m3(self, name: str) -> np.ndarray:
        """NumPy has no such type, so safetensors reads it for every framework but NumPy."""
        with self._path_of[name].open("rb") as file:
            header_size = int.from_bytes(file.read(8), "little")
            begin, end = json.loads(file.read(header_size))[name]["data_offsets"]
            file.seek(8 + header_size + begin)
            data = file.read(end - begin)
        shape = self._file_of[name].get_slice(name).get_shape()
        return np.frombuffer(data, ml_dtypes.float8_e4m3fn).reshape(shape)


def _indexed_files(index: Path) -> list[str]:
    """The files beside an index that it spreads the tensors over."""
    weight_map = read_json(index).get("weight_map", {})
    if not isinstance(weight_map, dict) or not all(isinstance(x, str) for x in weight_map.values()):
        raise ModelFilesError(
            f"{index}: weight_map must be an object of names of tensors to names of files: fetch "
            f"the file again"
        )
    if not weight_map:
        raise ModelFilesError(f"{index} names no file in its weight_map: fetch it again")
    names = sorted(set(weight_map.values()))
    for name in map(PurePath, names):  # not resolved: a hub's copy is made of links out of it
        if name.is_absolute() or ".." in name.parts:
            raise ModelFilesError(
                f"{index}: weight_map names {str(name)!r}, which is outside of the model's folder"
            )
    return names


Files = SafetensorFiles | GgufFiles  # the same names and values


def load_leaves(
    files: Files, leaves: Leaves, whole: Collection[str], spec: ModelSpec
) -> Iterator[tuple[str, jax.Array, int]]:
    """Every leaf with its name and the bytes read for it, packed on the device in its dtype.

    No device of a mesh is given more of a tensor than its part.

    Args:
        whole: names of the leaves of the whole model, where `leaves` are those of a stage.

    Raises:
        ModelFilesError: tensors are missing, unexpected or of another shape than config.json says,
            or scales of quantized ones are no numbers.
    """
    rules = [
        rule.at(layer) if "{layer}" in rule.leaf else rule
        for rule in checkpoint_rules(spec)
        for layer in range(len(spec.layers) if "{layer}" in rule.leaf else 1)
    ]
    rules = [rule for rule in rules if rule.leaf in whole or quantized_kernel(spec, rule)]
    _check_names(files, rules, spec)
    for rule in rules:
        quantized = quantized_kernel(spec, rule)
        if quantized is not None:
            if kernel_leaves(leaves, rule.leaf):
                yield from _load_quantized(files, rule, quantized, leaves, spec)
            continue
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
            raise _misfit(files, dict(zip(rule.tensors, tensors, strict=True)))
        yield rule.leaf, leaf, sum(tensor.nbytes for tensor in tensors)
        if spec.tie_embeddings and rule.tensors == (EMBEDDING,) and HEAD in files.names:
            _check_tied(files, tensors[0])


def _load_quantized(
    files: Files, rule: Rule, quantized: Quantized, leaves: Leaves, spec: ModelSpec
) -> Iterator[tuple[str, jax.Array, int]]:
    """The leaves that stand in a kernel's place."""
    targets, wanted = kernel_leaves(leaves, rule.leaf), quantized.source.tensors
    tensors = [
        {kind: files.read(f"{part}.{kind}", types) for kind, types in wanted.items()}
        for part in part_names(rule)
    ]
    for part, stored in zip(part_names(rule), tensors, strict=True):
        for kind, tensor in stored.items():
            if "scale" in kind and not np.isfinite(tensor).all():
                raise ModelFilesError(
                    f"{files.path}: {part}.{kind} holds NaN or infinite scales: fetch the "
                    f"checkpoint again, or quantize the model anew"
                )
    pack = pack_parts(rule, quantized, spec, layerless(rule.leaf), targets)
    target = targets[KERNEL]
    try:
        quantized.source.check(tensors)
        made = pack(
            [
                {kind: _put(tensor, rule.split_axis, target) for kind, tensor in part.items()}
                for part in tensors
            ]
        )
    except UnsupportedQuantizationError as error:
        raise ModelFilesError(f"{files.path}: {part_names(rule)[0]}: {error}") from error
    except (TypeError, ValueError, IndexError, ZeroDivisionError):  # shapes do not go together
        made = {}
    if {name: x.shape for name, x in made.items()} != {n: t.shape for n, t in targets.items()}:
        named = zip(part_names(rule), tensors, strict=True)
        raise _misfit(files, {f"{n}.{kind}": x for n, part in named for kind, x in part.items()})
    num_bytes = sum(tensor.nbytes for part in tensors for tensor in part.values())
    for name, leaf in made.items():
        yield rule.leaf.removesuffix("kernel") + name, leaf, num_bytes if name == KERNEL else 0


def _misfit(files: Files, tensors: dict[str, np.ndarray]) -> ModelFilesError:
    shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
    return ModelFilesError(f"{files.path}: shapes do not fit config.json: {shapes}")


def _put(tensor: np.ndarray, split_axis: int, target: jax.ShapeDtypeStruct) -> jax.Array:
    # Packed on the device, wherever the leaf goes.
    sharding = target.sharding.with_memory_kind("device")
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


def _check_names(files: Files, rules: Sequence[Rule], spec: ModelSpec) -> None:
    wanted: set[str] = set()
    optional = {HEAD} if spec.tie_embeddings else set()
    implied: dict[str, Source] = {}
    for rule in rules:
        quantized = quantized_kernel(spec, rule)
        if quantized is None:
            wanted.update(rule.tensors)
            continue
        for part in part_names(rule):
            wanted.update(f"{part}.{kind}" for kind in quantized.source.tensors)
            optional.update(f"{part}.{kind}" for kind in quantized.source.ignored)
            implied |= {f"{part}.{kind}": quantized.source for kind in quantized.source.implied}
    optional |= implied.keys()
    found = {name for name in files.names if not name.endswith(UNUSED) and not is_kv_scale(name)}
    head = sorted(name for name in found - wanted - optional if name.startswith("lm_head."))
    if spec.tie_embeddings and head:
        raise ModelFilesError(
            f"{files.path}: {head[0]} is of a head of the model's own, but config.json ties it to "
            f"the embedding: set tie_word_embeddings to false there"
        )
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
    for name in sorted(found & optional - wanted):
        if name.endswith(".bias") and files.read(name).any():
            raise ModelFilesError(
                f"{files.path}: {name} is not zero, but by config.json the model has no such bias: "
                f"set attention_bias or mlp_bias there if the family has them"
            )
        if name in implied:
            source, kind = implied[name], name.rpartition(".")[2]
            wrong = source.contradiction(kind, files.read(name, source.implied[kind]))
            if wrong is not None:
                raise ModelFilesError(
                    f"{files.path}: {name} contradicts {wrong} in config.json: correct that"
                )


def _check_tied(files: Files, embedding: np.ndarray) -> None:
    if not np.array_equal(files.read(HEAD), embedding):
        raise ModelFilesError(
            f"{files.path}: {HEAD} differs from {EMBEDDING}, but config.json ties them "
            f"(tie_word_embeddings)"
        )
