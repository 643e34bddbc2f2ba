"""GPTQ's weights in 4 or 8 bits, in both versions of its checkpoints."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.quantization.formats import (
    HEAD,
    INDICES,
    WORDS,
    Settings,
    by_output,
    check_order,
    in_order,
    require,
    require_group,
    unpack_words,
)
from jaxpaged.quantization.scheme import (
    FLOATS,
    KERNEL,
    ORDER,
    Arrays,
    Quantized,
    Scheme,
    Source,
    Types,
)
from jaxpaged.quantization.weight_only import WeightOnly, pack


@dataclass(frozen=True)
class Gptq(Source):
    """Words of neighbouring terms of an output.

    Attributes:
        bits: 4 or 8.
        whole: there is one group, of all terms.
        has_zero: zero points are stored that are not the middle.
        ordered: terms are grouped by g_idx, not by where they stand.
        zero_offset: stored zero points are less by this: 1 in checkpoints of the first version.
    """

    bits: int
    whole: bool
    has_zero: bool
    ordered: bool
    zero_offset: int

    @property
    def tensors(self) -> Mapping[str, Types]:
        """What says something."""
        zeros = {"qzeros": WORDS} if self.has_zero else {}
        order = {"g_idx": INDICES} if self.ordered else {}
        return {"qweight": WORDS, "scales": FLOATS, **zeros, **order}

    @property
    def ignored(self) -> tuple[str, ...]:
        """What says nothing; old writers gave every product a bias, of zeros."""
        return ("bias", *({"qzeros", "g_idx"} - self.tensors.keys()))

    def check(self, parts: Sequence[Mapping[str, np.ndarray]]) -> None:
        """Parts of one product share their rows, and so the order of these."""
        if self.ordered:
            check_order([part["g_idx"] for part in parts], parts[0]["scales"].shape[0])

    def unpack(self, scheme: Scheme, tensors: Mapping[str, jax.Array]) -> Arrays:
        """[I · bits / 32, O] words, [groups, O] scales, [groups, O · bits / 32] words of zeros."""
        middle = 2 ** (self.bits - 1)
        kernel = unpack_words(tensors["qweight"], self.bits, 0).T - middle
        arrays = {}
        if self.ordered:
            kernel, arrays[ORDER] = in_order(kernel, tensors["g_idx"])
        arrays[KERNEL] = pack(kernel, self.bits)
        arrays["kernel_scale"] = by_output(tensors["scales"].astype(jnp.float32), self.whole)
        if self.has_zero:
            zero = unpack_words(tensors["qzeros"], self.bits, 1) + self.zero_offset
            zero = (zero & (2**self.bits - 1)) - middle
            arrays["kernel_zero"] = by_output(zero.astype(jnp.int8), self.whole)
        return arrays


def reader(settings: Settings) -> Callable[[str], Quantized | None]:
    """quant_method "gptq"."""
    dynamic = settings.get("dynamic") or {}
    blocks = [
        name for block in settings.get("modules_in_block_to_quantize") or [] for name in block
    ]
    _quantized(settings)

    def read(name: str) -> Quantized | None:
        if name == HEAD:
            return _quantized(settings) if settings.get("lm_head") else None
        if blocks and not name.endswith(tuple(blocks)):
            return None
        for pattern, changes in dynamic.items():
            if re.match(pattern.removeprefix("-:").removeprefix("+:"), name):
                return None if pattern.startswith("-:") else _quantized({**settings, **changes})
        return _quantized(settings)

    return read


def _quantized(settings: Mapping[str, Any]) -> Quantized:
    bits, group = settings.get("bits", 0), settings.get("group_size", 128)
    version = settings.get("checkpoint_format") or "gptq"
    require("gptq", "bits", bits, (4, 8))
    require("gptq", "checkpoint_format", version, ("gptq", "gptq_v2"))
    has_zero, whole = not settings.get("sym", True), group in (-1, None)
    if not whole:
        require_group("gptq", group)
    ordered = bool(settings.get("desc_act")) and not whole
    return Quantized(
        WeightOnly(f"int{bits}", None if whole else group, has_zero, ordered),
        Gptq(bits, whole, has_zero, ordered, zero_offset=1 if version == "gptq" else 0),
    )
