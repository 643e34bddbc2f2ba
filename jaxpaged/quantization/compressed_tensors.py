"""compressed-tensors: what llm-compressor writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.quantization.float8 import IGNORED, EightBitFloats, Whole, blocks
from jaxpaged.quantization.formats import (
    INDICES,
    WORDS,
    Settings,
    check_order,
    filled,
    in_order,
    matches,
    names,
    require,
    require_group,
    unpack_words,
)
from jaxpaged.quantization.fp8 import Fp8
from jaxpaged.quantization.scheme import (
    FLOATS,
    KERNEL,
    ORDER,
    Arrays,
    Quantized,
    Scheme,
    Source,
    Types,
    UnsupportedQuantizationError,
)
from jaxpaged.quantization.weight_only import E4M3, WeightOnly, pack

METHOD = "compressed-tensors"
SAVE_COMPRESSED = ": quantize the model so, and save it with save_compressed=True"
BYTES: Types = ("I8",)
ANY_ZEROS: Types = (*BYTES, "U8", "I16", *INDICES, *FLOATS)  # older versions write them, too
BY_PLACE = ("static", "weight")  # how GPTQ's order of terms is told, where it leaves none to store
BY_INDEX = ("group", "dynamic", True)  # and where terms are stored with the groups they belong to


@dataclass(frozen=True)
class Integers(Source):
    """Integers [O, I], as such or in words of neighbouring terms.

    Attributes:
        bits: 4 or 8.
        packed: in words, where each number is greater by half its range.
        has_zero: zero points are stored; words of them hold neighbouring outputs.
        grouped: scales are [O, groups], not one an output or one for all.
        ordered: terms are grouped by g_idx, not by where they stand.
    """

    bits: int
    packed: bool
    has_zero: bool
    grouped: bool
    ordered: bool

    @property
    def tensors(self) -> Mapping[str, Types]:
        """Weights, scales, zero points, groups of terms."""
        weight, types = ("weight_packed", WORDS) if self.packed else ("weight", BYTES)
        zeros = {"weight_zero_point": types} if self.has_zero else {}
        order = {"weight_g_idx": INDICES} if self.ordered else {}
        return {weight: types, "weight_scale": FLOATS, **zeros, **order}

    @property
    def ignored(self) -> tuple[str, ...]:
        """Of activations, which stay as they are; config.json knows the shape."""
        return ("weight_shape", "input_zero_point", *IGNORED)

    @property
    def implied(self) -> Mapping[str, Types]:
        """Zero points of symmetric weights."""
        return {} if self.has_zero else {"weight_zero_point": ANY_ZEROS}

    def contradiction(self, kind: str, stored: np.ndarray) -> str | None:
        """Words of zero points are greater by half the range, too."""
        none = 0
        if self.packed and stored.dtype == np.int32:
            stored, none = stored.view(np.uint32), filled(2 ** (self.bits - 1), self.bits)
        return None if (stored == none).all() else "symmetric true"

    def check(self, parts: Sequence[Mapping[str, np.ndarray]]) -> None:
        """Parts of one product share their rows, and so the order of these."""
        if self.ordered:
            orders = [part["weight_g_idx"] for part in parts]
            check_order(orders, parts[0]["weight_scale"].shape[1])

    def unpack(self, scheme: Scheme, tensors: Mapping[str, jax.Array]) -> Arrays:
        """See `tensors`."""
        middle = 2 ** (self.bits - 1)
        if self.packed:
            kernel = unpack_words(tensors["weight_packed"], self.bits, 1) - middle
        else:
            kernel = tensors["weight"]
        rows, arrays = kernel.shape[0], {}
        if self.ordered:
            kernel, arrays[ORDER] = in_order(kernel, tensors["weight_g_idx"])
        arrays[KERNEL] = pack(kernel, self.bits)
        scale = tensors["weight_scale"].astype(jnp.float32)
        arrays["kernel_scale"] = self._groups(scale, rows)
        if self.has_zero:
            zero = tensors["weight_zero_point"]
            if self.packed:
                zero = unpack_words(zero, self.bits, 0)[:rows] - middle
            arrays["kernel_zero"] = self._groups(zero.astype(jnp.int8), rows)
        return arrays

    def _groups(self, x: jax.Array, rows: int) -> jax.Array:
        return x if self.grouped else jnp.broadcast_to(x.reshape(-1), (rows,))


@dataclass(frozen=True)
class GroupedFloats(EightBitFloats):
    """e4m3 [O, I] with scales [O, groups]."""

    scale: str = "weight_scale"
    ignored: tuple[str, ...] = IGNORED

    def unpack(self, scheme: Scheme, tensors: Mapping[str, jax.Array]) -> Arrays:
        """As they are."""
        return {
            KERNEL: tensors["weight"],
            "kernel_scale": tensors[self.scale].astype(jnp.float32),
        }


def reader(settings: Settings) -> Callable[[str], Quantized | None]:
    """quant_method "compressed-tensors"."""
    sparsity = (settings.get("sparsity_config") or {}).get("format", "dense")
    require(METHOD, "sparsity", sparsity, ("dense",))
    if (settings.get("transform_config") or {}).get("config_groups"):
        raise UnsupportedQuantizationError(
            f"config.json: quantization {METHOD!r} with transform_config is not supported: take a "
            f"checkpoint whose activations are not rotated"
        )
    plain = names(METHOD, "ignore", settings.get("ignore"))
    groups = [
        (
            names(METHOD, "targets", group["targets"]),
            _quantized(group, group.get("format") or settings.get("format")),
        )
        for group in (settings.get("config_groups") or {}).values()
    ]

    def read(name: str) -> Quantized | None:
        if matches(name, plain):
            return None
        by_name = [found for targets, found in groups if matches(name, targets)]
        by_class = [found for targets, found in groups if "Linear" in targets]
        return next(iter(by_name + by_class), None)

    return read


def _quantized(group: Mapping[str, Any], layout: str | None) -> Quantized | None:
    weights, activations = group["weights"], group.get("input_activations")
    if weights is None:
        return None
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
    actorder = weights.get("actorder")
    require(METHOD, "actorder", actorder, (None, False, *BY_PLACE, *BY_INDEX))
    known = (
        ("pack-quantized",) if bits == 4 else ("pack-quantized", "int-quantized", "naive-quantized")
    )
    require(METHOD, "format", layout, known, SAVE_COMPRESSED)
    has_zero, ordered = not weights.get("symmetric", True), grouped and actorder in BY_INDEX
    return Quantized(
        WeightOnly(f"int{bits}", size, has_zero, ordered),
        Integers(bits, layout == "pack-quantized", has_zero, grouped, ordered),
    )
