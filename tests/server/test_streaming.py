"""Clients that come too many, come twice or leave early, against a slow engine."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_core import CRASH
from fake_server import Server, eventually, running
from http_checks import check_error, strict_json

PATH = "/v1/completions"


@contextmanager
def sent(server: Server, **body: Any) -> Iterator[None]:
    """A long request on its way; the client leaves at the end of the block."""
    body = {"prompt": [5, 6], "max_tokens": 200, "ignore_eos": True, **body}
    host = server.url.removeprefix("http://")
    with closing(http.client.HTTPConnection(host)) as connection:
        kind = {"Content-Type": "application/json"}
        connection.request("POST", PATH, json.dumps(body), kind)
        yield


def load(server: Server) -> tuple[float, float]:
    return server.metric("num_requests_running"), server.metric("num_requests_waiting")


@pytest.mark.parametrize("streamed", [False, True])
def test_clients_that_leave_while_running_and_while_queued(slow_server: Server, streamed: bool):
    aborts = slow_server.metric("request_success_total", finished_reason="abort")
    with sent(slow_server, stream=streamed):
        eventually(lambda: load(slow_server) == (1, 0))
        assert slow_server.metric("kv_cache_usage_perc") > 0
        with sent(slow_server, stream=streamed), sent(slow_server, stream=streamed, n=2):
            eventually(lambda: load(slow_server) == (1, 2))
        eventually(lambda: load(slow_server) == (1, 0), 6)
    eventually(lambda: load(slow_server) == (0, 0), 6)
    assert slow_server.metric("kv_cache_usage_perc") == 0
    eventually(
        lambda: slow_server.metric("request_success_total", finished_reason="abort") == aborts + 3
    )
    began = time.monotonic()
    assert slow_server.post(PATH, prompt=[5], max_tokens=2).status_code == 200
    assert time.monotonic() - began < 2
    assert not any("Traceback" in line for line in slow_server.lines), slow_server.lines


@pytest.mark.parametrize("streamed", [False, True])
def test_a_full_queue(slow_server: Server, streamed: bool):
    with ExitStack() as clients:
        clients.enter_context(sent(slow_server))
        eventually(lambda: load(slow_server) == (1, 0))
        for waiting in (1, 2):
            clients.enter_context(sent(slow_server))
            eventually(lambda waiting=waiting: load(slow_server) == (1, waiting))
        answer = slow_server.post(PATH, prompt=[5], stream=streamed)
        check_error(answer, 503, "queue is full")
        assert int(answer.headers["retry-after"]) >= 1
        batch = slow_server.post(PATH, prompt=[[5], [6]], stream=streamed)
        check_error(batch, 503, "queue is full")
        assert load(slow_server) == (1, 2)
    eventually(lambda: load(slow_server) == (0, 0))


def test_a_request_id_that_is_in_use(slow_server: Server):
    with sent(slow_server, request_id="twin", stream=True):
        eventually(lambda: load(slow_server) == (1, 0))
        body = {"prompt": [9], "max_tokens": 3, "return_token_ids": True, "ignore_eos": True}
        with ThreadPoolExecutor() as pool:
            second = pool.submit(slow_server.post, PATH, **body, request_id="twin")
            eventually(lambda: load(slow_server) == (1, 1))
    answer = second.result().json()
    assert answer["id"] == "cmpl-twin"
    assert answer["choices"][0]["token_ids"] == [9, 9, 9]
    eventually(lambda: load(slow_server) == (0, 0))


def test_events_come_as_tokens_do(slow_server: Server):
    body = {"prompt": [5, 6], "max_tokens": 10, "stream": True, "return_token_ids": True}
    with httpx.stream("POST", slow_server.url + PATH, json=body, timeout=60) as answer:
        arrivals = [time.monotonic() for line in answer.iter_lines() if line.startswith("data: {")]
    assert len(arrivals) == 10
    assert arrivals[-1] - arrivals[0] > 5 * 0.02


def test_the_engines_death_in_the_middle_of_streams(model_folder: Path):
    with running(str(model_folder), core="--step-seconds 0.02") as server:
        body = {"max_tokens": 200, "stream": True, "ignore_eos": True}
        said = [{"role": "user", "content": "x"}]
        bodies: dict[str, dict[str, Any]] = {
            PATH: {**body, "prompt": [5, 6]},
            "/v1/responses": {"input": "x", "stream": True, "ignore_eos": True},
            "/v1/messages": {**body, "messages": said},
        }

        def last_events(path: str) -> list[str]:
            with httpx.stream("POST", server.url + path, json=bodies[path], timeout=60) as answer:
                return [line for line in answer.iter_lines() if line][-2:]

        with ThreadPoolExecutor() as pool:
            streams = [pool.submit(last_events, path) for path in bodies]
            eventually(lambda: server.metric("num_requests_running") == 3)
            check_error(server.post(PATH, prompt=[CRASH]), 503, "boom")
            completion, response, message = [stream.result(10) for stream in streams]
        error = strict_json(completion[0].removeprefix("data: "))["error"]
        assert (error["code"], "boom" in error["message"]) == (503, True)
        assert completion[1] == "data: [DONE]"
        assert response[0] == "event: response.failed"
        failed = strict_json(response[1].removeprefix("data: "))["response"]
        assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
        assert "boom" in failed["error"]["message"]
        assert message[0] == "event: error"
        error = strict_json(message[1].removeprefix("data: "))["error"]
        assert (error["type"], "boom" in error["message"]) == ("overloaded_error", True)
        check_error(server.get("/health"), 503, "boom")
        check_error(server.post(PATH, prompt=[5]), 503, "boom")
        assert server.process.wait(10) == 1
        assert not any("Traceback" in line for line in server.lines), server.lines
