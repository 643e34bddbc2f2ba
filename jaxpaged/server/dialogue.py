"""Conversations of other APIs in the form that chat templates take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jaxpaged.server.parsing.calls import ToolCall
from jaxpaged.server.protocol import ChatMessage
from jaxpaged.server.tool_protocol import CalledFunction, MessageToolCall


def merged(messages: Iterable[ChatMessage]) -> list[ChatMessage]:
    """Neighbours of one role as one message: many templates refuse two in a row.

    Args:
        messages: with plain text for content. Results of tools stay apart.
    """
    found: list[ChatMessage] = []
    for message in messages:
        if found and found[-1].role == message.role != "tool":
            last = found[-1]
            texts = [text for text in (last.content, message.content) if text]
            calls = [*(last.tool_calls or ()), *(message.tool_calls or ())]
            found[-1] = ChatMessage(
                role=message.role, content="\n\n".join(map(str, texts)), tool_calls=calls or None
            )
        else:
            found.append(message)
    return found


def said(text: str, calls: Sequence[ToolCall] = ()) -> ChatMessage:
    """An earlier answer."""
    written = [
        MessageToolCall(
            id=call.id, function=CalledFunction(name=call.name, arguments=call.arguments)
        )
        for call in calls
    ]
    return ChatMessage(role="assistant", content=text, tool_calls=written or None)


def tool_result(call_id: str, text: str) -> ChatMessage:
    """What a call gave."""
    return ChatMessage.model_validate({"role": "tool", "content": text, "tool_call_id": call_id})
