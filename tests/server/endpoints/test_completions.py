from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from fake_core import MAX_MODEL_LEN, VOCAB
from fake_server import Server
from http_checks import check_error, choices, stream, strict_json

ALPHABET = "Alpha Beta Gamma Delta Epsilon"
PATH = "/v1/completions"


def complete(server: Server, **body: Any) -> dict[str, Any]:
    answer = server.post(PATH, **{"model": "M", "ignore_eos": True, **body})
    assert answer.status_code == 200, answer.text
    return strict_json(answer.text)


def token_ids(server: Server, text: str, **options: Any) -> list[int]:
    return server.post("/tokenize", prompt=text, **options).json()["tokens"]


def test_the_official_client(client: openai.OpenAI):
    answer = client.completions.create(model="M", prompt=ALPHABET, max_tokens=7, temperature=0)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.model == "M"
    choice = answer.choices[0]
    assert ALPHABET.startswith(choice.text)
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    usage = answer.usage
    assert usage.completion_tokens == 7
    assert usage.total_tokens == usage.prompt_tokens + 7
    chunks = list(client.completions.create(model="M", prompt=ALPHABET, max_tokens=7, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons[-1] == "length"
    assert set(reasons[:-1]) <= {None}


@pytest.mark.parametrize("form", ["text", "ids", "texts", "lists"])
def test_every_form_of_a_prompt(server: Server, form: str):
    ids = token_ids(server, ALPHABET)
    given = {"text": ALPHABET, "ids": ids, "texts": [ALPHABET], "lists": [ids]}[form]
    answer = complete(server, prompt=given, max_tokens=8)
    assert answer["usage"]["prompt_tokens"] == len(ids)
    assert ALPHABET.startswith(answer["choices"][0]["text"])


@pytest.mark.parametrize("streamed", [False, True])
def test_batches_and_choices(server: Server, streamed: bool):
    prompts = [f"{word} and so on" for word in ("hello", "world", "today")]
    body = {"prompt": prompts, "n": 2, "max_tokens": 9, "echo": True, "model": "M"}
    body |= {"add_special_tokens": False, "ignore_eos": True}
    single = [complete(server, **{**body, "prompt": prompt}) for prompt in prompts]
    wanted = [choice["text"] for answer in single for choice in answer["choices"]]
    if streamed:
        options = {"include_usage": True}
        events = stream(server, PATH, **body, stream_options=options)
        found = ["".join(c["text"] for c in choices(events, index)) for index in range(6)]
        usage = events[-1]["usage"]
    else:
        answer = complete(server, **body)
        assert [choice["index"] for choice in answer["choices"]] == list(range(6))
        found, usage = [choice["text"] for choice in answer["choices"]], answer["usage"]
    assert found == wanted
    assert usage["completion_tokens"] == 6 * 9
    assert usage["prompt_tokens"] == sum(a["usage"]["prompt_tokens"] for a in single)
    assert found[0].startswith(prompts[0] + "hello")


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("included", [False, True])
def test_a_stop_string_longer_than_a_token(server: Server, streamed: bool, included: bool):
    stop = "eta Gamm"
    body = {"prompt": ALPHABET, "add_special_tokens": False, "max_tokens": 60, "model": "M"}
    body |= {"stop": [stop], "include_stop_str_in_output": included, "ignore_eos": True}
    if streamed:
        said = choices(stream(server, PATH, **body))
        text = ""
        for choice in said:
            text += choice["text"]
            assert included or not text.endswith(tuple(stop[:n] for n in range(1, len(stop))))
        last = said[-1]
    else:
        last = complete(server, **body)["choices"][0]
        text = last["text"]
    assert text == ("Alpha B" + stop if included else "Alpha B")
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", stop)


def test_usage_ends_with_the_token_that_completed_the_stop_string(server: Server):
    answer = complete(server, prompt=ALPHABET, add_special_tokens=False, stop="Beta")
    upto = len(token_ids(server, "Alpha Beta", add_special_tokens=False))
    assert answer["usage"]["completion_tokens"] == upto


def test_stop_token_ids(server: Server):
    ids = token_ids(server, ALPHABET, add_special_tokens=False)
    answer = complete(server, prompt=ids, stop_token_ids=[ids[3]])
    choice = answer["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", ids[3])
    assert answer["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("streamed", [False, True])
def test_echo_with_logprobs(server: Server, streamed: bool):
    body = {"prompt": "the quick brown fox", "echo": True, "logprobs": 3, "max_tokens": 3}
    body |= {"temperature": 1, "top_k": 1, "ignore_eos": True, "return_token_ids": True}
    if streamed:
        said = choices(stream(server, PATH, **body))
        parts = [choice["logprobs"] for choice in said]
        logprobs = {key: [x for part in parts for x in part[key]] for key in parts[0]}
        text = "".join(choice["text"] for choice in said)
    else:
        choice = complete(server, **body)["choices"][0]
        logprobs, text = choice["logprobs"], choice["text"]
    tokens, offsets = logprobs["tokens"], logprobs["text_offset"]
    values = logprobs["token_logprobs"]
    assert len(tokens) == len(values) == len(offsets) == len(logprobs["top_logprobs"])
    assert len(tokens) == len(token_ids(server, body["prompt"])) + 3
    assert values[0] is None and logprobs["top_logprobs"][0] is None
    assert all(value <= 0 for value in values[1:])
    assert offsets == sorted(set(offsets)) and offsets[0] == 0
    assert "".join(tokens).replace("<|bos|>", "") == text
    assert text.startswith(body["prompt"])
    assert any(-9999.0 in tops.values() for tops in logprobs["top_logprobs"][1:]), "once -inf"


def test_echo_of_the_prompt_alone(server: Server):
    counted = server.metric("generation_tokens_total")
    answer = complete(server, prompt="the quick", echo=True, logprobs=0, max_tokens=0)
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("the quick", "length")
    assert len(choice["logprobs"]["tokens"]) == answer["usage"]["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == 0
    check_error(server.post(PATH, prompt="x", max_tokens=0), 400, param="max_tokens")
    assert server.metric("generation_tokens_total") == counted


def test_what_lm_eval_harness_asks_for(server: Server):
    """Its `local-completions`: how likely tokens are that it cuts out of an echo, and an answer."""
    ids, words = token_ids(server, ALPHABET), len("Alpha Beta")
    body = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    answer = server.post(PATH, model="M", prompt=[ids, ids[:words]], **body).json()
    for choice, asked in zip(answer["choices"], (ids, ids[:words]), strict=True):
        logprobs = choice["logprobs"]
        assert len(logprobs["token_logprobs"]) == len(asked) + 1  # it drops the last
        for own, tops in zip(
            logprobs["token_logprobs"][1:-1], logprobs["top_logprobs"][1:-1], strict=True
        ):
            assert own <= max(tops.values())  # equal, it takes the token for the greedy choice
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    body = {"max_tokens": 12, "temperature": 0, "stop": ["Gamma", "<|eos|>"], "seed": 1234}
    choice = server.post(PATH, model="M", prompt=[ids], **body).json()["choices"][0]
    assert choice["text"] == "Alpha Beta "[: len(choice["text"])] and choice["text"]


def test_what_vllm_adds(server: Server):
    ids = token_ids(server, ALPHABET)
    body = {"prompt": ALPHABET, "max_tokens": 2, "prompt_logprobs": 1, "logprobs": 1}
    body |= {"return_token_ids": True, "return_tokens_as_token_ids": True, "request_id": "mine"}
    answer = complete(server, **body)
    choice = answer["choices"][0]
    assert answer["id"] == "cmpl-mine"
    assert (choice["token_ids"], choice["prompt_token_ids"]) == (ids[:2], ids)
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in ids[:2]]
    assert choice["prompt_logprobs"][0] is None
    entry = choice["prompt_logprobs"][1][str(ids[1])]
    assert (entry["logprob"], entry["rank"]) == (-0.5, 1)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == len(ids) // 2


def test_special_tokens_are_shown_if_asked_for(server: Server):
    body = {"prompt": "hello", "max_tokens": 1}
    assert complete(server, **body)["choices"][0]["text"] == ""
    shown = complete(server, **body, skip_special_tokens=False)
    assert shown["choices"][0]["text"] == "<|bos|>"


def test_truncation(server: Server):
    answer = complete(server, prompt="hello " * 500, truncate_prompt_tokens=10, max_tokens=2)
    assert answer["usage"]["prompt_tokens"] == 10


def test_length_limits(server: Server):
    limit = MAX_MODEL_LEN
    words = (f"maximum context length is {limit} tokens", "reduce")
    for count, asked in ((8, limit - 3), (limit, 1)):
        answer = server.post(PATH, prompt=[5] * count, max_tokens=asked)
        error = check_error(answer, 400, *words, f" {count} ", f" {asked} ", f"{count + asked}")
        assert "-" not in error["message"]
    answer = complete(server, prompt=[5] * (limit - 10))
    assert answer["usage"]["completion_tokens"] == 10
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"logit_bias": {str(VOCAB + 1000): -100}}, [f"{VOCAB + 1000}", f"{VOCAB - 1}"]),
        ({"logit_bias": {"-1": 5}}, ["-1", f"{VOCAB - 1}"]),
        ({"logit_bias": {"abc": 1}}, ["abc", f"{VOCAB - 1}"]),
        ({"stop_token_ids": [VOCAB]}, [f"{VOCAB}", f"{VOCAB - 1}"]),
        ({"allowed_token_ids": [VOCAB]}, [f"{VOCAB}", f"{VOCAB - 1}"]),
        ({"prompt": [5, VOCAB]}, [f"{VOCAB}", f"{VOCAB - 1}"]),
        ({"prompt": []}, ["empty"]),
        ({"prompt": None}, ["prompt is a string"]),
        ({"prompt": [[5], []]}, ["empty"]),
        ({"prompt": [5, "x"]}, ["prompt is a string"]),
        ({"logprobs": 21}, ["21", "20"]),
        ({"temperature": -1}, ["temperature"]),
        ({"temperature": "hot"}, ["temperature", "number"]),
        ({"top_p": 0}, ["top_p"]),
        ({"n": 0}, ["n must be"]),
        ({"max_tokens": -1}, ["max_tokens"]),
        ({"seed": 2**70}, ["seed"]),
        ({"stop": [""]}, ["stop"]),
        ({"stop": [str(i) for i in range(10_000)]}, ["at most 64 strings, got 10000"]),
        ({"stop": "x" * 4097}, ["4096 characters"]),
        ({"bad_words": ["x" * 65537]}, ["65536 characters"]),
        ({"suffix": "end"}, ["suffix"]),
        ({"best_of": 3}, ["best_of"]),
        ({"guided_regex": "a+"}, ["guided_regex", "structured_outputs"]),
        ({"stream_options": {"include_usage": True}}, ["stream_options"]),
        ({"prompt_logprobs": 1, "stream": True}, ["prompt_logprobs"]),
        ({"truncate_prompt_tokens": 0}, ["truncate_prompt_tokens"]),
    ],
)
def test_bad_requests(server: Server, body: dict[str, Any], words: list[str]):
    field = next(iter(body))
    body = {"prompt": "x", "max_tokens": 5, **body}
    check_error(server.post(PATH, **body), 400, *words, param=field)
    if "stream" not in body and field != "stream_options":
        check_error(server.post(PATH, **body, stream=True), 400, *words, param=field)


def test_numbers_that_json_does_not_have(server: Server):
    for number in ("NaN", "Infinity"):
        text = f'{{"prompt": "x", "temperature": {number}, "logit_bias": {{"5": {number}}}}}'
        kind = {"Content-Type": "application/json"}
        answer = httpx.post(server.url + PATH, content=text, headers=kind)
        check_error(answer, 400, "finite")


def test_unknown_model(server: Server):
    check_error(server.post(PATH, model="nope", prompt="x"), 404, "nope", "'M'", param="model")
    assert complete(server, model="also", prompt="x")["model"] == "M"
