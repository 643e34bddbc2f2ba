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
    by_output,
    contains,
    names,
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
from jaxpaged.quantization.weight_only import WeightOnly, pack

# Where a word's eight numbers, from the lowest bits on, belong among the eight outputs.
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Awq(Source):
    """Words of eight outputs of a term; `whole`: there is one group, of all terms."""

    whole: bool
    ignored: tuple[str, ...] = ()

    @property
    def tensors(self) -> Mapping[str, Types]:
        """The layout has zero points whether `zero_point` says so or not."""
        return {"qweight": WORDS, "qzeros": WORDS, "scales": FLOATS}

    def unpack(self, scheme: Scheme, tensors: Mapping[str, jax.Array]) -> Arrays:
        """[I, O / 8] words, [groups, O] scales and [groups, O / 8] words of zero points."""
        zero = _outputs_in_order(tensors["qzeros"]) - 8
        return {
            KERNEL: pack(_outputs_in_order(tensors["qweight"]).T - 8, 4),
            "kernel_scale": by_output(tensors["scales"].astype(jnp.float32), self.whole),
            "kernel_zero": by_output(zero.astype(jnp.int8), self.whole),
        }


def _outputs_in_order(words: jax.Array) -> jax.Array:
    numbers = unpack_words(words, 4, 1).reshape(words.shape[0], -1, 8)
    place = [ORDER.index(output) for output in range(8)]
    return numbers[..., place].reshape(words.shape[0], -1)


def reader(settings: Settings) -> Callable[[str], Quantized | None]:
    """quant_method "awq"; its own tool's names for two settings are older than Hugging Face's."""
    require("awq", "bits", settings.get("bits", settings.get("w_bit")), (4,))
    require("awq", "version", str(settings.get("version", "gemm")).lower(), ("gemm",))
    group = settings.get("group_size", settings.get("q_group_size", 128))
    whole = group == -1
    if not whole:
        require_group("awq", group)
    found = Quantized(WeightOnly("int4", None if whole else group, has_zero=True), Awq(whole))
    key = "modules_to_not_convert"
    plain = [HEAD, *names("awq", key, settings.get(key))]
    return lambda name: None if contains(name, plain) else found
