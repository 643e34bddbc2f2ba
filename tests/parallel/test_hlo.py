"""A decoder split over two (fake) devices: the same tokens, and no more traffic than it must."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    # The number of fake devices is settled when JAX starts: a process of its own.
    run = subprocess.run(
        [sys.executable, "tests/fixtures/sharded_decoder.py"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout)


@pytest.mark.parametrize("step", ["mixed", "decode"])
def test_a_layer_holds_its_two_all_reduces(report: dict[str, Any], step: str) -> None:
    one, three = (Counter(found) for found in report[step])
    assert three - one == Counter({"all-reduce": 2 * 2})


@pytest.mark.parametrize("step", ["mixed", "decode"])
def test_nothing_is_gathered_or_permuted(report: dict[str, Any], step: str) -> None:
    assert set(report[step][1]) == {"all-reduce"}


def test_tokens_do_not_depend_on_the_mesh(report: dict[str, Any]) -> None:
    assert report["sharded"] == report["whole"]
