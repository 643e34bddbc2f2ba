"""Recognises what a checkpoint holds quantized, from quantization_config in its config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jaxpaged.quantization import awq, compressed_tensors, float8, gptq
from jaxpaged.quantization.formats import Settings
from jaxpaged.quantization.scheme import Quantized, UnsupportedQuantizationError

# How a module of this name is stored; None: as an ordinary matrix.
Reader = Callable[[str], Quantized | None]

# A reader for settings with this quant_method. A new format: its file here, and its line.
METHODS: Mapping[str, Callable[[Settings], Reader]] = {
    "awq": awq.reader,
    "compressed-tensors": compressed_tensors.reader,
    "fbgemm_fp8": float8.reader,
    "fp8": float8.reader,
    "gptq": gptq.reader,
    "modelopt": float8.modelopt_reader,
}
ON_THE_FLY_INSTEAD = ("bitsandbytes", "torchao", "quanto", "hqq")


def checkpoint_reader(settings: Settings) -> Reader:
    """What tells how each module of a checkpoint is stored.

    Raises:
        UnsupportedQuantizationError: a method or a variant of it that nothing here reads.
    """
    method = settings.get("quant_method") or "unnamed"
    if method == "unnamed" and {"load_in_8bit", "load_in_4bit"} & settings.keys():
        method = "bitsandbytes"  # whose older versions did not say so
    if method in METHODS:
        return METHODS[method](settings)
    instead = ""
    if method in ON_THE_FLY_INSTEAD:
        instead = ". Load the model's ordinary weights with --quantization instead"
    raise UnsupportedQuantizationError(
        f"config.json: quantization {method!r} is not supported; "
        f"supported: {', '.join(METHODS)}{instead}"
    )
