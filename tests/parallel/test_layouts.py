"""Every family in every layout; test_engines and test_pipeline look closer at some."""

from __future__ import annotations

from typing import Any

import pytest
from own_process import report_of

FAMILIES = ("llama3", "mistral-window", "qwen2", "qwen3", "gemma3-old")


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return report_of("layout_engines.py")


@pytest.mark.parametrize("layout", ["tp 2", "tp 4", "pp 2", "pp 4", "tp 2, pp 2"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_one_device(
    report: dict[str, Any], family: str, layout: str
) -> None:
    found = report[family][layout]
    assert found["tokens"] == report[family]["expected"]
    assert found["hits"] > 0
    assert found["preemptions"] > 0 or "window" in family  # which gives pages back as it goes
