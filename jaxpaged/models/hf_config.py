"""Reads what Hugging Face's config.json files have in common, in their old and new spellings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxpaged.layers.rope import RopeSpec
from jaxpaged.models.spec import ACTIVATIONS, LayerSpec, UnsupportedModelError

Config = Mapping[str, Any]

DTYPES = ("float32", "bfloat16", "float16")
FULL, SLIDING = "full_attention", "sliding_attention"


def common_fields(
    config: Config, *, head_dim: int | None = None, activation_key: str = "hidden_act"
) -> dict[str, Any]:
    """Fields of `ModelSpec` that every family spells alike.

    Args:
        head_dim: the family's default; without one it is width / heads.
        activation_key: where the family names its activation.

    Raises:
        UnsupportedModelError: a size is missing or contradicts another.
    """
    width, num_heads = required(config, "hidden_size"), required(config, "num_attention_heads")
    num_kv_heads = config.get("num_key_value_heads") or num_heads
    if num_heads % num_kv_heads:
        raise UnsupportedModelError(
            f"config.json: num_attention_heads {num_heads} is not a multiple of "
            f"num_key_value_heads {num_kv_heads}"
        )
    head_dim = config.get("head_dim") or head_dim or width // num_heads
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
        "vocab": required(config, "vocab_size"),
        "width": width,
        "ffn": required(config, "intermediate_size"),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position": required(config, "max_position_embeddings"),
        "eos_token_ids": token_ids(config.get("eos_token_id")),
        "attention_scale": head_dim**-0.5,
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "activation": activation,
        "tie_embeddings": config.get("tie_word_embeddings", False),
    }


def required(config: Config, key: str) -> Any:
    """A value that no family has a default for."""
    if config.get(key) is None:
        raise UnsupportedModelError(f"config.json lacks {key!r}")
    return config[key]


def token_ids(value: int | Sequence[int] | None) -> tuple[int, ...]:
    """One id, several or none."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


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
        UnsupportedModelError: a layer type that is not supported, or too many or few of them.
    """
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
