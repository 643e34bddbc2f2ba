"""Conversations of other APIs in the form that chat templates take."""

from __future__ import annotations

from collections.abc import Iterable

from jaxpaged.server.protocol import ChatMessage


def merged(messages: Iterable[ChatMessage]) -> list[ChatMessage]:
    """Neighbours of one role as one message: many templates refuse two in a row.

    Args:
        messages: with plain text for content.
    """
    found: list[ChatMessage] = []
    for message in messages:
        if found and found[-1].role == message.role:
            text = f"{found[-1].content}\n\n{message.content}"
            found[-1] = ChatMessage(role=message.role, content=text)
        else:
            found.append(message)
    return found
