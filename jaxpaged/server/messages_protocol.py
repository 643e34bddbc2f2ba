"""What travels over HTTP at /v1/messages: Anthropic's Messages API, as far as it is text."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from jaxpaged.server.many import Many, Messages, Strings, Tools
from jaxpaged.server.protocol import GenerationRequest

Blocks = str | Many[dict[str, Any]]


class TurnParam(BaseModel):
    """One turn of the conversation."""

    role: Literal["user", "assistant"]
    content: Blocks


class ToolParam(BaseModel, extra="allow"):
    """A function on offer."""

    type: str | None = None  # None or custom: the client runs it
    name: str = Field(min_length=1)
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class ToolChoiceParam(BaseModel):
    """Whether tools may or must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class ThinkingParam(BaseModel, extra="allow"):
    """Whether the model should think first."""

    type: Literal["enabled", "adaptive", "disabled"]


class MessagesFields(BaseModel):
    """What a message and the count of its tokens have in common."""

    messages: Messages[TurnParam] = Field(min_length=1)
    system: Blocks | None = None
    tools: Tools[ToolParam] | None = None
    tool_choice: ToolChoiceParam | None = None
    thinking: ThinkingParam | None = None


class MessagesRequest(GenerationRequest, MessagesFields):
    """POST /v1/messages. Unknown fields are ignored."""

    max_tokens: int = Field(ge=1)
    stop_sequences: Strings | None = None
    metadata: dict[str, Any] | None = None  # accepted, unused
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def sent_names(self) -> dict[str, str]:
        return {**super().sent_names, "prompt": "messages", "stop": "stop_sequences"}


class CountTokensRequest(MessagesFields):
    """POST /v1/messages/count_tokens."""

    model: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TextBlock(BaseModel):
    """The text of an answer."""

    type: Literal["text"] = "text"
    text: str = ""


class ThinkingBlock(BaseModel):
    """What the model thought before its answer."""

    type: Literal["thinking"] = "thinking"
    thinking: str = ""
    signature: str = ""


class ToolUseBlock(BaseModel):
    """A call in an answer."""

    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any] = {}


Block = TextBlock | ThinkingBlock | ToolUseBlock


class MessagesUsage(BaseModel):
    """Tokens of a message; those that the cache served are counted apart."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessagesResponse(BaseModel):
    """Answer of /v1/messages."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Block] = []
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
