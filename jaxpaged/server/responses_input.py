"""From the input of a Responses request to the messages of a chat."""

from __future__ import annotations

from typing import Any

from jaxpaged.engine.errors import BadRequestError
from jaxpaged.server.protocol import ChatMessage
from jaxpaged.server.response_store import ResponseStore
from jaxpaged.server.responses_protocol import InputItem, ResponsesRequest

ROLES = {"developer": "system"}  # what templates call them, where that differs
TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


def refuse_unsupported_fields(body: ResponsesRequest) -> None:
    """Raises BadRequestError for what would be answered wrongly if it were ignored."""
    if body.tools and body.tool_choice != "none":
        raise BadRequestError("tools are not supported yet at /v1/responses", "tools")
    if body.tool_choice not in (None, "none", "auto"):
        raise BadRequestError("tool_choice is not supported yet at /v1/responses", "tool_choice")
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


def conversation(body: ResponsesRequest, store: ResponseStore) -> list[ChatMessage]:
    """What was said up to now: that of the previous response, then the input.

    Raises:
        BadRequestError: the previous response is not there, or an item is no text.
    """
    turns: list[ChatMessage] = []
    if body.previous_response_id is not None:
        previous = store.get(body.previous_response_id)
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


def _message(item: InputItem) -> ChatMessage:
    if item.type != "message":
        raise BadRequestError(
            f"the input holds an item of type {item.type!r}; only messages are supported", "input"
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
