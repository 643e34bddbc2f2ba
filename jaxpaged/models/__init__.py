"""Model families. A new one: its file here and one line in `FAMILIES`."""

from __future__ import annotations

from types import ModuleType

from jaxpaged.models import gemma3, llama, mistral, qwen2, qwen3
from jaxpaged.models.checkpoint_rules import Rule
from jaxpaged.models.hf_config import Config
from jaxpaged.models.spec import ModelSpec, UnsupportedModelError
from jaxpaged.quantization import ON_THE_FLY

__all__ = ["FAMILIES", "ModelSpec", "UnsupportedModelError", "checkpoint_rules", "load_spec"]

FAMILIES: dict[str, ModuleType] = {
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
    "Gemma3ForCausalLM": gemma3,
}


def load_spec(config: Config, quantization: str | None = None) -> ModelSpec:
    """What config.json describes.

    Args:
        quantization: of the layers' products, a name from `quantization.ON_THE_FLY`.

    Raises:
        UnsupportedModelError: no family runs this architecture, or not with these settings; the
            message names what was found and what is supported.
    """
    found = config.get("architectures") or [f"none (model type {config.get('model_type')!r})"]
    if found[0] not in FAMILIES:
        raise UnsupportedModelError(
            f"architecture {', '.join(found)} is not supported; supported: {', '.join(FAMILIES)}"
        )
    stored = config.get("quantization_config")
    if stored:
        method = stored.get("quant_method", "unnamed")
        raise UnsupportedModelError(
            f"quantization {method!r} is not supported; supported: weights in float32, bfloat16 "
            f"or float16"
        )
    spec = FAMILIES[found[0]].spec(config)
    return spec if quantization is None else spec.quantized_like(ON_THE_FLY[quantization])


def checkpoint_rules(spec: ModelSpec) -> tuple[Rule, ...]:
    """How the checkpoint's tensors become parameters, for each leaf that the family may have."""
    return FAMILIES[spec.architecture].CHECKPOINT_RULES
