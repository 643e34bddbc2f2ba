"""Several engines behind a server, and several server processes before them."""

from __future__ import annotations

import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_server import Server, children, eventually, launch, running
from http_checks import check_error, strict_json

from jaxpaged.server_config import ServerConfig

PATH = "/v1/completions"
FAST = ("--skip-tokenizer-init",)
LONG = {"prompt": [5, 6], "max_tokens": 200, "ignore_eos": True, "return_token_ids": True}
COUNT = 24  # requests on connections of their own


def named(pid: int, name: str) -> list[int]:
    """Children that run a file or module of that name."""
    texts = {child: Path(f"/proc/{child}/cmdline").read_bytes() for child in children(pid)}
    return [child for child, text in texts.items() if name.encode() in text]


def events(server: Server, **body: Any) -> list[Any]:
    """What a stream brings, its end left out."""
    body = {**LONG, "stream": True, **body}
    with httpx.stream("POST", server.url + PATH, json=body, timeout=60) as answer:
        found = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert found.pop() == "[DONE]"
    return [strict_json(text) for text in found]


def runs(pid: int) -> bool:
    """Whether a process still does; one that nobody waited for is a zombie."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().split()[2] != "Z"


def left_over(pids: list[int]) -> list[int]:
    """Those that still run."""
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_one_engine_of_two_dies():
    flags = (*FAST, "-dp", "2", "--enable-admin")
    with running(*flags, core="--step-seconds 0.04") as server, ThreadPoolExecutor() as pool:
        assert (server.get("/health").status_code, server.get("/health").text) == (200, "")
        streams = [pool.submit(events, server, max_tokens=130) for _ in range(4)]
        eventually(lambda: server.metric("num_requests_running", engine="0") == 2)
        eventually(lambda: server.metric("num_requests_running", engine="1") == 2)
        state = server.get("/engine_state").json()
        assert (state["num_engines"], state["engine"], state["num_requests_running"]) == (2, 0, 4)

        first = named(server.process.pid, "fake_core")[0]
        os.kill(first, signal.SIGKILL)
        ends = [stream.result(20)[-1] for stream in streams]
        failed = [end["error"] for end in ends if "error" in end]
        assert [error["code"] for error in failed] == [503, 503] and "-9" in failed[0]["message"]
        assert [end["choices"][0]["finish_reason"] for end in ends if "choices" in end] == [
            "length", "length",
        ]  # fmt: skip
        health = server.get("/health")
        assert health.status_code == 200 and health.text.startswith("degraded: 1 of 2 engines")
        assert server.post(PATH, prompt=[5], max_tokens=2).status_code == 200
        assert server.metric("engine_up", engine="0") == 0
        dead = [one["dead"] for one in server.get("/server_info").json()["engines"]]
        assert "-9" in dead[0] and dead[1] is None
        assert server.post("/reset_prefix_cache").status_code == 200
        assert server.get("/engine_state").json()["engine"] == 1

        (last,) = (pid for pid in named(server.process.pid, "fake_core") if pid != first)
        os.kill(last, signal.SIGKILL)
        eventually(lambda: server.get("/health").status_code == 503)
        assert server.process.wait(10) == 1


def test_two_servers_share_two_engines():
    flags = (
        *FAST, "--api-server-count", "2", "-dp", "2", "--enable-log-requests",
        "--enable-admin", "--shutdown-timeout", "10",
    )  # fmt: skip
    with running(*flags, core="--step-seconds 0.03") as server:
        pid = server.process.pid
        pids = children(pid)
        assert (len(named(pid, "api_server")), len(named(pid, "fake_core"))) == (2, 2)
        for number in (0, 1):
            ready = re.compile(rf"\[server {number}\] .* Started server process")
            eventually(lambda ready=ready: any(map(ready.search, server.lines)), 20)
        with ThreadPoolExecutor(COUNT) as pool:
            bodies = [{"prompt": [5 + at, 6], "max_tokens": 20} for at in range(COUNT)]
            answers = list(pool.map(lambda body: events(server, **body), bodies))
        for body, answer in zip(bodies, answers, strict=True):
            assert len([end for end in answer if end["choices"][0]["finish_reason"]]) == 1
            assert len(answer) == 20, body
        logged = [line for line in server.lines if "jaxpaged.server.request_log: request" in line]
        assert len(logged) == COUNT
        assert {re.search(r"\[server (\d)\]", line)[1] for line in logged} == {"0", "1"}

        # Whichever answers tells the sum of both; a step was counted once.
        made = [server.metric("generation_tokens_total", engine=engine) for engine in "01"]
        assert sum(made) == 20 * COUNT and min(made) > 0
        steps = [server.metric("iteration_tokens_total_sum", engine=engine) for engine in "01"]
        assert sum(steps) == 20 * COUNT
        assert server.get("/metrics").text.count("jaxpaged:num_requests_running{") == 2
        assert server.get("/engine_state").json()["generation_tokens"] == 20 * COUNT
        assert server.post("/start_profile").status_code == 200
        check_error(server.post("/start_profile"), 400, "already")
        check_error(server.get("/v1/responses/x"), 400, "--api-server-count 1")

        with ThreadPoolExecutor() as pool:
            streams = [pool.submit(events, server, max_tokens=80) for _ in range(4)]
            eventually(lambda: server.get("/engine_state").json()["num_requests_running"] == 4)
            assert server.stop() == 0
            assert [stream.result(10)[-1]["choices"][0]["finish_reason"] for stream in streams] == [
                "length"
            ] * 4
        assert not any("Traceback" in line for line in server.lines), server.lines
        assert left_over(pids) == []


def test_the_death_of_one_server_ends_all():
    with running(*FAST, "--api-server-count", "2") as server:
        pids = children(server.process.pid)
        os.kill(named(server.process.pid, "api_server")[1], signal.SIGKILL)
        assert server.process.wait(15) == 1
        eventually(lambda: any("API server 1 ended" in line for line in server.lines))
        assert left_over(pids) == []


def test_the_death_of_the_first_process_ends_all_at_once():
    flags = (*FAST, "--api-server-count", "2", "--shutdown-timeout", "60")
    with running(*flags, core="--step-seconds 0.05") as server, ThreadPoolExecutor() as pool:
        pids = children(server.process.pid)
        stream = pool.submit(events, server)
        eventually(lambda: server.metric("num_requests_running") == 1)
        server.process.kill()
        assert stream.result(10)[-1]["error"]["code"] == 503
        eventually(lambda: not any(map(runs, pids)), 10)


def test_a_signal_before_the_servers_know_signals():
    process = launch(*FAST, "--port", "0", "--api-server-count", "2")
    eventually(lambda: named(process.pid, "api_server"), 20)
    process.terminate()
    _, log = process.communicate(timeout=20)
    assert (process.returncode, "Traceback" in log) == (0, False), log


def test_the_death_of_all_engines_ends_all_servers():
    with running(*FAST, "--api-server-count", "2") as server:
        (core,) = named(server.process.pid, "fake_core")
        os.kill(core, signal.SIGKILL)
        eventually(lambda: server.get("/health").status_code == 503)
        assert server.process.wait(15) == 1


def test_what_all_servers_fail_at_is_told_once():
    process = launch(
        *FAST, "--port", "0", "--api-server-count", "2", core="--refuse no-room-for-pages"
    )
    _, log = process.communicate(timeout=30)
    assert process.returncode == 1
    assert [line for line in log.splitlines() if "no-room" in line] == [
        "jaxpaged: no-room-for-pages"
    ]


def test_what_one_process_counts_needs_one_process():
    for limit in ({"rate_limit": "5/minute"}, {"max_concurrent_requests": 2}):
        assert ServerConfig(**limit)
        with pytest.raises(ValueError, match="needs api_server_count 1"):
            ServerConfig(api_server_count=2, **limit)
