"""Tools and reasoning in chats. The first user message is what the model answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from fake_server import Server, running_with_tools
from http_checks import check_error, choices, stream, strict_json

PATH = "/v1/chat/completions"
TEMPLATE = """<|bos|>{{ tools | map(attribute="function.name") | join(",") if tools }}
{%- for message in messages %}{{ "<|" ~ message.role ~ "|>" ~ message.content }}
{%- for call in message.tool_calls %}{{ call.id ~ call.function.name }}
{%- for key, value in call.function.arguments.items() %}{{ key ~ "=" ~ value }}{% endfor %}
{%- endfor %}{{ message.tool_call_id }}{{ message.name }}{{ message.reasoning_content }}<|end|>
{%- endfor %}{{ opening }}"""
CALL = '{"name": "f", "arguments": {"x": 1, "y": "é</tool_call>"}}'
ARGUMENTS = {"x": 1, "y": "é</tool_call>"}
SHORT = '<tool_call>{"name": "f"}</tool_call>'
TAGGED = f"<tool_call>\n{CALL}\n</tool_call>"
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
DEEP = json.loads('{"not": ' * 800 + "{}" + "}" * 800)


def function(name: str, parameters: dict[str, Any]) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [function("f", SCHEMA), function("g", SCHEMA)]
BROKEN = function("f", {"properties": {"x": {"type": "nonsense"}}})
NAMED: Any = {"type": "function", "function": {"name": "g"}}


@pytest.fixture(scope="module")
def tool_server(model_folder: Path) -> Iterator[Server]:
    with running_with_tools(model_folder, TEMPLATE) as server:
        yield server


@pytest.fixture(scope="module")
def tool_client(tool_server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{tool_server.url}/v1", api_key="none", max_retries=0)


def says(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def ask(server: Server, text: str, **body: Any) -> dict[str, Any]:
    """The answer's one choice, the same whether streamed or not."""
    body = {"messages": says(text), **body}
    answer = server.post(PATH, **body)
    assert answer.status_code == 200, answer.text
    whole = strict_json(answer.text)["choices"][0]
    said = choices(stream(server, PATH, **body))
    deltas = [choice["delta"] for choice in said]
    message = whole["message"]
    for name in ("content", "reasoning", "reasoning_content"):
        joined = "".join(delta.get(name) or "" for delta in deltas)
        assert joined == (message.get(name) or "")
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [call.pop("index") for call in calls] == list(range(len(calls)))
    assert len({call.pop("id") for call in calls}) == len(calls)
    assert calls == [
        {key: value for key, value in call.items() if key != "id"}
        for call in message.get("tool_calls", [])
    ]
    assert said[-1]["finish_reason"] == whole["finish_reason"]
    return whole


def called(choice: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    calls = choice["message"].get("tool_calls", [])
    assert all(call["type"] == "function" and call["id"] for call in calls)
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


def test_the_official_client(tool_client: openai.OpenAI):
    body: dict[str, Any] = {"model": "M", "messages": says(f"Wait. {TAGGED}"), "tools": TOOLS}
    whole = tool_client.chat.completions.create(**body).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content == "Wait."
    assert whole.message.tool_calls is not None
    [call] = whole.message.tool_calls
    assert call.type == "function" and call.id.startswith("chatcmpl-tool-")
    assert (call.function.name, json.loads(call.function.arguments)) == ("f", ARGUMENTS)
    with tool_client.chat.completions.stream(**body) as events:
        final = events.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    assert final.message.content == "Wait."
    [streamed] = final.message.tool_calls or []
    assert streamed.function.model_dump(include={"name", "arguments"}) == call.function.model_dump()


def test_several_calls(tool_server: Server):
    text = f"{SHORT}\n{SHORT.replace('f', 'g')}"
    choice = ask(tool_server, text, tools=TOOLS)
    assert called(choice) == [("f", {}), ("g", {})]
    assert choice["message"]["content"] is None
    choice = ask(tool_server, text, tools=TOOLS, parallel_tool_calls=False)
    assert called(choice) == [("f", {})]


@pytest.mark.parametrize("text", ["hello world", f"<tool_call>{CALL[:-1]}</tool_call>", "<tool_"])
def test_no_call_is_content(tool_server: Server, text: str):
    choice = ask(tool_server, text, tools=TOOLS, tool_choice="auto")
    assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}
    assert choice["finish_reason"] == "stop"


def test_a_call_that_is_cut_off(tool_server: Server):
    choice = ask(tool_server, TAGGED, tools=TOOLS, max_tokens=20)
    assert choice["finish_reason"] == "length"
    assert TAGGED.startswith(choice["message"]["content"])
    assert called(choice) == []


def test_no_tools_no_calls(tool_server: Server):
    for body in ({}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}):
        choice = ask(tool_server, TAGGED, **body)
        assert choice["message"]["content"] == TAGGED
        assert choice["finish_reason"] == "stop"


def test_a_call_that_a_grammar_enforced(tool_server: Server):
    text = '[{"name": "f", "parameters": {"x": 1}}, {"name": "g", "parameters": {}}]'
    choice = ask(tool_server, text, tools=TOOLS, tool_choice="required")
    assert called(choice) == [("f", {"x": 1}), ("g", {})]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
    text = '<think>so</think>\n[{"name": "f", "parameters": {"x": 1}}]'
    choice = ask(tool_server, text, tools=TOOLS, tool_choice="required")
    assert (choice["message"]["reasoning"], called(choice)) == ("so", [("f", {"x": 1})])
    choice = ask(tool_server, '{"x": 1}', tools=TOOLS, tool_choice=NAMED, stop='"x"')
    assert called(choice) == [("g", {"x": 1})]
    assert choice["finish_reason"] == "tool_calls"


def test_reasoning(tool_server: Server, tool_client: openai.OpenAI):
    text = f"<think>\nI must\n</think>\n\nWait. {TAGGED}"
    choice = ask(tool_server, text, tools=TOOLS)
    message = choice["message"]
    assert message["reasoning_content"] == message["reasoning"] == "I must"
    assert message["content"] == "Wait."
    assert called(choice) == [("f", ARGUMENTS)]
    hidden = ask(tool_server, text, tools=TOOLS, include_reasoning=False)
    assert "reasoning" not in hidden["message"] and hidden["message"]["content"] == "Wait."
    body: dict[str, Any] = {"model": "M", "messages": says("<think>a</think>b")}
    whole = tool_client.chat.completions.create(**body)
    assert whole.choices[0].message.reasoning == "a"  # type: ignore[attr-defined]
    assert whole.usage is not None
    shown = tool_client.chat.completions.create(**body, extra_body={"include_reasoning": False})
    assert shown.usage == whole.usage


def test_reasoning_that_the_prompt_began(tool_server: Server):
    begun = {"chat_template_kwargs": {"opening": "<think>\n"}}
    message = ask(tool_server, "well</think>hi", **begun)["message"]
    assert (message["reasoning"], message["content"]) == ("well", "hi")
    skipped = {"chat_template_kwargs": {"opening": "<think>\n\n</think>\n\n"}}
    message = ask(tool_server, "hi", **skipped)["message"]
    assert message == {"role": "assistant", "content": "hi", "refusal": None}


def test_what_the_template_gets(tool_server: Server):
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        *says("hi"),
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "21"}]},
    ]

    def prompt(**body: Any) -> str:
        answer = tool_server.post(PATH, messages=messages, return_token_ids=True, **body)
        assert answer.status_code == 200, answer.text
        ids = answer.json()["prompt_token_ids"]
        return tool_server.post("/detokenize", tokens=ids).json()["prompt"]

    history = "<|user|>hi<|end|><|assistant|>c1fx=1hm<|end|><|tool|>21c1f<|end|>"
    assert prompt(tools=TOOLS) == f"<|bos|>f,g{history}"
    assert prompt(tools=TOOLS, tool_choice=NAMED) == f"<|bos|>f,g{history}"
    assert prompt(tools=TOOLS, tool_choice="none") == f"<|bos|>{history}"
    assert prompt() == f"<|bos|>{history}"
    count = tool_server.post("/tokenize", messages=messages, tools=TOOLS).json()["count"]
    assert count > tool_server.post("/tokenize", messages=messages).json()["count"]
    call["function"]["arguments"] = "oops"  # type: ignore[index]
    refused = tool_server.post(PATH, messages=messages)
    check_error(refused, 400, "the chat template refuses")
    call["function"]["arguments"] = ""  # type: ignore[index]
    assert prompt() == f"<|bos|>{history.replace('x=1', '')}"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"tool_choice": "required"}, ["tool_choice", "tools"]),
        ({"tool_choice": NAMED}, ["tool_choice", "tools"]),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, ["tool_choice"]),
        ({"tools": TOOLS[:1], "tool_choice": NAMED}, ["'g'"]),
        ({"tools": [TOOLS[0], TOOLS[0]]}, ["two functions", "'f'"]),
        ({"tools": [{"type": "function"}]}, ["tools.0.function"]),
        ({"tools": [{"type": "browser", "function": {"name": "f"}}]}, ["tools.0.type"]),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, ["tools.0.function.name"]),
        ({"tools": [BROKEN], "tool_choice": "required"}, ["constrained", "nonsense"]),
        ({"tools": [function("f", DEEP)], "tool_choice": "required"}, ["too deeply"]),
        ({"tools": [function("f", {"type": "array"})], "tool_choice": NAMED}, ["'g'"]),
        ({"tools": [function("g", {"type": "array"})], "tool_choice": NAMED}, ["'object'"]),
        (
            {"tools": TOOLS, "tool_choice": NAMED, "response_format": {"type": "json_object"}},
            ["response_format", "tool_choice"],
        ),
        (
            {"tools": TOOLS, "tool_choice": "required", "structured_outputs": {"regex": "a"}},
            ["structured_outputs", "tool_choice"],
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "c"}]}]}, ["function"]),
    ],
)
def test_bad_requests(tool_server: Server, body: dict[str, Any], words: list[str]):
    for streamed in (False, True):
        answer = tool_server.post(PATH, **{"messages": says("x"), **body, "stream": streamed})
        check_error(answer, 400, *words)


def test_auto_needs_flags(slow_server: Server):
    for body in ({}, {"tool_choice": "auto"}):
        answer = slow_server.post(PATH, messages=says("x"), tools=TOOLS, **body)
        flags = ("--enable-auto-tool-choice", "--tool-call-parser")
        check_error(answer, 400, *flags, param="tool_choice")
