"""Fits the cost model of `jaxpaged plan` to measured runs on one H200 (and two, where there are).

    python -m benchmarks.calibrate

Attention's figures come from `results/kernels.json`, a step's own kernels from `profile_step`, the
host's work from `host_step` and from `HOST_BOUND`, a run that waits for the host. What is left is
fitted to the whole runs that `FITTED` names, and then, for quantized weights, `QUANTIZED`,
by least squares of the logarithm of expected over measured: the fastest of their repeats, since the
model knows nothing that disturbs a run. All other results are held out: see `plan_accuracy`. Writes
jaxpaged/planning/calibration/h200.json.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from benchmarks.common import RESULTS
from benchmarks.planned import Setting, measured_settings
from jaxpaged.planning.cost_model import CostModel, Seconds, Work
from jaxpaged.planning.hardware import CALIBRATIONS, GPUS, Calibration

GPU = GPUS["H200"]
MODEL = "qwen2.5-7b"
FITTED = (
    f"decode_latency_{MODEL}: decode step, B 1, context 1024",
    f"decode_latency_{MODEL}: decode step, B 64, context 1024",
    f"decode_latency_{MODEL}: decode step, B 256, context 1024",
    "decode_latency_qwen3-0.6b: decode step, B 64, context 1024",
    f"offline_throughput_{MODEL}_fixed: offline, 256 x 512/128",
)
QUANTIZED = tuple(
    f"engines_{MODEL}_{file}: decode step -q {scheme}, B {batch}, context 1024"
    for file, scheme in (
        ("floats", "fp8_per_channel"),
        ("integers_pages", "int8_per_channel_weight_only --kv-cache-dtype fp8"),
        ("integers_pages", "int4_per_group_weight_only --kv-cache-dtype fp8"),
    )
    for batch in (1, 64)
)
HOST_BOUND = "decode_latency_qwen3-0.6b: decode step, B 1, context 1024"
FREE = {  # figures that whole runs tell: where the search starts, and its bounds
    "weight_share": (0.85, 0.3, 1.0),
    "gemm_share": (0.7, 0.2, 1.0),
    "overlap": (1.5, 1.0, 8.0),
    "layer_us": (20.0, 0.0, 100.0),
}
FREE_QUANTIZED = {
    "int8_share": (0.6, 0.1, 1.0),
    "int4_share": (0.4, 0.1, 1.0),
    "widened_share": (0.5, 0.1, 1.0),
    "rounding_us": (4.0, 0.0, 100.0),
}
COLLECTIVES = {"all_reduce_us": (15.0, 1.0, 100.0)}
# A line through these; a run with -tp 2 replaces its start, once there is one.
EXPERIMENT = (
    "an experiment before this engine, not in benchmarks/results: an all-reduce of 1 / 64 / 1024 "
    "rows of 5120 bfloat16 between products on two H200 takes 15 / 18 / 49 us"
)
ALL_REDUCE_US, LINK_SHARE = 15.0, 0.69


class Recorder(CostModel):
    """Keeps each step's work; the schedule of requests that come together knows no clock."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.works: list[Work] = []

    def seconds(self, work: Work) -> list[Seconds]:
        """Of a step."""
        self.works.append(work)
        return super().seconds(work)


def named(settings: Sequence[Setting], names: Sequence[str]) -> list[Setting]:
    """The settings of these names.

    Raises:
        SystemExit: one was not measured.
    """
    found = {setting.name: setting for setting in settings}
    missing = [name for name in names if name not in found]
    if missing:
        raise SystemExit(f"benchmarks/results lacks what is fitted to: {'; '.join(missing)}")
    return [found[name] for name in names]


def attention() -> dict[str, float]:
    """What `kernels.json` says of attention: a line through decodes, a share of long prompts."""
    content = json.loads((RESULTS / "kernels.json").read_text())
    rows = [row for row in content["decode"] if not row["heads"].endswith("256")]
    # Floors were reckoned with the rate of a plain copy.
    sizes = np.array([1e-6 * row["floor_us"] * content["copy_rate"] for row in rows])
    us = np.array([row["us"] for row in rows])
    columns = np.stack([np.ones(len(rows)), sizes], 1) / us[:, None]  # relative errors count
    base, slope = np.linalg.lstsq(columns, np.ones(len(rows)), rcond=None)[0]
    rates = [
        row["tflops"]
        for row in content["prefill"]
        if row["kernel"] == "triton" and row["work"] == "prompt of 8192"
    ]
    return {
        "attention_us": float(base),
        "kv_share": float(1e6 / slope / GPU.bandwidth),
        "prefill_share": 1e12 * median(rates) / GPU.flops_16,
    }


def step_us() -> float:
    """Of the kernels that a decode step of one sequence runs a few times, not once a layer."""
    found = []
    for model in (MODEL, "qwen3-0.6b"):
        step = json.loads((RESULTS / f"profile_step_{model}.json").read_text())["steps"][0]
        assert step["batch"] == 1
        few = [entry["us"] for entry in step["by_name"] if 0 < entry["count"] < 10]
        found.append(sum(few) - max(few))  # the largest is the product with the head
    return median(found)


def host() -> dict[str, float]:
    """A line through the microseconds of `host_step`."""
    rows = json.loads((RESULTS / "host_step.json").read_text())["rows"]
    rows = [row for row in rows if row["sampling"] == "greedy"]
    us = np.array([row["all us"] for row in rows])
    slope, base = np.polyfit([row["batch"] for row in rows], us, 1, w=1 / us)  # relative errors
    return {"host_us": float(max(base, 0.0)), "host_us_per_seq": float(slope)}


def dispatch_us(bound: Setting, figures: dict[str, float]) -> float:
    """Of a layer, where a step of one sequence takes as long as the host needs for it."""
    assert bound.fastest is not None
    step = 1e6 * bound.fastest / (bound.lengths[0].output - 1)
    return (step - figures["host_us"] - figures["host_us_per_seq"]) / len(bound.layout.spec.layers)


def fit_to(
    settings: Sequence[Setting], start: Calibration, free: dict[str, tuple[float, float, float]]
) -> Calibration:
    """Move the free figures to where the settings' times are met best."""
    taped: list[tuple[Setting, list[Work], float]] = []
    for setting in settings:
        recorder = Recorder(*recorder_arguments(setting, start))
        setting.plan(recorder)
        works = recorder.works
        if setting.is_decode:
            works = works[1 - setting.lengths[0].output :]
        assert setting.fastest is not None
        taped.append((setting, works, setting.fastest))

    def errors(values: np.ndarray) -> list[float]:
        calibration = with_figures(start, dict(zip(free, values.tolist(), strict=True)))
        found = []
        for setting, works, seconds in taped:
            cost = setting.cost_model(calibration)
            expected = sum(sum(part.values()) for work in works for part in cost.seconds(work))
            found.append(float(np.log(expected / seconds)))
        return found

    first, least, most = zip(*free.values(), strict=True)
    done = least_squares(errors, first, bounds=(least, most), x_scale=first)
    for (setting, _, _), error in zip(taped, done.fun, strict=True):
        print(f"{setting.name:80} {np.expm1(error):+.1%}")
    return with_figures(start, dict(zip(free, done.x.tolist(), strict=True)))


def recorder_arguments(setting: Setting, calibration: Calibration) -> tuple[Any, ...]:
    """Of a cost model."""
    itemsize = setting.layout.plan(setting.config).kv.dtype.itemsize
    return GPU, calibration, setting.layout, itemsize


def with_figures(calibration: Calibration, figures: dict[str, float]) -> Calibration:
    """The calibration with some figures replaced."""
    return dataclasses.replace(calibration, **figures)  # type: ignore[arg-type]


def main() -> None:
    """Fit, print, write."""
    settings = [setting for setting in measured_settings() if setting.gpu == GPU.name]
    (bound,) = named(settings, [HOST_BOUND])
    figures = host()
    start = Calibration(
        gpu=GPU.name,
        **attention(),
        **figures,
        dispatch_us=dispatch_us(bound, figures),
        step_us=step_us(),
        all_reduce_us=ALL_REDUCE_US,
        link_share=LINK_SHARE,
        **{name: first for name, (first, _, _) in (FREE | FREE_QUANTIZED).items()},
    )
    alone, quantized = named(settings, FITTED), named(settings, QUANTIZED)
    found = fit_to(quantized, fit_to(alone, start, FREE), FREE_QUANTIZED)
    shared = [s for s in settings if s.model == MODEL and s.is_decode and (s.tp, s.pp) == (2, 1)]
    if shared:
        found = fit_to(shared, found, COLLECTIVES)
    fitted = dataclasses.asdict(found)
    del fitted["gpu"]
    content = {
        "gpu": GPU.name,
        "coefficients": {name: float(f"{value:.4g}") for name, value in fitted.items()},
        "sources": {
            ", ".join(FREE): sorted({s.file for s in alone}),
            ", ".join(FREE_QUANTIZED): sorted({s.file for s in quantized}),
            "kv_share, attention_us, prefill_share": ["kernels"],
            "step_us": [f"profile_step_{MODEL}", "profile_step_qwen3-0.6b"],
            "host_us, host_us_per_seq": ["host_step, on another machine's processor"],
            "dispatch_us": [bound.file],
            "all_reduce_us": sorted({s.file for s in shared}) or [EXPERIMENT],
            "link_share": [EXPERIMENT],
        },
        "fitted": [setting.name for setting in (*alone, *quantized, bound, *shared)],
    }
    path = CALIBRATIONS / f"{GPU.name.lower()}.json"
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(json.dumps(content["coefficients"], indent=1))
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
