"""From the input of a Responses request to the messages of a chat."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxpaged.engine.errors import BadRequestError
from jaxpaged.server.dialogue import said, tool_result
from jaxpaged.server.parsing.calls import ToolCall
from jaxpaged.server.protocol import ChatMessage
from jaxpaged.server.response_store import StoredResponse
from jaxpaged.server.responses_protocol import (
    ChosenTool,
    InputItem,
    ResponsesRequest,
    ResponsesTool,
)
from jaxpaged.server.tool_protocol import (
    FunctionDefinition,
    FunctionName,
    NamedToolChoice,
    Tool,
    ToolChoice,
)
from jaxpaged.server.tools import ToolUse, read_tools
from jaxpaged.server_config import ServerConfig

ROLES = {"developer": "system"}  # what templates call them, where that differs
TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


def refuse_unsupported_fields(body: ResponsesRequest) -> None:
    """Raises BadRequestError for what would be answered wrongly if it were ignored."""
    if body.truncation not in (None, "disabled"):
        raise BadRequestError(
            "truncation is not supported, other than 'disabled': send a shorter input",
            "truncation",
        )
    for name in ("background", "conversation", "prompt", "prompt_logprobs"):
        if getattr(body, name) not in (None, False):
            raise BadRequestError(f"{name} is not supported at /v1/responses", name)
    if body.n not in (None, 1):
        raise BadRequestError("a response has one answer: n must be 1", "n")
    if body.max_tokens is not None:
        raise BadRequestError("max_tokens is called max_output_tokens here", "max_tokens")


def conversation(
    body: ResponsesRequest, stored: Callable[[str], StoredResponse | None]
) -> list[ChatMessage]:
    """What was said up to now: that of the previous response, then the input.

    Args:
        stored: finds the previous response.

    Raises:
        BadRequestError: the previous response is not there, or an item is no text.
    """
    turns: list[ChatMessage] = []
    if body.previous_response_id is not None:
        previous = stored(body.previous_response_id)
        if previous is None:
            raise BadRequestError(
                f"there is no response {body.previous_response_id!r} to go on from: it was not "
                "stored, or is not kept any more",
                "previous_response_id",
            )
        turns += previous.conversation
    if isinstance(body.input, str):
        turns.append(ChatMessage(role="user", content=body.input))
    else:
        turns += [_message(item) for item in body.input if item.type != "reasoning"]
    if not turns:
        raise BadRequestError("the input is empty: it needs at least one message", "input")
    return turns


def tool_use(body: ResponsesRequest, config: ServerConfig) -> ToolUse:
    """The tools.

    Raises:
        BadRequestError: they contradict each other, or the server cannot run or read them.
    """
    choice: ToolChoice | None
    if isinstance(body.tool_choice, ChosenTool):
        name = FunctionName(name=body.tool_choice.name)
        choice = NamedToolChoice(type="function", function=name)
    else:
        choice = body.tool_choice
    tools = [_tool(tool) for tool in body.tools or ()]
    return read_tools(tools, choice, body.parallel_tool_calls, config)


def _tool(given: ResponsesTool) -> Tool:
    if given.type != "function" or not given.name:
        raise BadRequestError(
            f"tools holds one of type {given.type!r}, which this server cannot run; only functions "
            "with names are supported",
            "tools",
        )
    fields = given.model_dump(exclude={"type"}, exclude_none=True)
    return Tool(type="function", function=FunctionDefinition.model_validate(fields))


def _message(item: InputItem) -> ChatMessage:
    if item.type == "function_call" and item.name is not None:
        call = ToolCall(item.name, item.arguments or "{}", item.call_id or "")
        return said("", [call])
    if item.type == "function_call_output" and item.output is not None:
        return tool_result(item.call_id or "", _text(item.output))
    if item.type != "message":
        raise BadRequestError(
            f"the input holds an item of type {item.type!r}, or one that is incomplete; messages, "
            "function calls and their outputs are supported",
            "input",
        )
    if item.role is None or item.content is None:
        raise BadRequestError("a message of the input needs role and content", "input")
    return ChatMessage(role=ROLES.get(item.role, item.role), content=_text(item.content))


def _text(content: str | list[dict[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        kind = part.get("type")
        text = part.get(TEXTS[kind]) if isinstance(kind, str) and kind in TEXTS else None
        if not isinstance(text, str):
            raise BadRequestError(
                f"the input has a content part of type {kind!r}; only text is supported", "input"
            )
        texts.append(text)
    return "\n".join(texts)
