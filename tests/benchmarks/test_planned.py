"""Results as settings of the planner, and the fit of its figures."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import calibrate, plan_accuracy
from benchmarks.common import RESULTS, markdown
from benchmarks.engines import row
from benchmarks.planned import Setting, measured_settings, value
from jaxpaged.planning.hardware import CALIBRATIONS, Calibration
from jaxpaged.planning.lengths import Lengths

INTEGERS = ("int8_per_channel_weight_only", "int4_per_group_weight_only")
LATENCIES = {"output tok/s": 1000.0, "TTFT p50": 20.0, "TPOT p50": 5.0, "E2E p50": 400.0}


def write(folder: Path, name: str, command: str, **content: Any) -> None:
    content = {"card": "NVIDIA H200", "model": "qwen3-0.6b", "dtype": "bfloat16"} | content
    (folder / f"{name}.json").write_text(json.dumps({"command": command, **content}))


def test_decode_results_are_read(tmp_path: Path) -> None:
    rows = [{"batch": 1, "step ms": 1.5}, {"batch": 4, "step ms": 2.0}]
    old = [{"batch": row["batch"], "step_ms": [2.5, row["step ms"], 1.25]} for row in rows]
    new = [{"batch": 1, "seconds": {"1": [0.5, 0.25], "33": [2.0, 3.0]}}]
    write(
        tmp_path, "decode_latency_x", "python -m benchmarks.decode_latency -tp 2 --steps 8",
        tensor_parallel_size=2, context=512, rows=rows, runs=old,
    )  # fmt: skip
    write(
        tmp_path, "decode_latency_y", "python -m benchmarks.decode_latency --serving",
        context=512, rows=rows[:1], runs=new,
    )  # fmt: skip
    one, four, serving = measured_settings(tmp_path)
    assert (one.tp, one.pp, one.dp) == (2, 1, 1) and one.measured == {"step ms": 1.5}
    assert one.fastest == four.fastest == 1e-3 * 8 * 1.25 and serving.fastest == 1.75
    assert four.lengths == [Lengths(512, 9)] * 4
    assert four.limits == {
        "max_model_len": 528, "max_num_seqs": 4, "max_num_batched_tokens": 2048,
    }  # fmt: skip
    assert serving.limits["max_num_seqs"] == 256 and serving.lengths == [Lengths(512, 33)]


def test_throughput_and_serving_results_are_read(tmp_path: Path) -> None:
    write(
        tmp_path, "offline_throughput_x",
        "python -m benchmarks.offline_throughput --lengths sharegpt --requests 8 --seed 3",
        rows=[{"requests": "8 x sharegpt", "output tok/s": 500.0}],
        runs=[{"seconds": 3.0}, {"seconds": 2.0}],
    )  # fmt: skip
    write(
        tmp_path, "serving_x",
        "python -m benchmarks.serving --input-len 64 --output-len 8 -dp 2 --max-model-len 512",
        lengths="64/8", rows=[{"rate": "4.0", "requests": 6, **LATENCIES},
                              {"rate": "inf", "requests": 6, **LATENCIES}],
    )  # fmt: skip
    offline, slow, fast = measured_settings(tmp_path)
    assert offline.fastest == 2.0 and slow.fastest is None
    assert offline.limits["max_num_batched_tokens"] == 16384 and len(offline.lengths) == 8
    assert (slow.dp, slow.rate, slow.seed, fast.seed) == (2, 4.0, 0, 1)
    assert slow.limits["max_model_len"] == 512 and slow.lengths == [Lengths(64, 8)] * 6
    calibration = Calibration.load(CALIBRATIONS / "h200.json")
    expected = [each.plan(each.cost_model(calibration)) for each in (slow, fast)]
    assert expected[0].keys() == slow.measured.keys()
    assert expected[0]["output tok/s"] < expected[1]["output tok/s"]


def test_engines_are_read_as_they_kept_their_weights(tmp_path: Path) -> None:
    engine = {
        "flags": "--cpu-offload-gb 0.25", "dtype": "bfloat16", "cpu_offload_gb": 0.25,
        "steps": [{"batch": 1, "step ms": 9.0, "seconds": {"1": [1.0], "33": [3.0, 2.5]}}],
        "calls": [],
    }  # fmt: skip
    write(tmp_path, "engines_x", "python -m benchmarks.engines --calls 0", engines=[engine])
    (step,) = measured_settings(tmp_path)
    assert step.fastest == 1.5 and step.config.cpu_offload_gb == step.layout.cpu_offload_gb == 0.25
    calibration = Calibration.load(CALIBRATIONS / "h200.json")
    other = dataclasses.replace(step, stored={})
    expected = [each.plan(each.cost_model(calibration))["step ms"] for each in (step, other)]
    assert expected[0] > 2 * expected[1]


def test_an_engine_without_calls_has_a_line_of_steps_alone() -> None:
    found = {
        "flags": "", "lm_head_dtype": "bfloat16", "weights_gib": 1.0, "pool_tokens": 2,
        "ready_seconds": 3.0, "steps": [{"batch": 1, "step ms": 9.0}],
    }  # fmt: skip
    assert list(row(found | {"calls": []}))[-2:] == ["B 1, ms", "ready, s"]
    assert row(found | {"calls": [{"seconds": 2.0}]})["256 x 512/128, tok/s"] == 16384


def test_what_is_not_understood_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, "decode_latency_a", "x", card=None, context=1, rows=[], runs=[])
    write(tmp_path, "decode_latency_b", "x", model="unknown", context=1, rows=[], runs=[])
    write(tmp_path, "startup", "x")
    assert list(measured_settings(tmp_path)) == []


def test_the_last_flag_counts() -> None:
    flags = ["x", "-a", "1", "--b-c", "2", "-a", "3"]
    assert (value(flags, "-a", 0), value(flags, "--b_c", 0.0), value(flags, "-z", 7)) == (3, 2.0, 7)


@pytest.fixture(scope="module")
def settings() -> list[Setting]:
    return [s for s in measured_settings() if "0.6b" in s.file and s.tp * s.pp * s.dp == 1]


def as_if_measured(setting: Setting, truth: Calibration) -> Setting:
    """The setting with the time that is expected of it."""
    (figure,) = setting.plan(setting.cost_model(truth)).values()
    steps = 1e-3 * (setting.lengths[0].output - 1)
    outputs = sum(item.output for item in setting.lengths)
    seconds = figure * steps if setting.is_decode else outputs / figure
    return dataclasses.replace(setting, fastest=seconds)


def test_the_fit_finds_what_times_were_made_with(settings: list[Setting]) -> None:
    # A step that waits for the host tells nothing of the GPU.
    truth = dataclasses.replace(Calibration.load(CALIBRATIONS / "h200.json"), dispatch_us=0.0)
    made = [as_if_measured(setting, truth) for setting in settings]
    free = {name: calibrate.FREE[name] for name in ("weight_share", "layer_us")}
    start = dataclasses.replace(truth, weight_share=0.5, layer_us=50.0)
    found = calibrate.fit_to(made, start, free)
    assert found.weight_share == pytest.approx(truth.weight_share, rel=0.02)
    assert found.layer_us == pytest.approx(truth.layer_us, rel=0.02)


def test_the_fit_tells_what_quantized_weights_cost(settings: list[Setting]) -> None:
    start = dataclasses.replace(Calibration.load(CALIBRATIONS / "h200.json"), dispatch_us=0.0)
    figures = {"int8_share": 0.7, "int4_share": 0.5, "widened_share": 0.6, "rounding_us": 3.0}
    truth = calibrate.with_figures(start, figures)
    made = []
    for setting in settings:
        for scheme in ("fp8_per_channel", *INTEGERS):
            stored = dataclasses.replace(setting, stored={"quantization": scheme})
            made.append(as_if_measured(stored, truth))
    found = calibrate.fit_to(made, start, calibrate.FREE_QUANTIZED)
    assert {name: getattr(found, name) for name in figures} == pytest.approx(figures, rel=0.02)


def test_a_run_that_is_missing_is_named(settings: list[Setting]) -> None:
    name = settings[0].name
    assert calibrate.named(settings, [name]) == settings[:1]
    with pytest.raises(SystemExit, match="lacks what is fitted to: x: decode; y$"):
        calibrate.named(settings, ["x: decode", name, "y"])


def test_parts_that_were_measured_alone_are_in_the_file(settings: list[Setting]) -> None:
    figures = json.loads((CALIBRATIONS / "h200.json").read_text())["coefficients"]
    alone = {**calibrate.attention(), **calibrate.host(), "step_us": calibrate.step_us()}
    (bound,) = (setting for setting in settings if setting.name == calibrate.HOST_BOUND)
    alone["dispatch_us"] = calibrate.dispatch_us(bound, alone)
    assert {name: figures[name] for name in alone} == pytest.approx(alone, rel=1e-3)


def test_the_table_is_what_the_planner_says(settings: list[Setting]) -> None:
    content = json.loads((RESULTS / "plan_accuracy.json").read_text())
    rows = {(row["result"], row["setting"], row["figure"]): row for row in content["rows"]}
    calibration = Calibration.load(CALIBRATIONS / "h200.json")
    for setting in settings:
        for name, expected in setting.plan(setting.cost_model(calibration)).items():
            row = rows[setting.file, setting.what, name]
            assert row["expected"] == pytest.approx(expected, rel=1e-6)
            assert row["measured"] == setting.measured[name]
    document = plan_accuracy.DOCUMENT.read_text()
    assert markdown(content["rows"]) in document
    assert plan_accuracy.told(content["errors"]) in document
    held_out = sum(row["run"] == "held out" for row in content["rows"])
    assert held_out >= len(content["rows"]) / 2
