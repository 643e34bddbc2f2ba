"""Weights in fewer bits. A new scheme: its file here, and its name in `ON_THE_FLY`."""

from __future__ import annotations

from collections.abc import Mapping

from jaxpaged.quantization.checkpoint import METHODS, checkpoint_reader
from jaxpaged.quantization.fp8 import Fp8
from jaxpaged.quantization.scheme import (
    FLOATS,
    KERNEL,
    ORDER,
    Around,
    Arrays,
    ArraySpec,
    FullPrecision,
    Quantized,
    Scheme,
    Source,
    Types,
    UnsupportedQuantizationError,
    arrange,
    divides,
    finished,
)
from jaxpaged.quantization.weight_only import WeightOnly

__all__ = [
    "FLOATS",
    "KERNEL",
    "METHODS",
    "ON_THE_FLY",
    "ORDER",
    "Around",
    "ArraySpec",
    "Arrays",
    "FullPrecision",
    "Quantized",
    "Scheme",
    "Source",
    "Types",
    "UnsupportedQuantizationError",
    "arrange",
    "checkpoint_reader",
    "divides",
    "finished",
]

# What `--quantization` makes of ordinary weights.
ON_THE_FLY: Mapping[str, Quantized] = {
    name: Quantized(scheme, FullPrecision())
    for name, scheme in (
        ("fp8_per_tensor", Fp8(per_tensor=True)),
        ("fp8_per_channel", Fp8()),
        ("int8_per_channel_weight_only", WeightOnly("int8")),
        ("int4_per_group_weight_only", WeightOnly("int4", group=128)),
    )
}
