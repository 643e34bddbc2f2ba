"""Requests that broke other servers, each streaming and not, on the built-in model.

After each, a plain greedy completion must still be answered, and no traceback be in the log.
"""

from __future__ import annotations

import http.client
import json
import math
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import httpx
import pytest
from http_checks import check_error, choices, stream, strict_json
from live_server import Serving

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LIMIT = 512  # max_model_len of the server
GREEDY = {"model": "demo", "temperature": 0}
HELLO = [{"role": "user", "content": "Good morrow!"}]
both = pytest.mark.parametrize("streamed", [False, True])


@pytest.fixture(autouse=True)
def still_serving(serving: Serving) -> Iterator[None]:
    yield
    answer = post(serving, COMPLETIONS, prompt="ok", max_tokens=5)
    assert answer["usage"]["completion_tokens"] <= 5
    assert "Traceback" not in serving.text


def post(serving: Serving, path: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(serving.url + path, json={**GREEDY, **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    return strict_json(answer.text)


def answered(serving: Serving, streamed: bool, **body: Any) -> tuple[list[str], dict[str, Any]]:
    """The pieces of a completion's text, and its last choice."""
    body = {**GREEDY, **body}
    if streamed:
        said = choices(stream(serving, COMPLETIONS, **body))
    else:
        said = post(serving, COMPLETIONS, **body)["choices"]
    return [choice["text"] for choice in said], said[-1]


@both
def test_1_characters_over_tokens(serving: Serving, streamed: bool):
    text = "😀 👨‍👩‍👧 ďábel"
    body = {"prompt": "x", "structured_outputs": {"choice": [text]}, "max_tokens": 100}
    pieces, last = answered(serving, streamed, **body)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert last["finish_reason"] == "stop"


@both
@pytest.mark.parametrize("included", [False, True])
def test_3_a_stop_string_over_tokens(serving: Serving, streamed: bool, included: bool):
    body = {"prompt": "A B C D E F G", "max_tokens": 40, "ignore_eos": True}
    whole = "".join(answered(serving, False, **body)[0])
    stop = whole[11:18]
    wanted = whole[: whole.index(stop) + len(stop) * included]
    body |= {"stop": stop, "include_stop_str_in_output": included}
    pieces, last = answered(serving, streamed, **body)
    assert "".join(pieces) == wanted
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", stop)


@both
def test_4_echo_with_logprobs_and_top_k_1(serving: Serving, streamed: bool):
    body = {"prompt": "To be or not", "echo": True, "logprobs": 1, "max_tokens": 3}
    body |= {"temperature": 1, "seed": 1}

    def logprobs(**more: Any) -> dict[str, Any]:
        if not streamed:
            return post(serving, COMPLETIONS, **body, **more)["choices"][0]["logprobs"]
        said = choices(stream(serving, COMPLETIONS, **{**GREEDY, **body, **more}))
        parts = [choice["logprobs"] for choice in said if choice["logprobs"]]
        return {key: [x for part in parts for x in part[key]] for key in parts[0]}

    masked, raw = logprobs(top_k=1), logprobs()
    values, offsets = masked["token_logprobs"], masked["text_offset"]
    assert len(masked["tokens"]) == len(values) == len(offsets)
    assert values[0] is None
    assert all(math.isfinite(value) and value <= 0 for value in values[1:])
    assert offsets == sorted(set(offsets))
    prompt = len(values) - 3
    assert prompt >= 4
    assert values[1:prompt] == pytest.approx(raw["token_logprobs"][1:prompt], abs=1e-4)
    assert min(values[1:prompt]) < -0.01, "a mask of one token would leave zeros"


@both
@pytest.mark.parametrize("key", ["100000", "-1", "abc"])
def test_5_logit_bias_outside_the_vocabulary(serving: Serving, streamed: bool, key: str):
    valid = {"prompt": "The king", "max_tokens": 60, "ignore_eos": True}
    alone = post(serving, COMPLETIONS, **valid)["choices"]
    with ThreadPoolExecutor() as pool:
        beside = pool.submit(post, serving, COMPLETIONS, **valid)
        body = {**GREEDY, "messages": HELLO, "logit_bias": {key: -100}, "max_tokens": 5}
        answer = httpx.post(serving.url + CHAT, json={**body, "stream": streamed})
        error = check_error(answer, 400, key, param="logit_bias")
        assert re.search(r"ids are 0 to \d+", error["message"])
        assert beside.result()["choices"] == alone


@both
def test_7_what_does_not_fit(serving: Serving, streamed: bool):
    url = serving.url + COMPLETIONS
    for prompt, asked in ((8, LIMIT - 3), (LIMIT, 1)):
        body = {"prompt": [5] * prompt, "max_tokens": asked, "stream": streamed}
        error = check_error(httpx.post(url, json=body), 400, f" {LIMIT} ", f" {prompt} ")
        numbers = {int(number) for number in re.findall(r"-?\d+", error["message"])}
        assert numbers <= {LIMIT, prompt, asked, prompt + asked}
    content = "a" * 40
    while True:  # a chat that leaves about ten tokens
        messages = [{"role": "user", "content": content}]
        count = post(serving, "/tokenize", messages=messages)["count"]
        if count >= LIMIT - 10:
            break
        content += " a" * max(1, (LIMIT - 10 - count) // 4)
    body = {**GREEDY, "messages": messages, "ignore_eos": True}
    if streamed:
        events = stream(serving, CHAT, **body, stream_options={"include_usage": True})
        last, usage = choices(events)[-1], events[-1]["usage"]
    else:
        answer = post(serving, CHAT, **body)
        last, usage = answer["choices"][0], answer["usage"]
    assert last["finish_reason"] == "length"
    assert 1 <= usage["completion_tokens"] == LIMIT - count <= 10


def test_8_usage_in_streams(serving: Serving):
    body = {**GREEDY, "messages": HELLO, "max_tokens": 12, "n": 2}
    for options in ({}, {"stream_options": {}}):
        assert not any("usage" in event for event in stream(serving, CHAT, **body, **options))
    events = stream(serving, CHAT, **body, stream_options={"include_usage": True})
    assert [event for event in events if "usage" in event] == events[-1:]
    assert events[-1]["choices"] == []
    whole = post(serving, CHAT, **body)
    assert events[-1]["usage"] == whole["usage"]


@both
def test_11_clients_that_go_away(serving: Serving, streamed: bool):
    def aborts() -> float:
        text = httpx.get(serving.url + "/metrics").text
        return float(re.search(r'finished_reason="abort".*} (\S+)', text)[1])

    def waits(**gauges: float) -> None:
        deadline = time.monotonic() + 2
        while any(serving.gauge(name) != value for name, value in gauges.items()):
            assert time.monotonic() < deadline, gauges
            time.sleep(0.02)

    before = aborts()
    body = {**GREEDY, "messages": HELLO, "max_tokens": 450, "ignore_eos": True, "stream": streamed}
    with ExitStack() as clients:  # four run, the fifth waits
        for _ in range(5):
            host = serving.url.removeprefix("http://")
            client = clients.enter_context(closing(http.client.HTTPConnection(host)))
            client.request("POST", CHAT, json.dumps(body), {"Content-Type": "application/json"})
        waits(num_requests_running=4, num_requests_waiting=1)
    waits(num_requests_running=0, num_requests_waiting=0, kv_cache_usage_perc=0)
    assert aborts() == before + 5
    began = time.monotonic()
    post(serving, COMPLETIONS, prompt="ok", max_tokens=1)
    assert time.monotonic() - began < 2


def test_one_bos(serving: Serving):
    ids = post(serving, "/tokenize", messages=HELLO)["tokens"]
    text = post(serving, "/detokenize", tokens=ids)["prompt"]
    body = {"prompt": text, "add_special_tokens": False, "return_token_ids": True}
    again = post(serving, COMPLETIONS, **body, max_tokens=1)["choices"][0]["prompt_token_ids"]
    chat = post(serving, CHAT, messages=HELLO, return_token_ids=True, max_tokens=1)
    assert ids == again == chat["prompt_token_ids"]
    bos = post(serving, "/tokenize", prompt="x")["tokens"][0]
    assert (ids[0], ids.count(bos)) == (bos, 1)
