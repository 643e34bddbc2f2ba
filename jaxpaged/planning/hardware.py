"""What GPUs can do by their data sheets, and what was measured of it on one of them."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path

from jaxpaged.model_files import read_json

CALIBRATIONS = Path(__file__).parent / "calibration"
REFERENCE = "H200"  # whose shares stand for those of a card that nobody has measured
MIB = 1 << 20


@dataclass(frozen=True)
class GPU:
    """Peak figures of one card, dense, without sparsity."""

    name: str
    memory_bytes: int  # as nvidia-smi shows them
    bandwidth: float  # bytes a second
    flops_16: float  # operations a second in bfloat16 or float16
    flops_32: float  # in float32 proper: products here are never rounded to TF32
    link: float  # bytes a second that a card sends to its peers while it receives as many
    compute_capability: float
    per_host: int = 8  # cards that reach each other at that rate
    source: str = ""

    def flops(self, itemsize: int) -> float:
        """Peak for operands of so many bytes; one: 8-bit floats, which not all cards have."""
        if itemsize == 1:
            return 2 * self.flops_16
        return self.flops_16 if itemsize == 2 else self.flops_32


GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU("H200", 143_771 * MIB, 4.8e12, 989e12, 67e12, 450e9, 9.0,
            source="NVIDIA H200 data sheet, SXM"),
        GPU("H100", 81_559 * MIB, 3.35e12, 989e12, 67e12, 450e9, 9.0,
            source="NVIDIA H100 data sheet, SXM"),
        GPU("A100-80", 81_920 * MIB, 2.039e12, 312e12, 19.5e12, 300e9, 8.0,
            source="NVIDIA A100 data sheet, 80 GB SXM"),
        GPU("L40S", 46_068 * MIB, 864e9, 362e12, 91.6e12, 32e9, 8.9,
            source="NVIDIA L40S data sheet; peers over PCIe 4.0 x16"),
        GPU("B200", 183_359 * MIB, 8e12, 2250e12, 75e12, 900e9, 10.0,
            source="NVIDIA HGX B200 data sheet, an eighth of the board"),
    )
}  # fmt: skip


def parse_gpus(text: str) -> tuple[GPU, int]:
    """Read 'H200:8' or 'H200'.

    Raises:
        ValueError: no such card, or no number of them.
    """
    name, colon, count = text.partition(":")
    if name.upper() not in GPUS:
        raise ValueError(f"--gpus {text}: no such card; known: {', '.join(GPUS)}")
    if colon and not re.fullmatch(r"[1-9]\d*", count):
        raise ValueError(f"--gpus {text}: expected a card and how many there are, such as H200:8")
    return GPUS[name.upper()], int(count or 1)


def _range(figure: str) -> tuple[float, float]:
    """What a figure of a calibration may be: a share, a norm's p or microseconds."""
    if figure.endswith("_share"):
        return 1e-6, 1.0
    return (1.0, 100.0) if figure == "overlap" else (0.0, 1e9)


@dataclass(frozen=True)
class Calibration:
    """What is reached of a card's peaks, and what each step costs beside: fitted to runs.

    `benchmarks/calibrate.py` writes it, with the results that each figure comes from.
    """

    gpu: str
    weight_share: float  # of the bandwidth, while weights are read that are multiplied as stored
    int8_share: float  # while those are that are widened from 8 bits
    int4_share: float  # or from 4
    widened_share: float  # of the peak operations, in products that widen weights on their way
    rounding_us: float  # of rounding a product's rows to 8-bit floats
    gemm_share: float  # of the peak operations, in large products
    overlap: float  # p: bytes and operations of a product together take their p-norm
    layer_us: float  # of a layer's kernels beside what they read and compute
    kv_share: float  # of the bandwidth, while attention reads keys and values
    attention_us: float  # of a layer's attention beside that
    prefill_share: float  # of the peak operations, in attention of prompts
    step_us: float  # of a step beside its layers: input, sampling, results
    host_us: float  # of the host's work for a step
    host_us_per_seq: float  # and for each of its sequences
    dispatch_us: float  # that a layer adds to the host's calls of a step: its arrays and kernels
    all_reduce_us: float  # of an all-reduce of nothing
    link_share: float  # of the link's rate, in a large one

    @classmethod
    def load(cls, path: Path) -> Calibration:
        """Read a file that `benchmarks/calibrate.py` wrote.

        Raises:
            ModelFilesError: the file is missing or is no JSON object.
            ValueError: it lacks a figure, or one is out of its range.
        """
        content = read_json(path)
        gpu, found = content.get("gpu"), content.get("coefficients")
        if not isinstance(gpu, str) or not isinstance(found, dict):
            raise ValueError(f'calibration {path} must have a "gpu" and "coefficients"')
        names = [field.name for field in fields(cls) if field.name != "gpu"]
        missing = [name for name in names if name not in found]
        if missing:
            raise ValueError(
                f"calibration {path} lacks {', '.join(missing)}: "
                "run `python -m benchmarks.calibrate` again"
            )
        for name in names:
            value, (least, most) = found[name], _range(name)
            if type(value) not in (int, float) or not least <= value <= most:
                raise ValueError(
                    f"calibration {path}: {name} must be a number from {least:g} to {most:g}, "
                    f"got {value!r}"
                )
        return cls(gpu, **{name: found[name] for name in names})

    @classmethod
    def of(cls, gpu: GPU) -> Calibration:
        """The card's own, or the reference's if it was never measured."""
        path = CALIBRATIONS / f"{gpu.name.lower()}.json"
        return cls.load(path if path.exists() else CALIBRATIONS / f"{REFERENCE.lower()}.json")
