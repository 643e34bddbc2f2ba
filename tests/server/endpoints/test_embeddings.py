from __future__ import annotations

import base64
import math
import struct
from typing import Any

import openai
import pytest
from fake_core import MAX_MODEL_LEN, VOCAB
from fake_server import Server, eventually
from http_checks import check_error, strict_json

PATH = "/v1/embeddings"
COUNTED = ("prompt_tokens_total", "generation_tokens_total", "time_to_first_token_seconds_count")


def lengths(answer: dict[str, Any]) -> list[int]:
    """The prompts' lengths, which the fake core puts into the first number."""
    assert [item["index"] for item in answer["data"]] == list(range(len(answer["data"])))
    for item in answer["data"]:
        assert math.hypot(*item["embedding"]) == pytest.approx(1)
    return [round(1 / item["embedding"][0]) for item in answer["data"]]


def embed(server: Server, given: Any, **body: Any) -> dict[str, Any]:
    answer = server.post(PATH, input=given, **body)
    assert answer.status_code == 200, answer.text
    return strict_json(answer.text)


def test_the_official_client(client: openai.OpenAI):
    asked: dict[str, Any] = {"model": "M", "input": ["hello", "hello world"]}
    found = client.embeddings.create(**asked)  # asks for base64
    assert [item.index for item in found.data] == [0, 1]
    assert found.model == "M"
    plain = client.embeddings.create(**asked, encoding_format="float", dimensions=4)
    for one, other in zip(found.data, plain.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding)
    assert found.usage.prompt_tokens == found.usage.total_tokens > 2


@pytest.mark.parametrize(
    ("given", "expected"),
    [([5, 6, 7], [3]), ([[5], [6, 7]], [1, 2]), ("the", [2]), (["the", ""], [2, 1])],
)
def test_forms_of_input(server: Server, given: Any, expected: list[int]):
    answer = embed(server, given)
    assert lengths(answer) == expected
    assert answer["usage"] == {"prompt_tokens": sum(expected), "total_tokens": sum(expected)}


def test_base64_is_float32(server: Server):
    raw = embed(server, [5, 6], encoding_format="base64")["data"][0]["embedding"]
    numbers = struct.unpack("<4f", base64.b64decode(raw))
    assert list(numbers) == embed(server, [5, 6])["data"][0]["embedding"]


def test_options(server: Server):
    assert lengths(embed(server, "the", add_special_tokens=False)) == [1]
    assert lengths(embed(server, [5] * 9, truncate_prompt_tokens=4)) == [4]
    many = [[5] * (1 + place % 50) for place in range(200)]
    assert lengths(embed(server, many, priority=1, user="u")) == [len(one) for one in many]
    assert embed(server, [5], request_id="mine")["id"] == "embd-mine"


def test_metrics(server: Server):
    def read() -> list[float]:
        return [server.metric(name) for name in COUNTED]

    before = read()
    embed(server, [5, 6, 7])
    eventually(lambda: read()[0] == before[0] + 3)
    assert read()[1:] == before[1:]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"input": None}, ["input"]),
        ({"input": []}, ["empty"]),
        ({"input": [[]]}, ["empty"]),
        ({"input": ["a", 5]}, ["an input is"]),
        ({"input": ["a"] * 2049}, ["2048"]),
        ({"input": [VOCAB]}, [str(VOCAB), "vocabulary"]),
        ({"input": [5] * MAX_MODEL_LEN}, [str(MAX_MODEL_LEN)]),
        ({"input": [5] * 300}, [str(MAX_MODEL_LEN), "300"]),
        ({"input": "", "add_special_tokens": False}, ["empty"]),
        ({"dimensions": 2}, ["dimensions 2", "4"]),
        ({"encoding_format": "int8"}, ["encoding_format"]),
        ({"priority": 2**63}, ["priority"]),
        ({"truncate_prompt_tokens": 0}, ["truncate_prompt_tokens"]),
    ],
)
def test_bad_requests(server: Server, body: dict[str, Any], words: list[str]):
    error = check_error(server.post(PATH, **{"input": [5], **body}), 400, *words)
    assert error["param"] == next(iter(body))
    if error["param"] == "input":
        assert "prompt" not in error["message"] and "max_tokens" not in error["message"]
    check_error(server.post(PATH, model="nope", input=[5]), 404, "nope")
