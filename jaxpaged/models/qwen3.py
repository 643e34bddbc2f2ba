"""Qwen 3 (dense): queries and keys are normalised per head."""

from __future__ import annotations

from jaxpaged.models.checkpoint_rules import PRE_NORMS, STANDARD
from jaxpaged.models.hf_config import Config, common_fields
from jaxpaged.models.qwen2 import qwen_layers
from jaxpaged.models.spec import ModelSpec

CHECKPOINT_RULES = (*STANDARD, *PRE_NORMS)


def spec(config: Config) -> ModelSpec:
    """Read config.json."""
    fields = common_fields(config, head_dim=128)
    bias = config.get("attention_bias", False)
    return ModelSpec(
        **fields,
        layers=qwen_layers(config, fields["head_dim"]),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
    )
