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
    filled,
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
        group: terms that share a scale; None: all.
        has_zero: zero points are stored that are not the middle.
        ordered: terms are grouped by g_idx, not by where they stand.
        zero_offset: stored zero points are less by this: 1 in checkpoints of the first version.
    """

    bits: int
    group: int | None
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
        """Old writers gave every product a bias, of zeros."""
        return ("bias",)

    @property
    def implied(self) -> Mapping[str, Types]:
        """Zero points of symmetric weights, and groups of terms that stand in their order."""
        every = {"qzeros": WORDS, "g_idx": INDICES}
        return {kind: types for kind, types in every.items() if kind not in self.tensors}

    def contradiction(self, kind: str, stored: np.ndarray) -> str | None:
        """Either version's zero points say that there are none."""
        if kind == "g_idx":
            in_place = np.arange(stored.size) // (self.group or stored.size)
            return None if np.array_equal(stored, in_place) else "desc_act false"
        middle = 2 ** (self.bits - 1)
        none = [filled(number, self.bits) for number in (middle, middle - 1)]
        return None if np.isin(stored.view(np.uint32), none).all() else "sym true"

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
        arrays["kernel_scale"] = by_output(
            tensors["scales"].astype(jnp.float32), self.group is None
        )
        if self.has_zero:
            zero = unpack_words(tensors["qzeros"], self.bits, 1) + self.zero_offset
            zero = (zero & (2**self.bits - 1)) - middle
            arrays["kernel_zero"] = by_output(zero.astype(jnp.int8), self.group is None)
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
    has_zero, group = not settings.get("sym", True), None if group == -1 else group
    if group is not None:
        require_group("gptq", group)
    ordered = bool(settings.get("desc_act")) and group is not None
    return Quantized(
        WeightOnly(f"int{bits}", group, has_zero, ordered),
        Gptq(bits, group, has_zero, ordered, zero_offset=1 if version == "gptq" else 0),
    )
