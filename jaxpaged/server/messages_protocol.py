"""What travels over HTTP at /v1/messages: Anthropic's Messages API, as far as it is text."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from jaxpaged.server.protocol import GenerationRequest

Blocks = str | list[dict[str, Any]]


class TurnParam(BaseModel):
    """One turn of the conversation."""

    role: Literal["user", "assistant"]
    content: Blocks


class MessagesFields(BaseModel):
    """What a message and the count of its tokens have in common."""

    messages: list[TurnParam] = Field(min_length=1)
    system: Blocks | None = None

    # Not supported: refused with their names.
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None


class MessagesRequest(GenerationRequest, MessagesFields):
    """POST /v1/messages. Unknown fields are ignored."""

    max_tokens: int = Field(ge=1)
    stop_sequences: list[str] | None = None
    metadata: dict[str, Any] | None = None  # accepted, unused
    chat_template_kwargs: dict[str, Any] | None = None


class CountTokensRequest(MessagesFields):
    """POST /v1/messages/count_tokens."""

    model: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TextBlock(BaseModel):
    """The text of an answer."""

    type: Literal["text"] = "text"
    text: str = ""


class MessagesUsage(BaseModel):
    """Tokens of a message; those that the cache served are counted apart."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int


StopReason = Literal["end_turn", "max_tokens", "stop_sequence"]


class MessagesResponse(BaseModel):
    """Answer of /v1/messages."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[TextBlock] = []
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessagesUsage


class TokenCount(BaseModel):
    """Answer of /v1/messages/count_tokens."""

    input_tokens: int


class AnthropicErrorInfo(BaseModel):
    """Why a request failed."""

    type: str
    message: str


class AnthropicErrorResponse(BaseModel):
    """Body of every 4xx and 5xx of these routes."""

    type: Literal["error"] = "error"
    error: AnthropicErrorInfo
