"""One model on two processes that take each other for hosts: the same tokens, and clear ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from engine_runs import NUM_NEW, sampled, small
from safetensors.numpy import load_file

from jaxpaged.engine.engine_core import EngineCore
from jaxpaged.parallel.meeting import free_port

ROOT = Path(__file__).parents[2]
MODEL = "llama-biases-linear"
REFERENCES = ROOT / "tests" / "fixtures" / "references.safetensors"
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/tests/fixtures"}


def start(*command: str, log: Path) -> subprocess.Popen[str]:
    with log.open("w") as sink:
        return subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, env=ENVIRONMENT, text=True,
            stdout=subprocess.PIPE, stderr=sink,
        )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.write_model(tmp_path_factory.mktemp("model"), tiny_models.CONFIGS[MODEL])


@pytest.fixture(scope="module")
def report(folder: Path) -> dict[str, Any]:
    port = str(free_port("127.0.0.1"))
    hosts = [
        start("tests/fixtures/host_engine.py", str(folder), "4", port, str(i), log=folder / str(i))
        for i in range(2)
    ]
    printed = [host.communicate()[0] for host in hosts]
    logs = [(folder / str(i)).read_text()[-2000:] for i in range(2)]
    assert [host.returncode for host in hosts] == [0, 0], logs
    return json.loads(printed[0].splitlines()[-1])


def test_greedy_tokens_do_not_depend_on_the_hosts(report: dict[str, Any]) -> None:
    first, _, third = (row[:NUM_NEW] for row in load_file(REFERENCES)[f"{MODEL}/tokens"].tolist())
    assert report["greedy"]["tokens"] == [first, third, first[:2]]
    assert report["greedy"]["hits"] > 0 and report["greedy"]["preemptions"] > 0


def test_drawn_tokens_do_not_either(report: dict[str, Any], folder: Path) -> None:
    one = sampled(EngineCore(small(folder, 1, 1, compile_cache_dir=None)))
    for kind, expected in one.items():
        found = report["sampled"][kind]
        assert found["tokens"] == expected["tokens"]
        assert found["likely"] == expected["likely"]
        assert found["logprobs"] == pytest.approx(expected["logprobs"], abs=1e-4)
