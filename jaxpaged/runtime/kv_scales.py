"""Static scales of keys and values, one of each a layer and KV head, for pages of eight-bit floats.

What a page holds is the key or value divided by its scale. Checkpoints and files name them alike:
`model.layers.0.self_attn.k_scale`, a number or one for each KV head.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path

import jax
import ml_dtypes  # noqa: F401  teaches NumPy, and so safetensors, the name bfloat16
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from jaxpaged.model_files import ModelFilesError, read_json
from jaxpaged.models.spec import ModelSpec
from jaxpaged.parallel.sharding import put

log = logging.getLogger(__name__)

LEAF = "attention/kv_scale"  # of a layer's parameters
NONE = -1.0  # as vLLM's tools say that there is no scale
NAMES = re.compile(
    r"\blayers\.(?P<layer>\d+)\.self_attn\."
    r"(?:(?:attn\.|[kv]_proj\.)?(?P<kind>k|v|kv)_scale|(?P<product>[kv])_proj\.output_scale)$"
)


def is_kv_scale(name: str) -> bool:
    """Whether a checkpoint's tensor is such a scale."""
    return NAMES.search(name) is not None


def read_scales(path: Path) -> dict[str, np.ndarray]:
    """The scales in a .safetensors or .json file, by name.

    Raises:
        ModelFilesError: it is missing or unreadable; one line.
    """
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
    except FileNotFoundError:
        raise ModelFilesError(f"{path} is missing") from None
    except (SafetensorError, OSError) as error:
        raise ModelFilesError(f"{path} is unreadable: {error}") from error
    except (AttributeError, TypeError) as error:  # a type that NumPy does not know by its name
        raise ModelFilesError(
            f"{path} holds a tensor of a type that scales cannot have ({error}): store them as "
            f"float32, as calibrate-kv does"
        ) from error
    stored = read_json(path)
    try:
        return {name: np.asarray(value, np.float32) for name, value in stored.items()}
    except (TypeError, ValueError, OverflowError):
        raise ModelFilesError(
            f"{path} must hold a number, or one for each KV head, by names such as "
            f"model.layers.0.self_attn.k_scale: calibrate-kv writes such files"
        ) from None


def write_scales(path: Path, scales: Mapping[str, np.ndarray]) -> None:
    """Write such a file."""
    if path.suffix == ".safetensors":
        save_file(dict(scales), path)
    else:
        text = json.dumps({name: value.tolist() for name, value in scales.items()}, indent=1)
        path.write_text(text + "\n")


def layer_scales(
    scales: Mapping[str, np.ndarray], spec: ModelSpec, origin: str
) -> dict[int, np.ndarray]:
    """[2, K] of each layer that has any, 1 where one is not told or is `NONE`.

    Args:
        origin: what to name in an error.

    Raises:
        ModelFilesError: a name, a shape or a value that cannot be; one line.
    """
    K, found = spec.stored.num_kv_heads, dict[int, np.ndarray]()
    for name, value in scales.items():
        match = NAMES.search(name)
        if match is None or int(match["layer"]) >= len(spec.layers):
            raise ModelFilesError(f"{origin}: {name} is no scale of this model's keys or values")
        value = np.asarray(value, np.float32).reshape(-1)
        if value.size and (value == NONE).all():
            continue
        if value.size not in (1, K) or not (np.isfinite(value) & (value > 0)).all():
            raise ModelFilesError(
                f"{origin}: {name} must be a positive number or {K}, one for each KV head"
            )
        sides = ["kv".index(letter) for letter in match["kind"] or match["product"]]
        found.setdefault(int(match["layer"]), np.ones((2, K), np.float32))[sides] = value
    return found


def load_kv_scales(
    leaves: Mapping[str, jax.ShapeDtypeStruct],
    spec: ModelSpec,
    scales: Mapping[str, np.ndarray],
    origin: str,
) -> dict[str, jax.Array]:
    """The scale of each of `leaves`, on its devices; 1 where there is none. Pages that want none
    have no leaves, and `scales` may be anything.

    Raises:
        ModelFilesError: see `layer_scales`.
    """
    if not leaves:
        return {}
    found = layer_scales(scales, spec, origin)
    if len(found) < len(spec.layers):
        log.warning(
            "%s tells the KV scales of %d layers out of %d: the others' are 1",
            origin,
            len(found),
            len(spec.layers),
        )
    one = np.ones((2, spec.stored.num_kv_heads), np.float32)
    return {
        leaf: put(
            np.repeat(found.get(_layer_of(leaf), one), spec.kv_copies, axis=1), target.sharding
        )
        for leaf, target in leaves.items()
    }


def _layer_of(leaf: str) -> int:
    return int(leaf.partition("/")[0].removeprefix("layers_"))
