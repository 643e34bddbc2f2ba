"""compressed-tensors: what llm-compressor writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpaged.quantization.float8 import IGNORED, Whole, blocks
from jaxpaged.quantization.formats import (
    EIGHT_BIT_FLOATS,
    WORDS,
    Settings,
    matches,
    require,
    require_group,
    unpack_words,
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
from jaxpaged.quantization.weight_only import E4M3, WeightOnly, pack_int4

METHOD = "compressed-tensors"
SAVE_COMPRESSED = ": quantize the model so, and save it with save_compressed=True"
BYTES: Types = ("I8",)


@dataclass(frozen=True)
class Integers(Source):
    """Integers [O, I], as such or in words of neighbouring terms.

    Attributes:
        bits: 4 or 8.
        packed: in words, where each number is greater by half its range.
        has_zero: zero points are stored; words of them hold neighbouring outputs.
        grouped: scales are [O, groups], not one an output or one for all.
    """

    bits: int
    packed: bool
    has_zero: bool
    grouped: bool

    @property
    def tensors(self) -> Mapping[str, Types]:
        """Weights, scales, zero points."""
        weight, types = ("weight_packed", WORDS) if self.packed else ("weight", BYTES)
        zeros = {"weight_zero_point": types} if self.has_zero else {}
        return {weight: types, "weight_scale": FLOATS, **zeros}

    @property
    def ignored(self) -> tuple[str, ...]:
        """Of activations, which stay as they are; config.json knows the shape."""
        names = ("weight_shape", "weight_g_idx", "input_zero_point", *IGNORED)
        return names if self.has_zero else ("weight_zero_point", *names)

    def unpack(self, scheme: Scheme, tensors: Mapping[str, jax.Array]) -> Arrays:
        """See `tensors`."""
        middle = 2 ** (self.bits - 1)
        if self.packed:
            kernel = unpack_words(tensors["weight_packed"], self.bits, 1) - middle
        else:
            kernel = tensors["weight"]
        rows = kernel.shape[0]
        arrays = {
            KERNEL: pack_int4(kernel) if self.bits == 4 else kernel.astype(jnp.int8),
            "kernel_scale": self._groups(tensors["weight_scale"].astype(jnp.float32), rows),
        }
        if self.has_zero:
            zero = tensors["weight_zero_point"]
            if self.packed:
                zero = unpack_words(zero, self.bits, 0)[:rows] - middle
            arrays["kernel_zero"] = self._groups(zero.astype(jnp.int8), rows)
        return arrays

    def _groups(self, x: jax.Array, rows: int) -> jax.Array:
        return x if self.grouped else jnp.broadcast_to(x.reshape(-1), (rows,))


@dataclass(frozen=True)
class GroupedFloats(Source):
    """e4m3 [O, I] with scales [O, groups]."""

    ignored: tuple[str, ...] = IGNORED

    @property
    def tensors(self) -> Mapping[str, Types]:
        """Weights and scales."""
        return {"weight": EIGHT_BIT_FLOATS, "weight_scale": FLOATS}

    def unpack(self, scheme: Scheme, tensors: Mapping[str, jax.Array]) -> Arrays:
        """As they are."""
        return {
            KERNEL: tensors["weight"],
            "kernel_scale": tensors["weight_scale"].astype(jnp.float32),
        }


def reader(settings: Settings) -> Callable[[str], Quantized | None]:
    """quant_method "compressed-tensors"."""
    sparsity = (settings.get("sparsity_config") or {}).get("format", "dense")
    require(METHOD, "sparsity", sparsity, ("dense",))
    plain = settings.get("ignore") or []
    groups = [
        (group["targets"], _quantized(group, group.get("format") or settings.get("format")))
        for group in (settings.get("config_groups") or {}).values()
    ]

    def read(name: str) -> Quantized | None:
        if matches(name, plain):
            return None
        for targets, found in groups:
            if "Linear" in targets or matches(name, targets):
                return found
        return None

    return read


def _quantized(group: Mapping[str, Any], layout: str | None) -> Quantized:
    weights, activations = group["weights"], group.get("input_activations")
    bits, strategy = weights["num_bits"], weights.get("strategy")
    grouped = strategy == "group"
    size = weights["group_size"] if grouped else None
    if grouped:
        require_group(METHOD, size)
    if weights["type"] == "float":
        require(METHOD, "num_bits of floats", bits, (8,))
        require(METHOD, "format", layout, ("float-quantized", "naive-quantized"), SAVE_COMPRESSED)
        if strategy == "block":
            block = list(weights["block_structure"])
            require(METHOD, "block_structure", block, ([128, 128], [64, 64], [32, 32]))
            return blocks(block[0], "weight_scale")
        require(METHOD, "strategy", strategy, ("tensor", "channel", "group", "block"))
        if grouped:
            return Quantized(WeightOnly(E4M3, size), GroupedFloats())
        return Quantized(Fp8() if activations else WeightOnly(E4M3), Whole())
    require(METHOD, "num_bits of integers", bits, (4, 8))
    require(METHOD, "strategy", strategy, ("tensor", "channel", "group"))
    require(METHOD, "actorder", weights.get("actorder"), (None, False, "static", "weight"))
    known = (
        ("pack-quantized",) if bits == 4 else ("pack-quantized", "int-quantized", "naive-quantized")
    )
    require(METHOD, "format", layout, known, SAVE_COMPRESSED)
    has_zero = not weights.get("symmetric", True)
    return Quantized(
        WeightOnly(f"int{bits}", size, has_zero),
        Integers(bits, layout == "pack-quantized", has_zero, grouped),
    )
