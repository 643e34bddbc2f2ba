from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from fake_server import Server
from http_checks import check_error, strict_json

PATH = "/v1/responses"
ORDER = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


def respond(server: Server, **body: Any) -> dict[str, Any]:
    answer = server.post(PATH, **{"input": "hello world", **body})
    assert answer.status_code == 200, answer.text
    return strict_json(answer.text)


def text(answer: dict[str, Any]) -> str:
    return answer["output"][0]["content"][0]["text"]


def count(server: Server, *messages: tuple[str, str]) -> int:
    """Tokens of a chat."""
    said = [{"role": role, "content": content} for role, content in messages]
    return server.post("/tokenize", messages=said).json()["count"]


def test_the_official_client(client: openai.OpenAI):
    answer = client.responses.create(
        model="M",
        input="hello world",
        metadata={"a": "b"},
        temperature=0.5,
        top_p=0.9,
        max_output_tokens=50,
        user="me",
    )
    assert answer.id.startswith("resp_")
    assert answer.output_text == "hello world"
    assert (answer.status, answer.incomplete_details, answer.error) == ("completed", None, None)
    assert (answer.metadata, answer.temperature, answer.top_p) == ({"a": "b"}, 0.5, 0.9)
    assert (answer.max_output_tokens, answer.user) == (50, "me")
    (message,) = answer.output
    assert message.type == "message"
    assert (message.role, message.status) == ("assistant", "completed")
    usage = answer.usage
    assert usage is not None
    assert usage.input_tokens_details.cached_tokens == usage.input_tokens // 2
    assert usage.output_tokens_details.reasoning_tokens == 0
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert client.responses.retrieve(answer.id).output_text == "hello world"
    client.responses.delete(answer.id)
    for gone in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError, match=answer.id):
            gone(answer.id)


def test_the_official_client_streams(client: openai.OpenAI):
    events = list(client.responses.create(model="M", input="hello world 😀", stream=True))
    assert list(dict.fromkeys(event.type for event in events)) == ORDER
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 1 and "".join(deltas) == "hello world 😀"
    first, last = events[0], events[-1]
    assert first.type == "response.created" and last.type == "response.completed"
    assert (first.response.status, first.response.output) == ("in_progress", [])
    assert last.response.output_text == "hello world 😀"
    assert last.response.usage is not None and last.response.usage.output_tokens > 0
    assert client.responses.retrieve(last.response.id) == last.response
    with client.responses.stream(model="M", input="hello world") as stream:
        assert stream.get_final_response().output_text == "hello world"


def test_events_have_names_and_no_end_marker(server: Server):
    body = {"input": "hello", "stream": True, "max_output_tokens": 2}
    answer = httpx.post(server.url + PATH, json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    blocks = [block.split("\n") for block in answer.text.strip().split("\n\n")]
    for name, data in blocks:
        assert name.removeprefix("event: ") == json.loads(data.removeprefix("data: "))["type"]
    last = strict_json(blocks[-1][1].removeprefix("data: "))
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


def test_an_answer_cut_short(server: Server):
    answer = respond(server, max_output_tokens=2)
    assert (answer["status"], answer["usage"]["output_tokens"]) == ("incomplete", 2)
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["output"][0]["status"] == "incomplete"


def test_input_in_items(server: Server):
    items = [
        {"role": "developer", "content": "be kind"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {
            "type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
            "content": [{"type": "output_text", "text": "b", "annotations": []}],
        },
        {"role": "user", "content": "c"},
        {"role": "user", "content": "d"},
    ]  # fmt: skip
    answer = respond(server, input=items, instructions="be brief", max_output_tokens=9)
    system = ("system", "be brief\n\nbe kind")
    expected = count(server, system, ("user", "a"), ("assistant", "b"), ("user", "c\n\nd"))
    assert answer["usage"]["input_tokens"] == expected
    assert answer["instructions"] == "be brief"


def test_going_on(server: Server):
    first = respond(server, input="one", instructions="forget me")
    second = respond(server, input="two", previous_response_id=first["id"])
    said = ("assistant", text(first))
    assert second["usage"]["input_tokens"] == count(server, ("user", "one"), said, ("user", "two"))
    assert second["previous_response_id"] == first["id"]
    third = respond(server, input="three", previous_response_id=second["id"], store=False)
    assert third["usage"]["input_tokens"] > second["usage"]["input_tokens"]
    missing = server.post(PATH, input="four", previous_response_id=third["id"])
    check_error(missing, 400, third["id"], param="previous_response_id")
    check_error(server.get(f"{PATH}/{third['id']}"), 404, third["id"])


def test_ids_are_never_the_clients(server: Server):
    headers = {"X-Request-Id": "mine"}
    answer = httpx.post(
        server.url + PATH, json={"input": "x", "request_id": "mine"}, headers=headers
    )
    assert "mine" not in answer.json()["id"]


@pytest.mark.parametrize("streamed", [False, True])
def test_logprobs(client: openai.OpenAI, streamed: bool):
    asked: dict[str, Any] = {
        "model": "M", "input": "hello", "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
    }  # fmt: skip
    if streamed:
        events = client.responses.create(**asked, stream=True)
        kind = "response.output_text.delta"
        entries = [e for event in events if event.type == kind for e in event.logprobs]
    else:
        entries = client.responses.create(**asked).output[0].content[0].logprobs
    assert {entry.logprob for entry in entries} == {-0.5}
    assert "hello" in [entry.token for entry in entries]
    assert all(len(entry.top_logprobs) == 2 for entry in entries)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"input": []}, ["input", "empty"]),
        ({"input": None}, ["input"]),
        ({"input": [{"type": "function_call_output"}]}, ["function_call_output"]),
        ({"input": [{"role": "user"}]}, ["content"]),
        ({"input": [{"content": "x"}]}, ["role"]),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, ["input_image"]),
        ({"input": [{"role": "user", "content": [{"type": ["text"]}]}]}, ["only text"]),
        ({"input": [{"role": "robot", "content": "x"}]}, ["no such role"]),
        ({"previous_response_id": "resp_0"}, ["resp_0"]),
        ({"tools": [{"type": "function", "name": "f"}]}, ["tools"]),
        ({"tool_choice": "required"}, ["tool_choice"]),
        ({"truncation": "auto"}, ["truncation"]),
        ({"background": True}, ["background"]),
        ({"conversation": "c"}, ["conversation"]),
        ({"prompt": {"id": "p"}}, ["prompt"]),
        ({"text": {"format": {"type": "yaml"}}}, ["response_format"]),
        ({"text": {"format": 5}}, ["text.format"]),
        ({"n": 2}, ["n must be 1"]),
        ({"max_tokens": 2}, ["max_output_tokens"]),
        ({"max_output_tokens": 0}, ["max_output_tokens"]),
        ({"max_output_tokens": 10_000}, ["maximum context length"]),
        ({"metadata": {"a": 1}}, ["metadata"]),
        ({"temperature": -1}, ["temperature"]),
    ],
)
def test_bad_requests(server: Server, body: dict[str, Any], words: list[str]):
    for streamed in (False, True):
        answer = server.post(PATH, **{"input": "x", **body, "stream": streamed})
        check_error(answer, 400, *words)


def test_what_is_not_there(server: Server):
    check_error(server.post(PATH, model="nope", input="x"), 404, "nope")
    answer = respond(server)
    check_error(server.get(f"{PATH}/{answer['id']}?stream=true"), 400, "stream")


@pytest.mark.parametrize(
    "body",
    [
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": False},
        {"text": {"format": {"type": "text"}, "verbosity": "low"}, "reasoning": {"effort": "low"}},
        {"include": ["reasoning.encrypted_content"], "service_tier": "auto", "seed": 3},
        {"truncation": "disabled", "background": False, "metadata": None, "text": None},
        {"stream_options": None, "prompt_cache_key": "k", "safety_identifier": "s"},
    ],
)
def test_fields_that_are_taken(server: Server, body: dict[str, Any]):
    assert text(respond(server, **body)) == "hello world"


@pytest.mark.parametrize("body", [{"input": "\ud800"}, {"input": "x", "metadata": {"a": "\ud800"}}])
def test_half_a_character(server: Server, body: dict[str, Any]):
    for streamed in (False, True):
        content = json.dumps(body | {"stream": streamed})
        headers = {"Content-Type": "application/json"}
        answer = httpx.post(server.url + PATH, content=content, headers=headers)
        check_error(answer, 400, "surrogate")
