"""What the front end says of constraints; that they hold is shown with the real core."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from fake_server import Server
from http_checks import check_error

from jaxpaged.engine.errors import BadRequestError
from jaxpaged.engine.grammar_checker import PARAM
from jaxpaged.server.generation import Generation

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def ask(server: Server, path: str, **body: Any) -> Any:
    prompt = {"messages": [{"role": "user", "content": "ok"}]} if path == CHAT else {"prompt": "ok"}
    return server.post(path, max_tokens=5, **prompt, **body)


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"structured_outputs": {"regex": "(("}}, ["unclosed group"]),
        ({"structured_outputs": {"regex": r"\bfoo"}}, ["lookarounds"]),
        ({"structured_outputs": {"grammar": "start: other"}}, ["unknown name"]),
        ({"structured_outputs": {"grammar": "start: start"}}, ["no text matches"]),
        ({"structured_outputs": {"grammar": "hello"}}, ["Expected ::="]),
        ({"structured_outputs": {"json": {"type": "nope"}}}, ["nope"]),
        ({"structured_outputs": {"json": "[1"}}, ["JSON"]),
        ({"structured_outputs": {"json": "[1]"}}, ["object"]),
        ({"structured_outputs": {"json": '{"items":' * 200 + "{}" + "}" * 200}}, ["recursion"]),
        ({"structured_outputs": {"json": '{"items":' * 9999 + "{}" + "}" * 9999}}, ["nested"]),
        ({"structured_outputs": {"regex": "a" * 200_000}}, ["200", "131072"]),
        ({"structured_outputs": {"choice": []}}, ["at least one choice"]),
        ({"structured_outputs": {}}, ["exactly one", "none"]),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, ["exactly one", "regex, choice"]),
        ({"structured_outputs": {"json_object": False}}, ["json_object"]),
        ({"structured_outputs": {"yaml": "a"}}, ["yaml"]),
        ({"structured_outputs": "json"}, ["structured_outputs"]),
        ({"response_format": schema_format({"type": "nope"})}, ["nope"]),
        ({"response_format": schema_format({"properties": {f"p{n}": {} for n in range(700)}})},
         ["cannot be constrained"]),
        ({"response_format": schema_format("x")}, ["json_schema.schema"]),
        ({"response_format": {"type": "json_schema"}}, ["json_schema"]),
        ({"response_format": {"type": "xml"}}, ["response_format.type"]),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
         ["cannot be used together"]),
    ],
)  # fmt: skip
def test_bad_constraints(server: Server, path: str, body: dict[str, Any], words: list[str]) -> None:
    for streamed in (False, True):
        answer = ask(server, path, stream=streamed, **body)
        check_error(answer, 400, *words, param=next(iter(body)))
        assert len(answer.text) < 1000


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "body",
    [
        {"structured_outputs": {"json": {"type": "integer"}, "regex": None}},
        {"structured_outputs": {"json": '{"type": "integer"}'}},
        {"structured_outputs": {"grammar": 'root ::= "a" [0-9]+'}, "response_format": None},
        {"structured_outputs": {"choice": ["", "a", "ďábel"]}, "response_format": {"type": "text"}},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
    ],
)
def test_good_constraints_are_taken(server: Server, path: str, body: dict[str, Any]) -> None:
    for streamed in (False, True):
        assert ask(server, path, stream=streamed, **body).status_code == 200


def test_a_slow_schema_holds_up_nobody(server: Server) -> None:
    """Thousands of properties take a second to compile."""
    names = [f"p{place}" for place in range(3000)]
    slow = {"json": {"properties": dict.fromkeys(names, {}), "required": names}}
    done = threading.Event()

    def ask_slow() -> None:
        try:
            assert ask(server, COMPLETIONS, structured_outputs=slow).status_code == 200
        finally:
            done.set()

    thread = threading.Thread(target=ask_slow)
    thread.start()
    answered = 0
    while not done.is_set():
        assert ask(server, COMPLETIONS).status_code == 200
        answered += 1
    thread.join()
    assert answered > 2


def test_without_a_tokenizer(slow_server: Server) -> None:
    answer = slow_server.post(
        COMPLETIONS, prompt=[5], max_tokens=1, structured_outputs={"regex": "a"}
    )
    check_error(answer, 400, "tokenizer", "skip_tokenizer_init", param="structured_outputs")


@pytest.mark.parametrize("streamed", [False, True])
def test_complaints_of_a_running_engine_name_the_field_that_was_sent(streamed: bool) -> None:
    class Refusing:
        async def run(self, request: Any, **_: Any) -> AsyncIterator[Any]:
            raise BadRequestError("no token fits", PARAM)
            yield

    context: Any = SimpleNamespace(engine=Refusing())
    nothing: Any = None
    names = {PARAM: "tools"}
    generation = Generation("a", context, nothing, [nothing], nothing, nothing, names)

    async def answer() -> None:
        if streamed:
            await anext(generation.stream())
        await generation.collect()

    with pytest.raises(BadRequestError) as refused:
        asyncio.run(answer())
    assert refused.value.param == "tools"
