from __future__ import annotations

import httpx
from fake_server import Server

import jaxpaged


def test_alive(server: Server):
    assert server.get("/health").status_code == 200
    assert server.get("/ping").status_code == 200
    assert httpx.post(f"{server.url}/ping").status_code == 200
    for path in ("/health", "/ping"):
        assert httpx.head(server.url + path).status_code == 200


def test_version(server: Server):
    assert server.get("/version").json() == {"version": jaxpaged.__version__}


def test_metrics_count_requests(server: Server):
    before = server.metric("request_success_total", finished_reason="length")
    tokens = server.metric("generation_tokens_total")
    server.post("/v1/completions", prompt="hello", max_tokens=4, ignore_eos=True)
    assert server.metric("request_success_total", finished_reason="length") == before + 1
    assert server.metric("generation_tokens_total") == tokens + 4
    answer = server.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    assert 'model_name="M"' in answer.text
    assert "vllm:" not in answer.text


def test_the_interface_is_documented(server: Server):
    assert server.get("/docs").status_code == 200
    paths = server.get("/openapi.json").json()["paths"]
    assert {"/v1/completions", "/v1/chat/completions", "/tokenize", "/metrics"} <= set(paths)
