"""Mistral: Llama with a sliding window in every layer (or none, where config.json says null)."""

from __future__ import annotations

from jaxpaged.models.checkpoint_rules import PRE_NORMS, STANDARD
from jaxpaged.models.hf_config import (
    SLIDING,
    Config,
    common_fields,
    layer_specs,
    required,
    rope_spec,
)
from jaxpaged.models.spec import ModelSpec

CHECKPOINT_RULES = (*STANDARD, *PRE_NORMS)


def spec(config: Config) -> ModelSpec:
    """Read config.json."""
    fields = common_fields(config)
    kinds = [SLIDING] * required(config, "num_hidden_layers")
    rope = rope_spec(config, fields["head_dim"], SLIDING)
    window = config.get("sliding_window", 4096)
    return ModelSpec(**fields, layers=layer_specs(config, kinds, window, {SLIDING: rope}))
