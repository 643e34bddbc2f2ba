"""Qwen 2 and 2.5: Llama with biases on queries, keys and values."""

from __future__ import annotations

from jaxpaged.models.checkpoint_rules import PRE_NORMS, STANDARD
from jaxpaged.models.hf_config import (
    FULL,
    SLIDING,
    Config,
    common_fields,
    layer_specs,
    required,
    rope_spec,
)
from jaxpaged.models.spec import LayerSpec, ModelSpec

CHECKPOINT_RULES = (*STANDARD, *PRE_NORMS)


def spec(config: Config) -> ModelSpec:
    """Read config.json."""
    fields = common_fields(config)
    return ModelSpec(**fields, layers=qwen_layers(config, fields["head_dim"]), qkv_bias=True)


def qwen_layers(config: Config, head_dim: int) -> tuple[LayerSpec, ...]:
    """A window, where one is used, holds from layer `max_window_layers` on."""
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    first = config.get("max_window_layers", 28)
    kinds = config.get("layer_types") or [
        SLIDING if window and layer >= first else FULL
        for layer in range(required(config, "num_hidden_layers"))
    ]
    ropes = {kind: rope_spec(config, head_dim, kind) for kind in (FULL, SLIDING)}
    return layer_specs(config, kinds, window, ropes)
