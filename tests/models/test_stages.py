from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_models import CONFIGS

from jaxpaged.models import load_spec
from jaxpaged.models.spec import ModelSpec
from jaxpaged.models.stages import stage_layers

MODELS = Path(__file__).parents[2] / "benchmarks" / "models"


def published(name: str) -> ModelSpec:
    return load_spec(json.loads((MODELS / f"{name}.json").read_text()))


@pytest.mark.parametrize(
    ("model", "num_stages", "counts"),
    [
        ("qwen2.5-32b", 2, [33, 31]),  # the head weighs as much as 1.6 layers
        ("qwen2.5-32b", 4, [16, 16, 17, 15]),
        ("llama-3.1-8b", 2, [17, 15]),
        ("llama-3.1-8b", 1, [32]),
    ],
)
def test_the_head_counts_as_layers(model: str, num_stages: int, counts: list[int]) -> None:
    assert list(map(len, stage_layers(published(model), num_stages))) == counts


def test_every_layer_is_in_one_stage_and_no_stage_is_empty() -> None:
    for num_layers in range(1, 9):
        spec = load_spec(CONFIGS["qwen2"] | {"num_hidden_layers": num_layers})
        for num_stages in range(1, num_layers + 1):
            stages = stage_layers(spec, num_stages)
            assert len(stages) == num_stages and all(stages)
            assert [layer for stage in stages for layer in stage] == list(range(num_layers))


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="-pp 3 is more than .* 2 layers"):
        stage_layers(load_spec(CONFIGS["qwen2"]), 3)
