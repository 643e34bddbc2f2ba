from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from fake_server import Server
from http_checks import check_error

from jaxpaged.server.errors import MAX_MESSAGE, anthropic_error_body, error_body
from jaxpaged.server.many import MAX_MESSAGES, MAX_TOOLS

JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    ("method", "path", "code", "words"),
    [
        ("GET", "/nope", 404, ["/nope"]),
        ("POST", "/v1/nope", 404, ["/v1/nope"]),
        ("GET", "/v1/completions", 405, ["GET"]),
        ("DELETE", "/v1/models", 405, ["DELETE"]),
    ],
)
def test_routes(server: Server, method: str, path: str, code: int, words: list[str]):
    answer = httpx.request(method, server.url + path)
    check_error(answer, code, *words)
    assert ("allow" in answer.headers) == (code == 405)


@pytest.mark.parametrize(
    ("content", "headers", "words"),
    [
        (b"{", JSON, ["no valid JSON"]),
        (b"", JSON, ["body"]),
        (b"[]", JSON, ["JSON object"]),
        (b"\xff\xfe", JSON, []),
        (b'{"prompt": "x"}', {}, ["Content-Type"]),
        (b'{"prompt": "\\ud800"}', JSON, ["surrogate"]),
        (b'{"prompt": "x", "stop": "\\ud800"}', JSON, ["surrogate"]),
        (b'{"prompt": "x", "cache_salt": "\\ud800"}', JSON, ["cache_salt"]),
        (b'{"prompt": "x", "request_id": "\\ud800"}', JSON, ["request_id"]),
    ],
)
def test_bodies(server: Server, content: bytes, headers: dict, words: list[str]):
    answer = httpx.post(server.url + "/v1/completions", content=content, headers=headers)
    check_error(answer, 400, *words)
    assert not any("Traceback" in line for line in server.lines), server.lines


def test_a_name_that_is_no_text(server: Server):
    content = b'{"prompt": "x", "model": "\\ud800"}'
    check_error(httpx.post(server.url + "/v1/completions", content=content, headers=JSON), 404)


def test_an_error_that_quotes_half_a_surrogate_pair():
    assert (
        json.loads(error_body(400, "no role '\ud800'"))["error"]["message"] == r"no role '\ud800'"
    )


def test_the_first_field_at_fault_is_named(server: Server):
    body = {"prompt": "x", "stop": {"a": 1}, "logit_bias": {"5": "x"}}
    error = check_error(server.post("/v1/completions", **body), 400, "stop:", "logit_bias:")
    assert error["param"] == "stop"


def test_an_error_tells_of_a_few_places(server: Server):
    messages = [{"role": 1}] * 1000
    error = check_error(server.post("/v1/chat/completions", messages=messages), 400, "messages.0")
    assert "messages.1" not in error["message"]
    assert error["param"] == "messages"
    bias = {str(token_id): "x" for token_id in range(1000)}
    error = check_error(server.post("/v1/completions", prompt="x", logit_bias=bias), 400)
    assert len(error["message"]) < MAX_MESSAGE
    assert error["param"] == "logit_bias"


HELLO = {"role": "user", "content": "hello"}


@pytest.mark.parametrize(
    ("path", "field", "item", "count"),
    [
        ("/v1/chat/completions", "messages", HELLO, MAX_MESSAGES),
        ("/v1/messages", "messages", HELLO, MAX_MESSAGES),
        ("/v1/responses", "input", HELLO, MAX_MESSAGES),
        (
            "/v1/chat/completions",
            "tools",
            {"type": "function", "function": {"name": "f"}},
            MAX_TOOLS,
        ),
        ("/v1/messages", "tools", {"name": "f"}, MAX_TOOLS),
        ("/v1/responses", "tools", {"type": "function", "name": "f"}, MAX_TOOLS),
    ],
)
def test_too_many(server: Server, path: str, field: str, item: dict, count: int):
    others = {"messages": [HELLO], "input": "x", "max_tokens": 1}
    answer = server.post(path, **{**others, field: [item] * (count + 1)})
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert field in message and str(count) in message


def test_an_error_is_no_echo():
    for body in (error_body(400, "x" * 10**6), anthropic_error_body(400, "x" * 10**6)):
        assert len(json.loads(body)["error"]["message"]) == MAX_MESSAGE + len("...")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("/v1/chat/completions", {"max_completion_tokens": 0}, "max_completion_tokens"),
        ("/v1/chat/completions", {"max_tokens": 0}, "max_tokens"),
        ("/v1/responses", {"include": ["message.output_text.logprobs"], "top_logprobs": 21},
         "top_logprobs"),
        ("/v1/messages", {"max_tokens": 1, "stop_sequences": [""]}, "stop_sequences"),
    ],
)  # fmt: skip
def test_complaints_call_a_field_what_the_request_does(
    server: Server, path: str, body: Any, param: str
):
    asked = {"input": "x"} if path == "/v1/responses" else {"messages": [HELLO]}
    answer = server.post(path, **asked, **body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["message"].startswith(f"{param} ")
    assert error.get("param", param) == param


def test_a_chat_that_is_too_long_is_no_prompt(server: Server):
    long = {**HELLO, "content": "x" * 9999}
    answer = server.post("/v1/chat/completions", messages=[long])
    check_error(answer, 400, "maximum context length", param="messages")
    check_error(server.post("/v1/responses", input="x" * 9999), 400, param="input")
