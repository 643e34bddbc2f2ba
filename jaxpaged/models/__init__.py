"""Model families. A new one: its file here and one line in `FAMILIES`."""

from __future__ import annotations

import re
from dataclasses import replace
from types import ModuleType

from jaxpaged.models import gemma3, llama, mistral, qwen2, qwen3
from jaxpaged.models.checkpoint_rules import HEAD_KERNEL, Rule
from jaxpaged.models.hf_config import Config
from jaxpaged.models.spec import LayerQuantization, ModelSpec, UnsupportedModelError
from jaxpaged.quantization import (
    METHODS,
    ON_THE_FLY,
    UnsupportedQuantizationError,
    checkpoint_reader,
)

__all__ = ["FAMILIES", "ModelSpec", "UnsupportedModelError", "checkpoint_rules", "load_spec"]

FAMILIES: dict[str, ModuleType] = {
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
    "Gemma3ForCausalLM": gemma3,
}


def load_spec(
    config: Config, quantization: str | None = None, quantize_lm_head: bool = False
) -> ModelSpec:
    """What config.json describes.

    Args:
        quantization: of the layers' products, a name from `quantization.ON_THE_FLY`; or what the
            checkpoint is to be stored in, one from `quantization.METHODS`.
        quantize_lm_head: of the head, too; a table that is both keeps its rows for looking up.

    Raises:
        UnsupportedModelError: no family runs this architecture, or not with these settings; the
            message names what was found and what is supported.
    """
    found = config.get("architectures")
    if found in (None, []):
        found = [f"none (model type {config.get('model_type')!r})"]
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise UnsupportedModelError(
            f"config.json: architectures must be a list of names, got {found!r:.40}"
        )
    if found[0] not in FAMILIES:
        raise UnsupportedModelError(
            f"architecture {', '.join(found)} is not supported; supported: {', '.join(FAMILIES)}"
        )
    try:
        return _read_spec(FAMILIES[found[0]], config, quantization, quantize_lm_head)
    except KeyError as error:
        raise UnsupportedModelError(
            f"config.json lacks {error}: add it, or fetch the file again"
        ) from error
    except (AttributeError, TypeError, ZeroDivisionError, re.error) as error:
        raise UnsupportedModelError(
            f"config.json has a setting of the wrong kind ({type(error).__name__}: {error}): "
            f"correct it, or fetch the file again"
        ) from error


def _read_spec(
    family: ModuleType, config: Config, quantization: str | None, quantize_lm_head: bool
) -> ModelSpec:
    spec: ModelSpec = family.spec(config)
    stored = config.get("quantization_config") or config.get("compression_config")
    method = (stored.get("quant_method") or "unnamed") if stored else None
    if quantization in METHODS and method is None:
        raise UnsupportedModelError(
            f"--quantization {quantization} names what a checkpoint stores, but nothing says that "
            f"these weights are quantized: to quantize them, choose from {', '.join(ON_THE_FLY)}"
        )
    if method in METHODS and quantization not in (None, method):
        wants = "such" if quantization in METHODS else "ordinary"
        raise UnsupportedModelError(
            f"--quantization {quantization} needs {wants} weights, but these are quantized "
            f"otherwise ({method}): leave it out"
        )
    if quantize_lm_head and quantization in METHODS:
        raise UnsupportedModelError("--quantize-lm-head needs ordinary weights: leave it out")
    if stored:
        return _stored_quantization(spec, stored)
    if quantization is None:
        return spec
    how = ON_THE_FLY[quantization]
    return replace(spec.quantized_like(how), head=how if quantize_lm_head else None)


def _stored_quantization(spec: ModelSpec, settings: Config) -> ModelSpec:
    """The model with its products as a checkpoint has them.

    Raises:
        UnsupportedModelError: a format that nothing here reads, or parts of one product that are
            not alike.
    """
    try:
        read = checkpoint_reader(settings)
    except UnsupportedQuantizationError as error:
        raise UnsupportedModelError(str(error)) from error
    kernels = [
        rule
        for rule in checkpoint_rules(spec)
        if rule.merge is not None and rule.leaf != HEAD_KERNEL
    ]
    layers = []
    for index, layer in enumerate(spec.layers):
        products = {}
        for rule in (kernel.at(index) for kernel in kernels):
            names = [name.removesuffix(".weight") for name in rule.tensors]
            found = [read(name) for name in names]
            if found.count(found[0]) < len(found):
                raise UnsupportedModelError(
                    f"config.json quantizes some of {', '.join(names)} and not others, or "
                    f"otherwise: they are one product here"
                )
            products[rule.leaf.split("/")[-2]] = found[0]
        layers.append(replace(layer, quantization=LayerQuantization(**products)))
    head = None if spec.tie_embeddings else read("lm_head")
    return replace(spec, layers=tuple(layers), head=head)


def checkpoint_rules(spec: ModelSpec) -> tuple[Rule, ...]:
    """How the checkpoint's tensors become parameters, for each leaf that the family may have."""
    rules: tuple[Rule, ...] = FAMILIES[spec.architecture].CHECKPOINT_RULES
    if not spec.tie_embeddings:
        return rules
    return tuple(
        replace(rule, tensors=("model.embed_tokens.weight",)) if rule.leaf == HEAD_KERNEL else rule
        for rule in rules
    )
