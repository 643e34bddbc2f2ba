"""Tools and reasoning at /v1/responses and /v1/messages. The first user message is the answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pydantic
import pytest
from fake_server import Server, running_with_tools
from http_checks import check_error

TEMPLATE = """<|bos|>{{ tools | map(attribute="function.name") | join(",") if tools }}
{%- for message in messages %}{{ "<|" ~ message.role ~ "|>" ~ message.content }}
{%- for call in message.tool_calls %}{{ call.id ~ call.function.name }}
{%- for key, value in call.function.arguments.items() %}{{ key ~ "=" ~ value }}{% endfor %}
{%- endfor %}{{ message.tool_call_id }}{{ message.name }}<|end|>{% endfor %}
{{- "thinks" if enable_thinking }}"""
ARGUMENTS = {"x": 1}
ANSWER = '<think>hm</think>Wait. <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
FUNCTION: Any = {"type": "function", "name": "f", "parameters": SCHEMA, "strict": True}
TOOL: Any = {"name": "f", "description": "d", "input_schema": SCHEMA}
ORDER = [
    *("created", "in_progress"),
    *("output_item.added", "content_part.added", "reasoning_text.delta"),
    *("reasoning_text.done", "content_part.done", "output_item.done"),
    *("output_item.added", "content_part.added", "output_text.delta"),
    *("output_text.done", "content_part.done", "output_item.done"),
    *("output_item.added", "function_call_arguments.delta"),
    *("function_call_arguments.done", "output_item.done"),
    "completed",
]


@pytest.fixture(scope="module")
def tool_server(model_folder: Path) -> Iterator[Server]:
    with running_with_tools(model_folder, TEMPLATE) as server:
        yield server


@pytest.fixture(scope="module")
def gpt(tool_server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{tool_server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def claude(tool_server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=tool_server.url, api_key="none", max_retries=0)


def chat_tokens(server: Server, messages: list[Any]) -> int:
    tool = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
    return server.post("/tokenize", messages=messages, tools=[tool]).json()["count"]


def history(call_id: str, text: str = "Wait.") -> list[Any]:
    """A chat in which the function was called, and what it gave."""
    call = {"id": call_id, "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    return [
        {"role": "user", "content": ANSWER},
        {"role": "assistant", "content": text, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "content": "21"},
    ]


def test_responses_with_a_call(tool_server: Server, gpt: openai.OpenAI):
    answer = gpt.responses.create(model="M", input=ANSWER, tools=[FUNCTION])
    thought, message, call = answer.output
    assert thought.type == "reasoning" and thought.content is not None
    assert thought.content[0].text == "hm"
    assert message.type == "message" and answer.output_text == "Wait."
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("f", ARGUMENTS)
    assert {item.status for item in answer.output} == {"completed"}
    assert answer.tools[0].name == "f" and answer.tool_choice == "auto"
    assert answer.usage is not None and answer.usage.output_tokens_details.reasoning_tokens > 0

    output = {"type": "function_call_output", "call_id": call.call_id, "output": "21"}
    more: Any = {"model": "M", "tools": [FUNCTION], "max_output_tokens": 1}
    expected = chat_tokens(tool_server, history(call.call_id))
    stored = gpt.responses.create(input=[output], previous_response_id=answer.id, **more)
    assert stored.usage is not None and stored.usage.input_tokens == expected
    items = [{"role": "user", "content": ANSWER}, *answer.model_dump()["output"], output]
    resent = gpt.responses.create(input=items, **more)
    assert resent.usage is not None and resent.usage.input_tokens == expected


def test_responses_stream_a_call(gpt: openai.OpenAI):
    events = list(gpt.responses.create(model="M", input=ANSWER, tools=[FUNCTION], stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    once = [kind for i, kind in enumerate(kinds) if i == 0 or kind != kinds[i - 1]]
    assert once == ORDER
    assert [event.sequence_number for event in events] == list(range(len(events)))
    whole = gpt.responses.create(model="M", input=ANSWER, tools=[FUNCTION])
    with gpt.responses.stream(model="M", input=ANSWER, tools=[FUNCTION]) as stream:
        final = stream.get_final_response()
    unique = {"id": True, "call_id": True, "parsed_arguments": True}
    for one, other in zip(final.output, whole.output, strict=True):
        assert one.to_dict().keys() - unique.keys() == other.to_dict().keys() - unique.keys()
        assert one.type == other.type
    assert final.output_text == "Wait."


def test_responses_that_must_call(gpt: openai.OpenAI):
    required = gpt.responses.create(
        model="M", input='[{"name": "f", "parameters": {"x": 1}}]', tools=[FUNCTION],
        tool_choice="required",
    )  # fmt: skip
    named = gpt.responses.create(
        model="M", input='{"x": 1}', tools=[FUNCTION],
        tool_choice={"type": "function", "name": "f"},
    )  # fmt: skip
    for answer in (required, named):
        [call] = answer.output
        assert call.type == "function_call"
        assert (call.name, json.loads(call.arguments)) == ("f", ARGUMENTS)


def test_responses_in_a_form(gpt: openai.OpenAI):
    class Point(pydantic.BaseModel):
        x: int

    parsed = gpt.responses.parse(model="M", input='{"x": 1}', text_format=Point)
    assert parsed.output_parsed == Point(x=1)
    with pytest.raises(openai.BadRequestError, match="nonsense") as refused:
        form: Any = {"type": "json_schema", "name": "n", "schema": {"type": "nonsense"}}
        gpt.responses.create(model="M", input="x", text={"format": form})
    assert refused.value.param == "text"


def test_messages_with_a_call(tool_server: Server, claude: anthropic.Anthropic):
    asked: dict[str, Any] = {
        "model": "M", "max_tokens": 100, "tools": [TOOL],
        "messages": [{"role": "user", "content": ANSWER}],
    }  # fmt: skip
    answer = claude.messages.create(**asked)
    thought, text, call = answer.content
    assert thought.type == "thinking" and thought.thinking == "hm"
    assert text.type == "text" and text.text == "Wait."
    assert call.type == "tool_use" and (call.name, call.input) == ("f", ARGUMENTS)
    assert answer.stop_reason == "tool_use"
    with claude.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    assert final.stop_reason == "tool_use"
    for one, other in zip(final.content, answer.content, strict=True):
        assert one.model_dump(exclude={"id"}) == other.model_dump(exclude={"id"})

    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "21"}
    turns: list[Any] = [
        *asked["messages"],
        {"role": "assistant", "content": [block.model_dump() for block in answer.content]},
        {"role": "user", "content": [result]},
    ]
    counted = claude.messages.count_tokens(model="M", messages=turns, tools=[TOOL]).input_tokens
    assert counted == chat_tokens(tool_server, history(call.id))
    turns[-1]["content"].append({"type": "text", "text": "go on"})
    more = [*history(call.id), {"role": "user", "content": "go on"}]
    counted = claude.messages.count_tokens(model="M", messages=turns, tools=[TOOL]).input_tokens
    assert counted == chat_tokens(tool_server, more)


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ('[{"name": "f", "parameters": {"x": 1}}]', {"type": "any"}),
        ('{"x": 1}', {"type": "tool", "name": "f", "disable_parallel_tool_use": True}),
    ],
)
def test_messages_that_must_call(claude: anthropic.Anthropic, text: str, choice: Any):
    turns: list[Any] = [{"role": "user", "content": text}]
    answer = claude.messages.create(
        model="M", max_tokens=100, messages=turns, tools=[TOOL], tool_choice=choice
    )
    [call] = answer.content
    assert call.type == "tool_use" and (call.name, call.input) == ("f", ARGUMENTS)


def test_messages_may_ask_for_thoughts(claude: anthropic.Anthropic):
    turns: list[Any] = [{"role": "user", "content": "x"}]

    def count(**thinking: Any) -> int:
        counted = claude.messages.count_tokens(model="M", messages=turns, **thinking)
        return counted.input_tokens

    plain = count()
    assert count(thinking={"type": "disabled"}) == plain
    assert count(thinking={"type": "enabled", "budget_tokens": 1024}) > plain


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"tools": [{"type": "web_search"}]}, ["web_search"]),
        ({"tools": [{"type": "function"}]}, ["function"]),
        ({"tools": [FUNCTION, FUNCTION]}, ["two functions"]),
        ({"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "g"}}, ["'g'"]),
        ({"tools": [FUNCTION], "tool_choice": {"type": "mcp"}}, ["tool_choice"]),
        ({"input": [{"type": "function_call", "call_id": "c"}]}, ["function_call"]),
    ],
)
def test_bad_requests(tool_server: Server, body: dict[str, Any], words: list[str]):
    for streamed in (False, True):
        answer = tool_server.post("/v1/responses", **{"input": "x", **body, "stream": streamed})
        check_error(answer, 400, *words)
