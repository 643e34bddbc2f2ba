"""Engines that share a model between (fake) devices: the same tokens, no traffic without need."""

from __future__ import annotations

from typing import Any

import pytest
from own_process import report_of

MODELS = (
    "llama 2",
    "mistral 2, copied heads, window",
    "qwen2 3, uneven KV heads",
    "qwen3 2",
    "gemma3 2, windows",
    "gemma3 4, copied heads, windows",
)
TOP = 4  # most log-probabilities that a request may ask for


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return report_of("sharded_engines.py")


@pytest.mark.parametrize("model", MODELS)
def test_greedy_tokens_do_not_depend_on_the_mesh(report: dict[str, Any], model: str) -> None:
    found = report["greedy"][model]
    assert found["tokens"] == report["expected"][model]
    assert found["hits"] > 0
    assert len(found["host_layers"]) == (3 if model == "gemma3 2, windows" else 0)
    assert found["preemptions"] > 0 or "mistral" in model  # a window alone gives its pages back


@pytest.mark.parametrize("devices", ["many", "many, stored executables"])
def test_drawn_tokens_and_log_probabilities_do_not_either(
    report: dict[str, Any], devices: str
) -> None:
    for kind, one in report["sampled"]["one"].items():
        many = report["sampled"][devices][kind]
        assert many["tokens"] == one["tokens"]
        assert many["likely"] == one["likely"]
        # Rounded to three digits where they were taken.
        assert many["logprobs"] == pytest.approx(one["logprobs"], abs=1.1e-3)


def test_executables_of_a_mesh_are_stored(report: dict[str, Any]) -> None:
    assert report["compiled_again"] == 0


@pytest.mark.parametrize("model", MODELS)
def test_a_layer_has_two_all_reduces_and_nothing_else(report: dict[str, Any], model: str) -> None:
    found = report["greedy"][model]
    steps = [each for each in found["executables"] if each["kind"] == "forward"]
    assert len(steps) >= 2  # chunks of prompts, and decodes
    for step in steps:
        embedding = 1
        kinds = [kind for kind, _ in step["collectives"]]
        assert kinds == ["all-reduce"] * (embedding + 2 * found["layers"])


def test_pages_are_written_in_place(report: dict[str, Any]) -> None:
    for model in report["greedy"].values():
        for step in model["executables"]:
            if step["kind"] == "forward":
                assert step["page_copies"] == 0
                assert step["aliased"] >= step["page_bytes"]


def test_sampling_exchanges_candidates_and_sums_but_no_logits(report: dict[str, Any]) -> None:
    ran = {each["kind"]: each for each in report["executables"]}
    assert {"greedy", "plain", "filtered", "logprobs", "full"} <= ran.keys()
    for kind in ("greedy", "plain", "filtered", "logprobs", "full"):
        for name, elements in ran[kind]["collectives"]:
            assert name in ("all-reduce", "all-gather")
            # Each of two devices sends values and ids of its best. A pass that looks for a
            # threshold sums what is above each of 15.
            sums = 1 if kind in ("greedy", "plain") else 15
            most = {"all-reduce": sums, "all-gather": 2 * 2 * (1 if kind == "greedy" else TOP)}
            assert elements <= most[name] * ran[kind]["rows"]
    assert [name for name, _ in ran["greedy"]["collectives"]] == ["all-gather"]


def test_weights_of_every_origin_go_to_their_parts(report: dict[str, Any]) -> None:
    assert len(report["weights"]) == 6 and all(report["weights"].values())


def test_quantized_weights_and_pages_are_split_too(report: dict[str, Any]) -> None:
    found = report["quantized"]
    assert found["two"] == found["staged"] == found["one"]
    steps = [each for each in found["executables"] if each["kind"] == "forward"]
    for step in steps:
        kinds = [kind for kind, _ in step["collectives"]]
        assert kinds == ["all-reduce"] * (1 + 2 * found["layers"])
