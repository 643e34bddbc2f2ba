"""Llama 2, 3, 3.1 and 3.2 (text)."""

from __future__ import annotations

from jaxpaged.models.checkpoint_rules import PRE_NORMS, STANDARD
from jaxpaged.models.hf_config import FULL, Config, common_fields, layer_specs, required, rope_spec
from jaxpaged.models.spec import ModelSpec

CHECKPOINT_RULES = (*STANDARD, *PRE_NORMS)


def spec(config: Config) -> ModelSpec:
    """Read config.json."""
    fields = common_fields(config)
    kinds = [FULL] * required(config, "num_hidden_layers")
    bias = config.get("attention_bias", False)
    return ModelSpec(
        **fields,
        layers=layer_specs(config, kinds, None, {FULL: rope_spec(config, fields["head_dim"])}),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=config.get("mlp_bias", False),
    )
