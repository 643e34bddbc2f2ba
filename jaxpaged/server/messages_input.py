"""From Anthropic's messages and tools to those of a chat."""

from __future__ import annotations

from typing import Any

from msgspec import json

from jaxpaged.engine.errors import BadRequestError
from jaxpaged.server.context import ServerContext
from jaxpaged.server.dialogue import merged, said, tool_result
from jaxpaged.server.messages_protocol import Blocks, MessagesFields, ToolParam, TurnParam
from jaxpaged.server.parsing.calls import ToolCall
from jaxpaged.server.protocol import ChatMessage, ChatTemplateFields
from jaxpaged.server.tool_protocol import (
    FunctionDefinition,
    FunctionName,
    NamedToolChoice,
    Tool,
    ToolChoice,
)
from jaxpaged.server.tools import ToolUse, read_tools

THOUGHTS = ("thinking", "redacted_thinking")  # blocks of earlier turns that no template wants


def template_fields(
    body: MessagesFields, kwargs: dict[str, Any] | None, context: ServerContext
) -> ChatTemplateFields:
    """The chat. If it ends with the assistant's turn, the answer is begun.

    Raises:
        BadRequestError: a block that is neither text nor about tools, or thinking where the server
            does not know how the model thinks.
    """
    kwargs = {**(kwargs or {})}
    if body.thinking is not None:
        wanted = body.thinking.type != "disabled"
        if wanted and context.config.reasoning_parser is None:
            raise BadRequestError(
                "thinking needs a server that was started with --reasoning-parser", "thinking"
            )
        kwargs.setdefault("enable_thinking", wanted)  # by Qwen's and others' templates
    turns = [message for turn in body.messages for message in _messages(turn)]
    system = _text(body.system or "")
    if system:
        turns.insert(0, ChatMessage(role="system", content=system))
    messages = merged(turns)
    return ChatTemplateFields(
        messages=messages,
        continue_final_message=messages[-1].role == "assistant",
        chat_template_kwargs=kwargs,
    )


def tool_use(body: MessagesFields, context: ServerContext) -> ToolUse:
    """The tools.

    Raises:
        BadRequestError: they contradict each other, or the server cannot run or read them.
    """
    given = body.tool_choice
    choice: ToolChoice | None = None
    if given is not None and given.type == "tool":
        name = FunctionName(name=given.name or "")
        choice = NamedToolChoice(type="function", function=name)
    elif given is not None:
        choice = "required" if given.type == "any" else "none" if given.type == "none" else "auto"
    parallel = None if given is None else not given.disable_parallel_tool_use
    return read_tools([_tool(tool) for tool in body.tools or ()], choice, parallel, context.config)


def _tool(given: ToolParam) -> Tool:
    if given.type not in (None, "custom"):
        raise BadRequestError(
            f"tools holds one of type {given.type!r}, which this server cannot run; only functions "
            "of the client are supported",
            "tools",
        )
    fields = {
        "name": given.name,
        "description": given.description,
        "parameters": given.input_schema,
    }
    named = {name: value for name, value in fields.items() if value is not None}
    return Tool(type="function", function=FunctionDefinition.model_validate(named))


def _messages(turn: TurnParam) -> list[ChatMessage]:
    """A turn; results of tools are messages of their own, before what the user says."""
    if isinstance(turn.content, str):
        return [ChatMessage(role=turn.role, content=turn.content)]
    results, calls, rest = [], [], []
    for block in turn.content:
        kind, name = block.get("type"), block.get("name")
        if kind == "tool_result" and turn.role == "user":
            call_id = str(block.get("tool_use_id", ""))
            results.append(tool_result(call_id, _text(block.get("content") or "")))
        elif kind == "tool_use" and turn.role == "assistant" and isinstance(name, str):
            arguments = json.encode(block.get("input") or {}).decode()
            calls.append(ToolCall(name, arguments, str(block.get("id", ""))))
        else:
            rest.append(block)
    text = _text(rest)
    if turn.role == "assistant":
        return [said(text, calls)]
    return [*results, *([ChatMessage(role="user", content=text)] if text or not results else [])]


def _text(content: Blocks) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind in THOUGHTS:
            continue
        if kind != "text" or not isinstance(block.get("text"), str):
            raise BadRequestError(
                f"the input has a content block of type {kind!r}; only text and the results of "
                "tools are supported",
                "messages",
            )
        texts.append(block["text"])
    return "\n".join(texts)
