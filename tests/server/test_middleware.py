"""Keys, body sizes, request ids and origins, on one server with all of them."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from fake_server import Server, eventually, running
from http_checks import check_error

from jaxpaged.server.middleware import MAX_COLONS, MAX_COMMAS

ORIGIN = "https://page.example"
KEY = {"Authorization": "Bearer second"}


@pytest.fixture(scope="module")
def guarded() -> Iterator[Server]:
    flags = ["--skip-tokenizer-init", "--api-key", "first", "second", "première à"]
    flags += ["--max-request-bytes", "1000", "--enable-request-id-headers", "--enable-log-requests"]
    flags += ["--allowed-origins", ORIGIN, "--metrics-prefix", "vllm", "--root-path", "/llm"]
    with running(*flags) as server:
        server.url = server.url.removesuffix("/llm")
        yield server


@pytest.mark.parametrize("path", ["/health", "/ping"])
def test_liveness_needs_no_key(guarded: Server, path: str):
    assert guarded.get(path).status_code == 200


@pytest.mark.parametrize(
    "path", ["/v1/models", "/metrics", "/version", "/docs", "/openapi.json", "/tokenize", "/nope"]
)
@pytest.mark.parametrize(
    "header", [None, "Bearer wrong", "Bearer", "second", "Basic second", "Bearer první"]
)
def test_everything_else_does(guarded: Server, path: str, header: str | None):
    headers = {} if header is None else {"Authorization": header.encode()}
    answer = guarded.get(path, headers=headers)
    check_error(answer, 401, "API key")
    assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    "header", ["Bearer first", "Bearer second", "bearer second", "Bearer première à"]
)
def test_each_key_opens(guarded: Server, header: str):
    assert guarded.get("/v1/models", headers={"Authorization": header.encode()}).status_code == 200


@pytest.mark.parametrize("path", ["/v1/models", "/metrics"])
def test_a_key_as_anthropic_sends_it(guarded: Server, path: str):
    assert guarded.get(path, headers={"X-Api-Key": "second"}).status_code == 200
    both = {"X-Api-Key": "second", "Authorization": "Bearer wrong"}
    for headers in ({"X-Api-Key": "wrong"}, both):
        check_error(guarded.get(path, headers=headers), 401)


def test_errors_of_anthropics_routes(guarded: Server):
    refused = httpx.post(guarded.url + "/v1/messages", json={})
    assert refused.status_code == 401
    assert refused.json()["error"]["type"] == "authentication_error"
    large = httpx.post(guarded.url + "/v1/messages", content=b"x" * 1001, headers=KEY)
    assert large.status_code == 413
    assert large.json()["error"]["type"] == "request_too_large"


def test_the_environment_may_hold_the_key():
    with running("--skip-tokenizer-init", env={"JAXPAGED_API_KEY": "hidden"}) as server:
        check_error(server.get("/v1/models"), 401)
        opened = server.get("/v1/models", headers={"Authorization": "Bearer hidden"})
        assert opened.status_code == 200


def test_a_body_that_says_it_is_too_long(guarded: Server):
    answer = httpx.post(guarded.url + "/v1/completions", content=b"x" * 1001, headers=KEY)
    check_error(answer, 413, "1000 bytes")


def test_a_body_that_does_not_say_it_is_too_long(guarded: Server):
    pieces = (b" " * 100 for _ in range(20))
    headers = {**KEY, "Content-Type": "application/json"}
    answer = httpx.post(guarded.url + "/v1/completions", content=pieces, headers=headers)
    check_error(answer, 413, "1000 bytes")


def test_a_body_of_too_many_values(server: Server):
    values, objects = [5] * (MAX_COMMAS + 2), [{"a": 1}] * MAX_COLONS
    for body in ({"prompt": values}, {"prompt": "x", "ignored": objects}):
        answer = server.post("/v1/completions", **body)
        check_error(answer, 413, f"{MAX_COMMAS} commas", f"{MAX_COLONS} colons")


def test_request_ids_come_back(guarded: Server):
    given = guarded.get("/health", headers={"X-Request-Id": "mine"})
    assert given.headers["x-request-id"] == "mine"
    assert len(guarded.get("/health").headers["x-request-id"]) == 32
    body = {"prompt": [5], "max_tokens": 1}
    headers = {**KEY, "X-Request-Id": "mine"}
    answer = httpx.post(guarded.url + "/v1/completions", json=body, headers=headers)
    assert answer.json()["id"] == "cmpl-mine"
    for long in ("x" * 257, "two words"):
        headers = {**KEY, "X-Request-Id": long}
        answer = httpx.post(guarded.url + "/v1/completions", json=body, headers=headers)
        assert len(answer.json()["id"]) == len("cmpl-") + 32
        assert len(answer.headers["x-request-id"]) == 32
    eventually(lambda: any('"request_id":"cmpl-mine"' in line for line in guarded.lines))


def test_origins(guarded: Server):
    preflight = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}
    allowed = httpx.options(guarded.url + "/v1/completions", headers=preflight)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == ORIGIN
    other = guarded.get("/health", headers={"Origin": "https://other.example"})
    assert "access-control-allow-origin" not in other.headers


def test_metrics_under_another_prefix(guarded: Server):
    text = guarded.get("/metrics", headers=KEY).text
    assert "vllm:num_requests_running{" in text
    assert "jaxpaged:" not in text


def test_a_path_in_front(guarded: Server):
    page = guarded.get("/docs", headers=KEY).text
    assert "/llm/openapi.json" in page


def test_no_origins_unless_asked_for(server: Server):
    answer = server.get("/health", headers={"Origin": ORIGIN})
    assert "access-control-allow-origin" not in answer.headers
    assert "x-request-id" not in answer.headers
