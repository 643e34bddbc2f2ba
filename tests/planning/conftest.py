from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from jaxpaged.config import EngineConfig
from jaxpaged.models import ModelSpec, load_spec
from jaxpaged.planning.cost_model import CostModel
from jaxpaged.planning.footprint import Layout
from jaxpaged.planning.hardware import GPUS, Calibration

MODELS = Path(__file__).parents[2] / "benchmarks" / "models"
# Twice the 8B model's width, four times its layers: 137 GB in bfloat16.
LARGE = {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64,
}  # fmt: skip


@pytest.fixture(scope="session")
def spec_7b() -> ModelSpec:
    return load_spec(json.loads((MODELS / "qwen2.5-7b.json").read_text()))


@pytest.fixture(scope="session")
def large_config() -> dict[str, Any]:
    return json.loads((MODELS / "llama-3.1-8b.json").read_text()) | LARGE


@pytest.fixture(scope="session")
def layouts(spec_7b: ModelSpec) -> dict[tuple[int, int], Layout]:
    """The 7B model by (tp, pp)."""
    each = {tp: Layout.of(spec_7b, EngineConfig(), tp, 1) for tp in (1, 2, 4)}
    return {
        (tp, pp): dataclasses.replace(layout, pp=pp)
        for tp, layout in each.items()
        for pp in (1, 2, 4)
    }


@pytest.fixture(scope="session")
def h200() -> Calibration:
    return Calibration.of(GPUS["H200"])


@pytest.fixture(scope="session")
def cost(layouts: dict[tuple[int, int], Layout], h200: Calibration) -> CostModel:
    """Of the 7B model on one H200."""
    return CostModel(GPUS["H200"], h200, layouts[1, 1], 2)
