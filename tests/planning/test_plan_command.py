"""`jaxpaged plan` as a command."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from jaxpaged.cli import main
from jaxpaged.config import GIB
from jaxpaged.planning.options import ENGINE_SETTINGS, PlanOptions
from tests.planning.conftest import MODELS

MODEL = str(MODELS / "qwen2.5-7b.json")
QUICK = ("--requests", "16", "--trace", "fixed:512,16", "--max-model-len", "2048")


def text_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def figures(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    return json.loads(text_of(capsys, *arguments, "--json"))


def test_what_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    text = text_of(capsys, MODEL, *QUICK, "--gpus", "H200:4", "--tp", "2", "--rate", "8")
    for words in (
        "on 2 x H200: tensor parallel 2", "2 of 4 GPUs are not used", "fits", "weights", "7.09",
        "pages", "sequences of 2,048 tokens at once", "at 8 a second", "tokens a second",
        "TTFT, ms: p50", "ITL, ms: p50", "E2E, ms: p50", "p90", "p99", "preemptions", "steps of",
        "bound by", "calibrated with runs on H200",
    ):  # fmt: skip
        assert words in text, words
    assert "jaxpaged serve MODEL -tp 2 --max-model-len 2048 --max-num-seqs 256" in text


def test_help_is_complete(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["plan", "--help"])
    assert done.value.code == 0
    text = capsys.readouterr().out
    for field in fields(PlanOptions):
        assert f"--{field.name.replace('_', '-')}" in text
        assert all(word.rstrip(",:;") in text for word in field.metadata["help"].split()[:3])
    for name in ENGINE_SETTINGS:
        assert f"--{name.replace('_', '-')}" in text
    document = (MODELS.parents[1] / "docs" / "planning.md").read_text()
    assert all(f"--{field.name.replace('_', '-')}" in document for field in fields(PlanOptions))


def test_json_has_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    found = figures(capsys, MODEL, *QUICK)
    assert found["fits"] and found["problem"] is None and found["smallest"] is None
    assert found["bytes_per_gpu"]["left_for_pages"] == found["bytes_per_gpu"]["limit"] - sum(
        found["bytes_per_gpu"][name] for name in ("weights", "state", "temporaries", "margin")
    )
    pool, predicted = found["pool"], found["predicted"]
    assert pool["tokens"] == 16 * pool["pages"] == 2048 * pool["concurrency_at_full_length"]
    # The prompts are one step, and each further token another.
    assert predicted["steps"] == 16 and predicted["mean_batch"] == 16
    assert predicted["prefix_cache_hits"] == 0
    assert predicted["ttft_ms"]["p50"] < predicted["e2e_ms"]["p50"]
    rate = predicted["output_tokens_per_second"]
    assert rate * predicted["seconds"] == pytest.approx(16 * 16)
    assert predicted["total_tokens_per_second"] == pytest.approx(rate * (512 + 16) / 16)
    assert found["trace"]["rate"] == "inf" and predicted["bound"] in predicted["time_shares"]


def test_the_same_command_gives_the_same_figures(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (MODEL, "--requests", "32", "--rate", "30", "--max-model-len", "2048")
    assert figures(capsys, *arguments) == figures(capsys, *arguments)


def test_replicas_and_stages(capsys: pytest.CaptureFixture[str]) -> None:
    one = figures(capsys, MODEL, *QUICK)
    two = figures(capsys, MODEL, *QUICK, "--gpus", "H200:2", "--dp", "2")
    staged = figures(capsys, MODEL, *QUICK, "--gpus", "H200:2", "--pp", "2")
    faster = [
        found["predicted"]["output_tokens_per_second"]
        / one["predicted"]["output_tokens_per_second"]
        for found in (two, staged)
    ]
    assert 1 < faster[0] <= 2 and 1 < faster[1] <= 2
    assert staged["bytes_per_gpu"]["weights"] < one["bytes_per_gpu"]["weights"]
    assert two["bytes_per_gpu"]["weights"] == one["bytes_per_gpu"]["weights"]
    assert "-dp 2" in two["command"] and "-pp 2" in staged["command"]
    overlap = "stages are taken to overlap"
    assert overlap in staged["notes"][0] and overlap not in two["notes"][0]


def test_prefixes_save_time(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (MODEL, *QUICK, "--rate", "20")
    alone, shared = (
        figures(capsys, *arguments, "--shared-prefix", prefix)["predicted"]
        for prefix in ("0", "496")
    )
    assert shared["prefix_cache_hits"] == 15 * 496
    assert shared["ttft_ms"]["p90"] < alone["ttft_ms"]["p90"]
    off = figures(
        capsys, *arguments, "--shared-prefix", "496", "--no-enable-prefix-caching"
    )["predicted"]  # fmt: skip
    assert off["prefix_cache_hits"] == 0 and off["ttft_ms"] == alone["ttft_ms"]
    longest, endless = (
        figures(capsys, MODEL, *QUICK, "--shared-prefix", prefix)["predicted"]
        for prefix in ("512", "9" * 18)
    )
    assert longest == endless


def test_a_wider_dtype_takes_twice_the_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    narrow, wide = (
        figures(capsys, MODEL, *QUICK, "--dtype", dtype) for dtype in ("bfloat16", "float32")
    )
    assert wide["bytes_per_gpu"]["weights"] == 2 * narrow["bytes_per_gpu"]["weights"]
    assert wide["pool"]["page_bytes"] == 2 * narrow["pool"]["page_bytes"]
    assert wide["predicted"]["seconds"] > 2 * narrow["predicted"]["seconds"]
    assert "--dtype float32" in wide["command"]


def test_quantized_weights_count_as_they_are_stored(capsys: pytest.CaptureFixture[str]) -> None:
    (name, scheme), found = ("-q", "int4_per_group_weight_only"), []
    for flags in ((), (name, scheme), (name, scheme, "--quantize-lm-head")):
        found.append(figures(capsys, MODEL, *QUICK, *flags))
    stored = [each["bytes_per_gpu"]["weights"] for each in found]
    tables, layers = 2 * 2 * 152_064 * 3584, 28 * 233_046_016  # bytes; weights of the products
    assert stored[0] == pytest.approx(tables + 2 * layers, rel=1e-3)
    assert stored[1] == pytest.approx(tables + 4.25 / 8 * layers, rel=1e-3)
    assert found[1]["predicted"]["seconds"] < found[0]["predicted"]["seconds"]
    assert stored[1] - stored[2] == pytest.approx((1 - 4.25 / 16) * tables / 2, rel=1e-3)
    assert found[2]["predicted"]["seconds"] < found[1]["predicted"]["seconds"]
    assert f"--quantization {scheme} --quantize-lm-head" in found[2]["command"]


def test_weights_in_host_memory_make_room_and_take_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    here, there = (figures(capsys, MODEL, *QUICK, "--cpu-offload-gb", gib) for gib in ("0", "10"))
    freed = here["bytes_per_gpu"]["weights"] - there["bytes_per_gpu"]["weights"]
    assert 10 * GIB <= freed < 10.5 * GIB
    room = [found["bytes_per_gpu"]["left_for_pages"] for found in (here, there)]
    assert 9 * GIB < room[1] - room[0] < freed
    predicted = there["predicted"]
    assert predicted["bound"] == "copies" and "copies" not in here["predicted"]["time_shares"]
    assert predicted["seconds"] >= 16 * freed / 55e9 > 2 * here["predicted"]["seconds"]
    assert "--cpu-offload-gb 10.0" in there["command"] and "offload" not in here["command"]


def test_a_model_that_does_not_fit(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, large_config: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(large_config))
    assert main(["plan", str(tmp_path), "--max-model-len", "2048"]) == 1
    text = capsys.readouterr().out
    assert "does not fit" in text and "GiB too much" in text
    assert "--quantization, --cpu-offload-gb" in text
    assert "smallest that fits: 2 x H200, -tp 2 -pp 1" in text
    assert f"jaxpaged serve {tmp_path} -tp 2" in text
    assert main(["plan", str(tmp_path), "--max-model-len", "2048", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["smallest"] == {"tp": 2, "pp": 1, "gpus": 2} and found["predicted"] is None
    assert found["bytes_per_gpu"]["left_for_pages"] < 0 and found["pool"] is None


def test_more_gpus_than_a_host_has_are_of_several_hosts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, large_config: dict[str, Any]
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(large_config))
    spread = "-tp 16 --num-hosts 2 --host-id 0 --distributed-coordinator HOST0:9100"
    text = text_of(capsys, str(file), *QUICK, "--gpus", "L40S:16", "--tp", "16")
    assert f"jaxpaged serve MODEL {spread} " in text
    assert "its own --host-id" in text and "collectives between hosts were not measured" in text
    file.write_text(json.dumps(large_config | {"num_hidden_layers": 250}))
    flags = ("--max-model-len", "2048", "--gpus", "L40S:8", "--tp", "8", "--dp", "1")
    assert main(["plan", str(file), *flags]) == 1
    text = capsys.readouterr().out
    assert "smallest that fits: 16 x L40S, -tp 16 -pp 1 --num-hosts 2" in text and spread in text


def test_as_many_replicas_as_share_a_host_of_what_fits(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, large_config: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(large_config))
    flags = ("--max-model-len", "2048", "--gpus", "L40S:8", "--dp", "8")
    assert main(["plan", str(tmp_path), *flags]) == 1
    assert f"jaxpaged serve {tmp_path} -tp 4 -dp 2 --max" in capsys.readouterr().out


def test_flags_have_the_names_of_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    gpus = (MODEL, *QUICK, "--gpus", "H200:8")
    long = "--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size"
    found = [
        figures(capsys, *gpus, *(word for name in names for word in (name, "2")))
        for names in (("--tp", "--pp", "--dp"), ("-tp", "-pp", "-dp"), long)
    ]
    assert found[0] == found[1] == found[2]
    assert (found[0]["tp"], found[0]["pp"], found[0]["dp"]) == (2, 2, 2)


def test_a_length_that_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", MODEL, "--gpus", "L40S", "--num-gpu-blocks-override", "100"]) == 1
    text = capsys.readouterr().out
    assert "does not fit" in text and "maximum model length is 1600" in text
    assert "tried" in text and "to run it" not in text
    pages = ("--num-gpu-blocks-override", "100")
    assert main(["plan", MODEL, "--gpus", "L40S:2", "--pp", "2", *pages]) == 1
    assert "overlap" not in capsys.readouterr().out  # of what can't be run nothing more is told


def test_the_command_has_what_was_planned_with(capsys: pytest.CaptureFixture[str]) -> None:
    settings = (
        *("--num-gpu-blocks-override", "3000", "--block-size", "32"),
        *("--long-prefill-token-threshold", "512", "--gpu-memory-utilization", "0.8"),
        *("--revision", "main", "--download-dir", "/tmp/hub"),
    )
    switches = ("--no-enable-prefix-caching", "--no-enable-chunked-prefill")
    command = figures(capsys, MODEL, *QUICK, *settings, *switches)["command"].split()
    pairs = set(zip(command, command[1:], strict=False))
    assert set(zip(settings[::2], settings[1::2], strict=True)) <= pairs
    assert set(switches) <= set(command)
    plain = figures(capsys, MODEL, *QUICK)["command"]
    assert "caching" not in plain and "chunked" not in plain and "blocks" not in plain


def test_a_card_that_was_not_measured(capsys: pytest.CaptureFixture[str]) -> None:
    text = text_of(capsys, MODEL, *QUICK, "--gpus", "A100-80")
    assert "not calibrated: A100-80 was not measured" in text and "those of H200" in text


def test_preemptions_lead_to_fewer_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    limits = ("--max-model-len", "640", "--num-gpu-blocks-override", "400")
    found = figures(capsys, MODEL, "--trace", "fixed:512,128", "--requests", "24", *limits)
    assert found["predicted"]["preemptions"] > 0
    assert "--max-num-seqs 10" in found["command"]  # 400 pages of 16 tokens for 640 each


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpus", "H300:8"], "no such card"),
        (["--gpus", "H200:8", "--tp", "16"], "needs 16 GPUs"),
        (["--gpus", "H200:64", "--tp", "16"], "-tp 16 does not divide this model's num_att"),
        (["--gpus", "H200:64", "--tp", "9"], "--num-hosts 2 as many GPUs of each: a multiple"),
        (["--gpus", "H200:16", "--tp", "4", "--pp", "4"], "--tp 16 alone runs on several, with"),
        (["--gpus", "H200:32", "--dp", "32"], "at most --dp 8 there; Ray Serve runs replicas"),
        (["--gpus", "H200:32", "--tp", "16", "--dp", "2"], "--num-hosts runs one engine"),
        (["--gpus", "H200:8", "--tp", "8"], "-tp 8 does not divide this model's num_attention_h"),
        (["--cpu-offload-gb", "20"], "--cpu-offload-gb 20 is more than all layers hold"),
        (["--cpu-offload-gb", "0.1"], "--cpu-offload-gb 0.1 would save nothing"),
        (["--trace", "fixed:512"], "--trace must be sharegpt or fixed:PROMPT,OUTPUT"),
        (["--trace", "fixed:2000,100", "--max-model-len", "2048"], "2100 tokens"),
        (["--max-model-len", "1m"], "max_position_embeddings"),
        (["--gpus", "A100-80", "-q", "fp8_per_channel"], "and this one has 8.0: ordinary weights"),
        (["--rate", "0"], "rate must be at least 0.000001"),
        (["--rate", "1e-320"], "rate must be at least 0.000001"),
        (["--seed", "-1"], "seed must be at least 0"),
        (["--requests", "0"], "requests must be at least 1"),
        (["--calibration", "/nowhere.json"], "/nowhere.json is missing"),
        (["--max-num-batched-tokens", "100"], "--max-num-batched-tokens 100"),
    ],
)
def test_one_line_says_what_to_change(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(["plan", MODEL, *arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and words in lines[0], lines


def test_models_that_are_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name, content in (("empty", "{}"), ("broken", "{")):
        (tmp_path / f"{name}.json").write_text(content)
        assert main(["plan", str(tmp_path / f"{name}.json")]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
    assert main(["plan", str(tmp_path)]) == 2
    assert "config.json is missing" in capsys.readouterr().err
