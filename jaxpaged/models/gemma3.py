"""Gemma 3 (text): windows in five layers of six, two RoPE bases, four norms a layer."""

from __future__ import annotations

from jaxpaged.models.checkpoint_rules import PRE_AND_POST_NORMS, STANDARD
from jaxpaged.models.hf_config import (
    FULL,
    SLIDING,
    Config,
    common_fields,
    layer_specs,
    positive,
    required,
    rope_spec,
)
from jaxpaged.models.spec import LayerSpec, ModelSpec, UnsupportedModelError

CHECKPOINT_RULES = (*STANDARD, *PRE_AND_POST_NORMS)

# What config.json may leave out.
DEFAULTS = {
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}


def spec(config: Config) -> ModelSpec:
    """Read config.json."""
    if config.get("use_bidirectional_attention"):
        raise UnsupportedModelError("config.json: bidirectional attention is not supported")
    config = {**DEFAULTS, **config}
    fields = common_fields(config, head_dim=256, activation_key="hidden_activation")
    fields["attention_scale"] = positive(config, "query_pre_attn_scalar") ** -0.5
    capped = config.get("final_logit_softcapping") is not None
    bias = config.get("attention_bias", False)
    return ModelSpec(
        **fields,
        layers=_layers(config, fields["head_dim"]),
        qkv_bias=bias,
        o_bias=bias,
        norm_plus_one=True,
        qk_norm=True,
        post_norms=True,
        embed_scale=fields["width"] ** 0.5,
        final_softcap=positive(config, "final_logit_softcapping") if capped else None,
    )


def _layers(config: Config, head_dim: int) -> tuple[LayerSpec, ...]:
    count = required(config, "num_hidden_layers")
    period = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6
    kinds = config.get("layer_types") or [
        FULL if (layer + 1) % period == 0 else SLIDING for layer in range(count)
    ]
    # Only full layers are stretched; windowed ones have a base of their own.
    local = {
        "max_position_embeddings": required(config, "max_position_embeddings"),
        "rope_theta": config.get("rope_local_base_freq") or 10_000.0,
    }
    nested = config.get("rope_parameters") or {}
    if SLIDING in nested:
        local["rope_parameters"] = nested
    ropes = {
        FULL: rope_spec(config, head_dim, theta=1_000_000.0),
        SLIDING: rope_spec(local, head_dim, SLIDING),
    }
    return layer_specs(config, kinds, config["sliding_window"], ropes)
