"""Requests of one client in a time, and at a time."""

from __future__ import annotations

import http.client
import json
from contextlib import closing

import httpx
import pytest
from fake_server import Server, eventually, running
from http_checks import check_error

from jaxpaged.server.client_limits import MovingWindow, client_of
from jaxpaged.server_config import ServerConfig

PATH = "/v1/completions"
BODY = {"prompt": [5, 6], "max_tokens": 1}


def post(server: Server, key: str | None = None, **body):
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx.post(server.url + PATH, json={**BODY, **body}, headers=headers, timeout=30)


def test_a_window_moves():
    window = MovingWindow(2, 10)
    for now in (0.0, 4.0):
        assert window.wait("a", now) == 0
        window.add("a", now)
    assert window.wait("a", 5.0) == 5
    assert window.wait("b", 5.0) == 0
    assert window.wait("a", 10.5) == 0
    window.add("a", 10.5)
    assert window.wait("a", 11.0) == 3


def test_a_window_forgets_clients():
    window = MovingWindow(2, 10)
    for client in range(100):
        window.add(client, client * 0.01)
    window.add(0, 5.0)
    assert len(window) == 100
    assert window.wait("new", 12.0) == 0
    assert len(window) == 1


def test_whose_request_it_is():
    def of(host: str):
        return client_of({"client": (host, 1)})

    assert of("10.0.0.1") != of("10.0.0.2")
    assert of("2001:db8::1") == of("2001:db8::ffff:2") != of("2001:db8:0:1::1")
    assert of("::ffff:10.0.0.1") != of("::ffff:10.0.0.2")
    assert client_of({"client": None}) == ""


@pytest.mark.parametrize("rate", ["", "100", "0/minute", "5/fortnight", "x/minute"])
def test_rates_that_mean_nothing(rate: str):
    with pytest.raises(ValueError, match="rate_limit must be"):
        ServerConfig(rate_limit=rate)
    with pytest.raises(ValueError, match="max_concurrent_requests must be"):
        ServerConfig(max_concurrent_requests=0)


def test_a_rate_for_each_key():
    flags = ("--skip-tokenizer-init", "--rate-limit", "50/second;3/hour", "--api-key", "a", "b")
    with running(*flags) as server:
        for _ in range(5):
            check_error(post(server, "wrong"), 401)
        assert [post(server, "a").status_code for _ in range(4)] == [200, 200, 200, 429]
        answer = post(server, "a", stream=True)
        assert check_error(answer, 429, "3/hour", "--rate-limit")["type"] == "RateLimitError"
        assert 3500 < int(answer.headers["retry-after"]) <= 3600
        assert post(server, "b").status_code == 200
        key = {"Authorization": "Bearer a"}
        for _ in range(5):
            for path in ("/health", "/ping", "/metrics", "/v1/models"):
                assert server.get(path, headers=key).status_code == 200


def test_requests_at_a_time():
    flags = ("--skip-tokenizer-init", "--max-concurrent-requests", "1")
    with running(*flags, core="--step-seconds 0.02") as server:
        host = server.url.removeprefix("http://")
        long = {**BODY, "max_tokens": 200, "ignore_eos": True, "stream": True}
        long["return_token_ids"] = True  # a token is an event, also without a text
        with closing(http.client.HTTPConnection(host)) as first:
            first.request("POST", PATH, json.dumps(long), {"Content-Type": "application/json"})
            begun = first.getresponse()
            assert begun.status == 200
            answer = post(server)
            check_error(answer, 429, "1 are allowed", "--max-concurrent-requests")
            assert answer.headers["retry-after"] == "1"
            assert server.get("/metrics").status_code == 200
        eventually(lambda: post(server).status_code == 200)
        check_error(post(server, n=0), 400)
        assert post(server).status_code == 200
