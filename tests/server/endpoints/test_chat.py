from __future__ import annotations

from typing import Any

import openai
import pytest
from fake_core import MAX_MODEL_LEN
from fake_server import Server
from http_checks import check_error, choices, stream, strict_json
from tiny_tokenizer import BOS

PATH = "/v1/chat/completions"
TRICKY = "😀 👨‍👩‍👧 ďábel"


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def chat(server: Server, text: str = "hello world", **body: Any) -> dict[str, Any]:
    answer = server.post(PATH, **{"model": "M", "messages": user(text), **body})
    assert answer.status_code == 200, answer.text
    return strict_json(answer.text)


def content(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["message"]["content"]


def test_the_official_client(client: openai.OpenAI):
    answer = client.chat.completions.create(model="M", messages=user("hello world"))
    assert answer.id.startswith("chatcmpl-")
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", "hello world")
    assert choice.finish_reason == "stop"
    chunks = list(
        client.chat.completions.create(model="M", messages=user("hello world"), stream=True)
    )
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert (deltas[0].role, deltas[0].content) == ("assistant", "")
    assert {delta.role for delta in deltas[1:]} == {None}
    assert "".join(delta.content or "" for delta in deltas) == "hello world"
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["stop"]
    assert len({(chunk.id, chunk.created) for chunk in chunks}) == 1


@pytest.mark.parametrize("prefix", ["", "a", "ab"])
def test_characters_over_tokens(server: Server, prefix: str):
    text = prefix + TRICKY
    events = stream(server, PATH, messages=user(text))
    pieces = [choice["delta"].get("content") or "" for choice in choices(events)]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == text == content(chat(server, text))
    finished = [choice for choice in choices(events) if choice["finish_reason"]]
    assert [choice["finish_reason"] for choice in finished] == ["stop"]


def test_usage_in_streams(server: Server):
    body = {"messages": user("hello world"), "n": 2, "max_tokens": 20}
    for options in ({}, {"stream_options": {}}, {"stream_options": {"include_usage": False}}):
        events = stream(server, PATH, **body, **options)
        assert not any("usage" in event for event in events)
    events = stream(server, PATH, **body, stream_options={"include_usage": True})
    told = [event for event in events if "usage" in event]
    assert told == events[-1:]
    assert told[0]["choices"] == []
    whole = chat(server, **body)
    assert told[0]["usage"] == whole["usage"]
    assert len(whole["choices"]) == 2
    assert whole["usage"]["completion_tokens"] > max(1, whole["usage"]["prompt_tokens"])


def test_usage_in_every_chunk(server: Server):
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = stream(server, PATH, messages=user("hello world"), stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == counts[-2] > counts[0]


def test_one_bos(server: Server):
    messages = user("hello")
    ids = server.post("/tokenize", messages=messages).json()["tokens"]
    assert (ids[0], ids.count(BOS)) == (BOS, 1)
    answer = chat(server, "hello", return_token_ids=True)
    assert answer["prompt_token_ids"] == ids
    text = server.post("/detokenize", tokens=ids).json()["prompt"]
    again = server.post(
        "/v1/completions", prompt=text, add_special_tokens=False, return_token_ids=True
    )
    assert again.json()["choices"][0]["prompt_token_ids"] == ids


def test_content_in_parts(server: Server):
    parts = [{"type": "text", "text": "hello"}, {"type": "text", "text": "world"}]
    answer = chat(server, messages=[{"role": "user", "content": parts}])
    assert content(answer) == "hello\nworld"
    image = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    refused = server.post(PATH, messages=[{"role": "user", "content": image}])
    check_error(refused, 400, "image_url", "only text", param="messages")


@pytest.mark.parametrize("streamed", [False, True])
def test_logprobs(server: Server, streamed: bool):
    body = {"logprobs": True, "top_logprobs": 3, "messages": user(TRICKY), "max_tokens": 40}
    if streamed:
        said = choices(stream(server, PATH, **body))
        entries = [e for c in said if c["logprobs"] for e in c["logprobs"]["content"]]
    else:
        entries = chat(server, **body)["choices"][0]["logprobs"]["content"]
    raw = bytes(byte for entry in entries for byte in entry["bytes"])
    assert TRICKY.encode() in raw, "bytes tell what tokens that split a character cannot"
    for entry in entries:
        assert entry["logprob"] == -0.5
        assert [top["logprob"] for top in entry["top_logprobs"]] == [-0.5, -1.5, -9999.0]
        assert entry["top_logprobs"][0]["token"] == entry["token"]


def test_logprobs_without_tops(server: Server):
    entries = chat(server, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert all(entry["top_logprobs"] == [] for entry in entries)
    assert chat(server)["choices"][0]["logprobs"] is None


def test_a_stop_string(server: Server):
    choice = chat(server, "the quick brown fox", stop="brown")["choices"][0]
    assert choice["message"]["content"] == "the quick "
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "brown")


def test_what_fits(server: Server):
    text = "x" * (MAX_MODEL_LEN - 14)
    prompt_tokens = server.post("/tokenize", messages=user(text)).json()["count"]
    room = MAX_MODEL_LEN - prompt_tokens
    assert 0 < room <= 10
    answer = chat(server, text, ignore_eos=True)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == room


def test_max_completion_tokens_comes_first(server: Server):
    answer = chat(server, max_completion_tokens=2, max_tokens=9)
    assert answer["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("streamed", [False, True])
def test_the_last_message_continued_and_echoed(server: Server, streamed: bool):
    messages = [*user("hello"), {"role": "assistant", "content": "I am"}]
    body = {"messages": messages, "continue_final_message": True, "echo": True}
    body |= {"return_token_ids": True}
    if streamed:
        events = stream(server, PATH, **body)
        text = "".join(choice["delta"].get("content") or "" for choice in choices(events))
        ids = events[0]["prompt_token_ids"]
    else:
        answer = chat(server, **body)
        text, ids = content(answer), answer["prompt_token_ids"]
    assert text == "I amhello"
    prompt = server.post("/detokenize", tokens=ids).json()["prompt"]
    assert prompt.endswith("<|assistant|>I am")
    both = server.post(PATH, **body, add_generation_prompt=True)
    check_error(both, 400, "exclude each other")


def test_templates_of_the_request(server: Server):
    body = {"return_token_ids": True, "max_tokens": 1}

    def prompt(**options: Any) -> str:
        ids = chat(server, **body, **options)["prompt_token_ids"]
        return server.post("/detokenize", tokens=ids).json()["prompt"]

    assert prompt(chat_template="{{ messages|length }} message") == "1 message"
    assert prompt(chat_template_kwargs={"shout": "AH"}).endswith("AH")
    assert not prompt(add_generation_prompt=False).endswith("<|assistant|>")
    template = "{{ documents[0].title }}"
    assert prompt(chat_template=template, documents=[{"title": "T", "text": "t"}]) == "T"
    assert prompt(add_special_tokens=True).startswith("<|bos|><|bos|>")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": []}, ["messages"]),
        ({"messages": [{"role": "robot", "content": "x"}]}, ["no such role: robot"]),
        ({"messages": [{"content": "x"}]}, ["messages.0.role"]),
        ({"messages": "x"}, ["list"]),
        ({"functions": [{"name": "f"}]}, ["not supported"]),
        ({"top_logprobs": 2}, ["logprobs=true"]),
        ({"logprobs": True, "top_logprobs": 21}, ["21", "20"]),
        ({"max_completion_tokens": 0}, ["max_completion_tokens"]),
        ({"chat_template": "{% if %}"}, ["template"]),
        ({"chat_template": "{{ 'a' * 10**15 }}"}, ["template"]),
        ({"chat_template_kwargs": {"messages": []}}, ["messages"]),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, ["add_generation_prompt"]),
        ({"chat_template_kwargs": {"self": 1}}, ["self"]),
        ({"stop": [str(i) for i in range(65)]}, ["at most 64"]),
        ({"top_k": 2**31}, ["top_k"]),
        ({"priority": 10**30}, ["priority"]),
        ({"n": 1025}, ["n must be"]),
        ({"cache_salt": ""}, ["cache_salt"]),
    ],
)
def test_bad_requests(server: Server, body: dict[str, Any], words: list[str]):
    for streamed in (False, True):
        answer = server.post(PATH, **{"messages": user("x"), **body, "stream": streamed})
        check_error(answer, 400, *words)


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "text"}},
        {"tools": [], "tool_choice": "auto"},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
        {"tool_choice": "none"},
        {"user": "u", "store": True, "metadata": {}, "service_tier": "auto"},
        {"include_reasoning": False, "priority": 3, "seed": 5, "cache_salt": "s", "min_p": 0.1},
        {"top_k": -1, "repetition_penalty": 1.1, "min_tokens": 1, "bad_words": ["zzz"]},
        {"logit_bias": {"5": 1000}, "allowed_token_ids": None, "n": None, "stop": None},
        {"spaces_between_special_tokens": False, "skip_special_tokens": True},
    ],
)
def test_fields_that_are_taken(server: Server, body: dict[str, Any]):
    assert content(chat(server, **body)) == "hello world"


def test_prompt_logprobs(server: Server):
    found = chat(server, prompt_logprobs=0)["prompt_logprobs"]
    assert found[0] is None
    assert [len(entry) for entry in found[1:]] == [1] * (len(found) - 1)
