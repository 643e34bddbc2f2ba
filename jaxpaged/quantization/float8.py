"""8-bit floats as DeepSeek, Qwen and AutoFP8 ("fp8") and NVIDIA's ModelOpt store them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxpaged.quantization.formats import (
    EIGHT_BIT_FLOATS,
    HEAD,
    Settings,
    contains,
    expand_scales,
    matches,
    names,
    require,
)
from jaxpaged.quantization.fp8 import Fp8
from jaxpaged.quantization.scheme import (
    FLOATS,
    KERNEL,
    Arrays,
    Quantized,
    Scheme,
    Source,
    Types,
)
from jaxpaged.quantization.weight_only import E4M3, WeightOnly

PER_OUTPUT = "FP8_PER_CHANNEL_PER_TOKEN"  # in ModelOpt's words
# Activations get a scale a token whatever was calibrated; those of pages are read elsewhere.
IGNORED = ("input_scale", "activation_scale", "k_scale", "v_scale", "output_scale")


class EightBitFloats(Source):
    """e4m3 beside scales, in a tensor that is named `scale`."""

    scale: str

    @property
    def tensors(self) -> Mapping[str, Types]:
        """Weights and scales."""
        return {"weight": EIGHT_BIT_FLOATS, self.scale: FLOATS}


@dataclass(frozen=True)
class Whole(EightBitFloats):
    """e4m3 with one scale a tensor, or an output."""

    scale: str = "weight_scale"
    ignored: tuple[str, ...] = IGNORED

    def unpack(self, scheme: Scheme, tensors: Mapping[str, jax.Array]) -> Arrays:
        """[O, I] and a scale, one or [O] or [O, 1]."""
        weight, scale = tensors["weight"], tensors[self.scale].astype(jnp.float32)
        return {
            KERNEL: weight,
            "kernel_scale": jnp.broadcast_to(scale.reshape(-1), weight.shape[:1]),
        }


@dataclass(frozen=True)
class Blocks(EightBitFloats):
    """e4m3 with a scale for each block of outputs and terms."""

    block: int
    scale: str = "weight_scale_inv"
    ignored: tuple[str, ...] = IGNORED

    def unpack(self, scheme: Scheme, tensors: Mapping[str, jax.Array]) -> Arrays:
        """[O, I] and [O / block, I / block]."""
        rows, terms = tensors["weight"].shape
        scale, group = tensors[self.scale].astype(jnp.float32), math.gcd(self.block, terms)
        return {
            KERNEL: tensors["weight"],
            "kernel_scale": expand_scales(scale, rows, self.block, terms, group),
        }


def blocks(block: int, scale: str = "weight_scale_inv") -> Quantized:
    """Weights in blocks, activations as they are."""
    return Quantized(WeightOnly(E4M3, group=block), Blocks(block, scale))


def reader(settings: Settings) -> Callable[[str], Quantized | None]:
    """quant_method "fp8" and "fbgemm_fp8"."""
    require("fp8", "fmt", settings.get("fmt", "e4m3"), ("e4m3", "float8_e4m3fn"))
    found = Quantized(Fp8(), Whole())
    if settings.get("weight_block_size"):
        block = settings["weight_block_size"]
        require("fp8", "weight_block_size", block, ([128, 128], [64, 64], [32, 32]))
        found = blocks(block[0])
    elif "weight_block_size" in settings:  # null: one block, whose scale has the name of many
        found = Quantized(Fp8(), Whole("weight_scale_inv"))
    keys = ("modules_to_not_convert", "ignored_layers")
    plain = [name for key in keys for name in names("fp8", key, settings.get(key))]
    return lambda name: None if contains(name, [HEAD, *plain]) else found


def modelopt_reader(settings: Settings) -> Callable[[str], Quantized | None]:
    """quant_method "modelopt"; in a file of its own the settings stand one step deeper."""
    settings = {**settings, **(settings.get("quantization") or {})}
    algorithm = settings.get("quant_algo")
    require("modelopt", "quant_algo", algorithm, ("FP8", PER_OUTPUT, None))
    keys = ("ignore", "exclude_modules")
    plain = [HEAD, *(name for key in keys for name in names("modelopt", key, settings.get(key)))]
    found = Quantized(Fp8(), Whole()) if algorithm else None  # null: of pages alone
    return lambda name: None if matches(name, plain) or contains(name, plain) else found
