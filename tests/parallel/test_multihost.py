"""One model on two processes that take each other for hosts: the same tokens, and clear ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import tiny_models
from engine_runs import ALL_AT_ONCE, NUM_NEW, sampled, small
from own_process import ROOT, environment
from ports import free_port
from safetensors.numpy import load_file

from jaxpaged.engine.engine_core import EngineCore

MODEL = "llama-biases-linear"
REFERENCES = ROOT / "tests" / "fixtures" / "references.safetensors"
SERVE = [
    *("-m", "jaxpaged", "serve", "--skip-tokenizer-init", "--port", "0", "--num-hosts", "2"),
    # As in `engine_runs.small`, for what it compiled.
    *("-tp", "4", "--enforce-eager", "--max-num-seqs", "2", "--max-num-batched-tokens", "16"),
    *("--max-logprobs", "4", "--max-model-len", "64", "--num-gpu-blocks-override", "5"),
]


def start(log: Path, devices: int, *command: str) -> subprocess.Popen[str]:
    """A host with so many fake devices."""
    path = f"{ROOT}:{ROOT}/tests/fixtures"
    with log.open("w") as sink:
        return subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=sink,
            env=environment(PYTHONPATH=path, JAX_NUM_CPU_DEVICES=str(devices)),
        )  # fmt: skip


def start_both(folder: Path, devices: int, *more: str) -> list[subprocess.Popen[str]]:
    """The hosts of `host_engine.py`."""
    port = str(free_port())
    script = ("tests/fixtures/host_engine.py", str(folder), str(devices), port)
    return [start(folder / f"{i}.log", devices // 2, *script, str(i), *more) for i in range(2)]


def printed(process: subprocess.Popen[str], pattern: str) -> str:
    """The next text that the host prints and that looks so; Gloo prints lines of its own."""
    assert process.stdout is not None
    for line in process.stdout:
        if (found := re.search(pattern, line)) is not None:
            return found[0]
    raise AssertionError(f"exit status {process.wait()}")


def children(pid: int) -> list[int]:
    return [int(x) for x in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_until(reached: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.write_model(tmp_path_factory.mktemp("model"), tiny_models.CONFIGS[MODEL])


@pytest.fixture(scope="module")
def report(folder: Path) -> dict[str, Any]:
    hosts = start_both(folder, 4)
    outputs = [host.communicate()[0] for host in hosts]
    logs = [(folder / f"{i}.log").read_text()[-2000:] for i in range(2)]
    assert [host.returncode for host in hosts] == [0, 0], logs
    return json.loads(outputs[0].splitlines()[-1])


def test_greedy_tokens_do_not_depend_on_the_hosts(report: dict[str, Any]) -> None:
    first, _, third = (row[:NUM_NEW] for row in load_file(REFERENCES)[f"{MODEL}/tokens"].tolist())
    assert report["greedy"]["tokens"] == [first, third, first[:2]]
    assert report["greedy"]["hits"] > 0 and report["greedy"]["preemptions"] > 0


def test_drawn_tokens_do_not_either(report: dict[str, Any], folder: Path) -> None:
    core = EngineCore(small(folder, 1, 1, compile_cache_dir=None))
    one = sampled(core, ALL_AT_ONCE)
    for kind, expected in one.items():
        found = report["sampled"][kind]
        assert found["tokens"] == expected["tokens"]
        assert found["likely"] == expected["likely"]
        # Rounded to three digits where they were taken.
        assert found["logprobs"] == pytest.approx(expected["logprobs"], abs=1.1e-3)


def test_stored_executables_are_used_and_a_dead_leader_takes_its_followers_along(
    report: dict[str, Any], folder: Path
) -> None:
    leader, follower = start_both(folder, 4, "forever")
    try:
        assert printed(leader, r"compiled \d+") == "compiled 0"
        (child,) = children(follower.pid)
        leader.kill()
        assert follower.wait(timeout=20) == 1
    finally:
        leader.kill()
        follower.kill()
    assert "host 0, the leader, is gone" in (folder / "1.log").read_text().splitlines()[-1]
    assert not Path(f"/proc/{child}").exists()


def test_a_follower_without_a_cache_that_dies_ends_the_server_and_its_requests(
    folder: Path,
) -> None:
    coordinator = ("--distributed-coordinator", f"127.0.0.1:{free_port()}")
    command = [*SERVE, "--model", str(folder), *coordinator, "--host-id"]
    own = [
        ("0", "--compile-cache-dir", str(folder / "cache")),
        ("1", "--compile-cache-dir", "none"),
    ]
    leader, follower = (start(folder / f"{each[0]}.log", 2, *command, *each) for each in own)
    try:
        url = printed(leader, r"http://[^\s:]+:\d+") + "/v1/completions"
        body = {"model": str(folder), "prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0}
        assert httpx.post(url, json=body, timeout=60).json()["usage"]["completion_tokens"] == 8
        (child,) = children(follower.pid)
        os.kill(child, signal.SIGSTOP)  # its part of the next step never comes
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(httpx.post, url, json=body, timeout=60)
            time.sleep(0.5)
            assert not waiting.done()
            os.kill(child, signal.SIGKILL)
            answer = waiting.result()
        assert answer.status_code == 503
        assert "host 1 is gone" in answer.json()["error"]["message"]
        assert leader.wait(timeout=20) == 1 and follower.wait(timeout=20) == 1
    finally:
        leader.kill()
        follower.kill()
    log = (folder / "0.log").read_text()
    assert "another host has no compilation cache" in log and "host 1 is gone" in log
    assert "host 1 was ended by SIGKILL" in (folder / "1.log").read_text().splitlines()[-1]


def test_a_follower_whose_parent_is_gone_waits_no_longer(folder: Path) -> None:
    coordinator = ("--distributed-coordinator", f"127.0.0.1:{free_port()}")
    log = folder / "orphan.log"
    parent = start(log, 2, *SERVE, "--model", str(folder), *coordinator, "--host-id", "1")
    wait_until(lambda: bool(children(parent.pid)))
    time.sleep(0.5)  # it gets its settings, and imports JAX
    parent.kill()
    parent.wait()
    wait_until(lambda: "the process that started this one is gone" in log.read_text())
