"""AWQ's 4-bit weights in the GEMM layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxpaged.quantization.formats import (
    HEAD,
    WORDS,
    Settings,
    contains,
    require,
    require_group,
    unpack_words,
)
from jaxpaged.quantization.scheme import (
    FLOATS,
    KERNEL,
    Arrays,
    Quantized,
    Scheme,
    Source,
    Types,
)
from jaxpaged.quantization.weight_only import WeightOnly, pack_int4

# Where a word's eight numbers, from the lowest bits on, belong among the eight outputs.
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Awq(Source):
    """Words of eight outputs of a term."""

    has_zero: bool
    ignored: tuple[str, ...] = ()

    @property
    def tensors(self) -> Mapping[str, Types]:
        """Zeros are there only where they say something."""
        zeros = {"qzeros": WORDS} if self.has_zero else {}
        return {"qweight": WORDS, "scales": FLOATS, **zeros}

    def unpack(self, scheme: Scheme, tensors: Mapping[str, jax.Array]) -> Arrays:
        """[I, O / 8] words and [groups, O] scales."""
        arrays = {
            KERNEL: pack_int4(_outputs_in_order(tensors["qweight"]).T - 8),
            "kernel_scale": tensors["scales"].astype(jnp.float32).T,
        }
        if self.has_zero:
            zero = _outputs_in_order(tensors["qzeros"]).T - 8
            arrays["kernel_zero"] = zero.astype(jnp.int8)
        return arrays


def _outputs_in_order(words: jax.Array) -> jax.Array:
    numbers = unpack_words(words, 4, 1).reshape(words.shape[0], -1, 8)
    place = [ORDER.index(output) for output in range(8)]
    return numbers[..., place].reshape(words.shape[0], -1)


def reader(settings: Settings) -> Callable[[str], Quantized | None]:
    """quant_method "awq"."""
    require("awq", "bits", settings.get("bits"), (4,))
    require("awq", "version", str(settings.get("version", "gemm")).lower(), ("gemm",))
    has_zero = settings.get("zero_point", True)
    group = settings.get("group_size", 128)
    require_group("awq", group)
    found = Quantized(WeightOnly("int4", group, has_zero), Awq(has_zero))
    plain = [HEAD, *(settings.get("modules_to_not_convert") or [])]
    return lambda name: None if contains(name, plain) else found
