"""Reads what Hugging Face's config.json files have in common, in their old and new spellings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxpaged.layers.rope import RopeSpec
from jaxpaged.models.spec import ACTIVATIONS, LayerSpec, UnsupportedModelError

Config = Mapping[str, Any]

DTYPES = ("float32", "bfloat16", "float16")
FULL, SLIDING = "full_attention", "sliding_attention"

# A default stands for those that are missing or null.
SWITCHES = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window")


def common_fields(
    config: Config, *, head_dim: int | None = None, activation_key: str = "hidden_act"
) -> dict[str, Any]:
    """Fields of `ModelSpec` that every family spells alike.

    Args:
        head_dim: the family's default; without one it is width / heads.
        activation_key: where the family names its activation.

    Raises:
        UnsupportedModelError: a size is missing or contradicts another, or a value is of the wrong
            kind.
    """
    for key in SWITCHES:
        if not isinstance(config.get(key), bool | None):
            raise _unfit(config, key, "true or false")
    width, num_heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    num_kv_heads = _size(config, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise UnsupportedModelError(
            f"config.json: num_attention_heads {num_heads} is not a multiple of "
            f"num_key_value_heads {num_kv_heads}"
        )
    head_dim = _size(config, "head_dim", head_dim or width // num_heads)
    _size(config, "num_hidden_layers")  # every family reads it for itself
    if head_dim % 2:
        raise UnsupportedModelError(f"config.json: head_dim {head_dim} is odd: RoPE turns pairs")
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    dtype = dtype.removeprefix("torch.")
    activation = config.get(activation_key) or "silu"
    for name, value, known in (("dtype", dtype, DTYPES), ("activation", activation, ACTIVATIONS)):
        if value not in known:
            raise UnsupportedModelError(
                f"config.json: {name} {value!r} is not supported; supported: {', '.join(known)}"
            )
    return {
        "architecture": config["architectures"][0],
        "dtype": dtype,
        "vocab": _size(config, "vocab_size"),
        "width": width,
        "ffn": _size(config, "intermediate_size"),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position": _size(config, "max_position_embeddings"),
        "eos_token_ids": _token_ids(config, "eos_token_id"),
        "attention_scale": head_dim**-0.5,
        "norm_eps": positive({"rms_norm_eps": 1e-6, **config}, "rms_norm_eps"),
        "activation": activation,
        "tie_embeddings": bool(config.get("tie_word_embeddings")),
    }


def required(config: Config, key: str) -> Any:
    """A value that no family has a default for."""
    if config.get(key) is None:
        raise UnsupportedModelError(f"config.json lacks {key!r}")
    return config[key]


def _size(config: Config, key: str, default: int | None = None) -> int:
    """A positive integer; `default` where it is missing or null."""
    if default is not None and config.get(key) is None:
        return default
    value = required(config, key)
    if type(value) is not int or value < 1:  # true is an int, too
        raise _unfit(config, key, "a positive integer")
    return value


def positive(config: Config, key: str) -> float:
    """A number that is there."""
    value = config[key]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        raise _unfit(config, key, "a number above 0")
    return value


def _unfit(config: Config, key: str, wanted: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"config.json: {key} must be {wanted}, got {config[key]!r:.40}")


def _token_ids(config: Config, key: str) -> tuple[int, ...]:
    """One id, several or none."""
    found = config.get(key)
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if any(type(token_id) is not int for token_id in ids):
        raise _unfit(config, key, "the id of a token, or a list of such")
    return tuple(ids)


def rope_spec(
    config: Config, head_dim: int, layer_type: str = FULL, *, theta: float = 10_000.0
) -> RopeSpec:
    """RoPE of one layer type, from `rope_parameters` (flat or per layer type) or the older
    `rope_theta` and `rope_scaling`.

    Args:
        theta: base where the file names none.

    Raises:
        UnsupportedModelError: a kind of RoPE that is not supported, or one lacking a number.
    """
    parameters = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if FULL in parameters or SLIDING in parameters:
        parameters = parameters.get(layer_type) or {}
    parameters = {"rope_theta": config.get("rope_theta") or theta, **parameters}
    try:
        return RopeSpec.from_parameters(
            parameters, head_dim, required(config, "max_position_embeddings")
        )
    except ValueError as error:
        raise UnsupportedModelError(f"config.json: {error}") from error


def layer_specs(
    config: Config, layer_types: Sequence[str], window: int | None, ropes: Mapping[str, RopeSpec]
) -> tuple[LayerSpec, ...]:
    """One `LayerSpec` for each of the model's layers.

    Args:
        layer_types: full_attention or sliding_attention, one a layer.
        window: of the sliding layers.
        ropes: RoPE by layer type.

    Raises:
        UnsupportedModelError: a layer type that is not supported, too many or few of them, or a
            window that is no size.
    """
    if SLIDING in layer_types and config.get("sliding_window") is not None:
        _size(config, "sliding_window")
    unknown = sorted(set(layer_types) - {FULL, SLIDING})
    if unknown:
        raise UnsupportedModelError(
            f"config.json: layer type {unknown[0]!r} is not supported; supported: {FULL}, {SLIDING}"
        )
    if len(layer_types) != required(config, "num_hidden_layers"):
        raise UnsupportedModelError(
            f"config.json: layer_types has {len(layer_types)} entries for "
            f"{config['num_hidden_layers']} layers"
        )
    return tuple(
        LayerSpec(window if kind == SLIDING else None, ropes[kind]) for kind in layer_types
    )
