"""What travels over HTTP about tools: offered, called, chosen."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field


class FunctionDefinition(BaseModel, extra="allow"):
    """A function on offer; more fields reach the template as they are."""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema


class Tool(BaseModel, extra="allow"):
    """A tool on offer: a function, there is no other kind."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(BaseModel):
    """Names a function."""

    name: str


class NamedToolChoice(BaseModel):
    """The one function that must be called."""

    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


class CalledFunction(BaseModel, extra="allow"):
    """What an earlier answer called; its arguments are text of JSON, as a rule."""

    name: str
    arguments: str | dict[str, Any] | None = None


class MessageToolCall(BaseModel, extra="allow"):
    """A call in the history of a chat."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class FunctionCall(BaseModel):
    """A function and the text of its arguments, a JSON object."""

    name: str
    arguments: str


class AnswerToolCall(BaseModel):
    """A call in an answer."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class DeltaToolCall(AnswerToolCall):
    """A call in a stream. It comes in one piece."""

    index: int
