from __future__ import annotations

from typing import Any

import anthropic
import httpx
import pytest
from fake_core import MAX_MODEL_LEN
from fake_server import Server
from http_checks import strict_json

PATH = "/v1/messages"
ORDER = [
    "message_start",
    "ping",
    "content_block_start",
    "content_block_delta",
    "content_block_stop",
    "message_delta",
    "message_stop",
]
HELLO = [{"role": "user", "content": "hello world"}]


@pytest.fixture(scope="module")
def claude(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def message(server: Server, **body: Any) -> dict[str, Any]:
    answer = server.post(PATH, **{"messages": HELLO, "max_tokens": 50, **body})
    assert answer.status_code == 200, answer.text
    return strict_json(answer.text)


def check_anthropic_error(answer: httpx.Response, code: int, kind: str, *words: str) -> None:
    assert answer.status_code == code, answer.text
    body = strict_json(answer.text)
    assert set(body) == {"type", "error"} and body["type"] == "error"
    assert set(body["error"]) == {"type", "message"}
    assert body["error"]["type"] == kind
    for word in words:
        assert word in body["error"]["message"]


def test_the_official_client(claude: anthropic.Anthropic):
    answer = claude.messages.create(model="M", max_tokens=50, messages=HELLO)
    assert answer.id.startswith("msg_")
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "M")
    assert [(block.type, block.text) for block in answer.content] == [("text", "hello world")]
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    counted = claude.messages.count_tokens(model="M", messages=HELLO).input_tokens
    usage = answer.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == counted
    assert usage.cache_read_input_tokens == counted // 2
    assert usage.output_tokens > 0


def test_the_official_client_streams(claude: anthropic.Anthropic, server: Server):
    with claude.messages.stream(model="M", max_tokens=50, messages=HELLO) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert len(pieces) > 1 and "".join(pieces) == "hello world"
    assert final.stop_reason == "end_turn"
    whole = message(server)
    assert final.usage.output_tokens == whole["usage"]["output_tokens"]
    assert final.usage.input_tokens == whole["usage"]["input_tokens"]


def test_the_official_clients_errors(claude: anthropic.Anthropic):
    with pytest.raises(anthropic.NotFoundError, match="nope"):
        claude.messages.create(model="nope", max_tokens=5, messages=HELLO)
    with pytest.raises(anthropic.BadRequestError, match="maximum context length"):
        claude.messages.create(model="M", max_tokens=MAX_MODEL_LEN, messages=HELLO)


def test_events(server: Server):
    body = {"messages": HELLO, "max_tokens": 4, "stream": True}
    answer = httpx.post(server.url + PATH, json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    blocks = [block.split("\n") for block in answer.text.strip().split("\n\n")]
    events = [strict_json(data.removeprefix("data: ")) for _, data in blocks]
    names = [name.removeprefix("event: ") for name, _ in blocks]
    assert names == [event["type"] for event in events]
    assert list(dict.fromkeys(names)) == ORDER
    start = events[0]["message"]
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 4


@pytest.mark.parametrize("streamed", [False, True])
def test_stop_sequences(claude: anthropic.Anthropic, streamed: bool):
    asked: dict[str, Any] = {
        "model": "M", "max_tokens": 50, "stop_sequences": ["zzz", "brown"],
        "messages": [{"role": "user", "content": "the quick brown fox"}],
    }  # fmt: skip
    if streamed:
        with claude.messages.stream(**asked) as stream:
            answer = stream.get_final_message()
    else:
        answer = claude.messages.create(**asked)
    assert answer.content[0].text == "the quick "
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "brown")


def counted(server: Server, **body: Any) -> int:
    answer = server.post(f"{PATH}/count_tokens", **body)
    assert answer.status_code == 200, answer.text
    return answer.json()["input_tokens"]


def test_turns_become_a_chat(server: Server):
    def block(text: str) -> dict[str, Any]:
        return {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}

    turns = [
        {"role": "user", "content": [block("a"), block("b")]},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, block("d")]},
        {"role": "user", "content": "e"},
    ]
    chat = [
        {"role": "system", "content": "be\nkind"},
        {"role": "user", "content": "a\nb\n\nc"},
        {"role": "assistant", "content": "d"},
        {"role": "user", "content": "e"},
    ]
    system = [block("be"), block("kind")]
    tokens = server.post("/tokenize", messages=chat).json()["count"]
    assert counted(server, messages=turns, system=system) == tokens
    assert counted(server, messages=turns, system="be\nkind") == tokens
    usage = message(server, messages=turns, system=system)["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == tokens


def test_an_answer_begun(server: Server):
    turns = [*HELLO, {"role": "assistant", "content": "I am"}]
    chat = {"messages": turns, "continue_final_message": True}
    assert counted(server, messages=turns) == server.post("/tokenize", **chat).json()["count"]
    assert message(server, messages=turns)["content"][0]["text"] == "hello world"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"max_tokens": None}, ["max_tokens"]),
        ({"max_tokens": 0}, ["max_tokens"]),
        ({"messages": []}, ["messages"]),
        ({"messages": [{"role": "system", "content": "x"}]}, ["role"]),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, ["image"]),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, ["tool_use"]),
        ({"system": [{"type": "image"}]}, ["image"]),
        ({"tools": [{"name": "f", "input_schema": {}}]}, ["tools"]),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, ["--reasoning-parser"]),
        ({"tools": [{"name": "f", "type": "bash_20250124"}]}, ["bash_20250124"]),
        ({"tool_choice": {"type": "tool", "name": "f"}}, ["tools"]),
        ({"stop_sequences": [""]}, ["stop"]),
        ({"temperature": -1}, ["temperature"]),
        ({"top_k": "many"}, ["top_k"]),
        ({"n": 2}, ["n must be 1"]),
    ],
)
def test_bad_requests(server: Server, body: dict[str, Any], words: list[str]):
    for streamed in (False, True):
        asked = {"messages": HELLO, "max_tokens": 5, **body, "stream": streamed}
        answer = server.post(PATH, **asked)
        check_anthropic_error(answer, 400, "invalid_request_error", *words)


@pytest.mark.parametrize(
    "body",
    [
        {"top_k": 5, "top_p": 0.9, "temperature": 0.3, "metadata": {"user_id": "u"}},
        {"tools": [], "thinking": {"type": "disabled"}, "service_tier": "auto"},
        {"tools": [{"name": "f"}], "tool_choice": {"type": "none"}, "stop_sequences": None},
    ],
)
def test_fields_that_are_taken(server: Server, body: dict[str, Any]):
    assert message(server, **body)["content"][0]["text"] == "hello world"


def test_other_errors_have_the_same_form(server: Server):
    check_anthropic_error(server.post(PATH, model="nope", messages=HELLO, max_tokens=5), 404,
                          "not_found_error", "nope")  # fmt: skip
    check_anthropic_error(server.get(PATH), 405, "invalid_request_error", "GET")
    bad = httpx.post(server.url + PATH, content="{", headers={"Content-Type": "application/json"})
    check_anthropic_error(bad, 400, "invalid_request_error", "JSON")
