"""Engines whose layers are dealt out to stages on (fake) devices: the same tokens as one device."""

from __future__ import annotations

from typing import Any

import pytest
from own_process import report_of

MODELS = (
    "llama 2, tied",
    "mistral 2, window",
    "qwen2 4, tied, uneven",
    "qwen3 2 x 2",
    "gemma3 2, windows, uneven",
)


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return report_of("pipeline_engines.py")


@pytest.mark.parametrize("model", MODELS)
def test_greedy_tokens_do_not_depend_on_the_stages(report: dict[str, Any], model: str) -> None:
    found = report["greedy"][model]
    assert found["tokens"] == report["expected"][model]
    assert found["hits"] > 0
    assert found["preemptions"] > 0 or "mistral" in model  # a window alone gives its pages back


def test_as_many_steps_overlap_as_there_are_stages(report: dict[str, Any]) -> None:
    assert report["greedy"]["qwen2 4, tied, uneven"]["in flight"] == 4
    assert report["greedy"]["qwen3 2 x 2"]["in flight"] == 2


def test_drawn_tokens_log_probabilities_and_embeddings_do_not_either(
    report: dict[str, Any],
) -> None:
    one = report["sampled"]["one"]
    assert len(one["tokens"]) == 7 and len(one["embedding"]) == 48 and one["logprobs"]
    assert one["tokens"]["a pair is banned"] != one["tokens"]["greedy"]
    for kind in ("many", "many, stored executables"):
        many = report["sampled"][kind]
        assert many["tokens"] == one["tokens"]
        assert many["embedding"] == pytest.approx(one["embedding"], abs=1e-5)
        # Rounded to three digits where they were taken.
        assert many["logprobs"] == pytest.approx(one["logprobs"], abs=1.1e-3)
    assert report["compiled again"] == 0


def test_a_stage_holds_its_layers_alone(report: dict[str, Any]) -> None:
    first, *middle, last = report["greedy"]["qwen2 4, tied, uneven"]["held"]
    assert [s["devices"] for s in (first, *middle, last)] == [[0], [1], [2], [3]]
    assert first["leaves"] == ["embed", "layers_0", "state"]
    assert [s["leaves"] for s in middle] == [
        ["layers_1", "state"],
        ["layers_2", "layers_3", "state"],
    ]
    assert last["leaves"] == ["embed", "final_norm", "layers_4", "state"]
    assert [s["arrays"] for s in (first, *middle, last)] == [1, 1, 2, 1]
    two = report["greedy"]["qwen3 2 x 2"]["held"]
    assert [s["devices"] for s in two] == [[0, 1], [2, 3]]
    assert two[1]["leaves"] == ["final_norm", "layers_1", "lm_head", "state"]


def test_weights_of_every_origin_are_those_of_the_whole_model(report: dict[str, Any]) -> None:
    assert report["weights"] == {"safetensors": True, "orbax": True, "dummy": True}
