"""What travels over HTTP at /v1/responses: OpenAI's Responses API, as far as it is text."""

from __future__ import annotations

import time
from typing import Any, Literal

from pydantic import BaseModel, Field, model_validator

from jaxpaged.server.many import Many, Messages, Tools
from jaxpaged.server.protocol import GenerationRequest, TokenLogprob, omitted


class InputItem(BaseModel, extra="allow"):
    """A part of the conversation: a message, a call of a function or what that gave."""

    type: str = "message"
    role: str | None = None
    content: str | Many[dict[str, Any]] | None = None
    # Of function_call and function_call_output.
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | Many[dict[str, Any]] | None = None


class TextFormat(BaseModel, extra="allow"):
    """What form the answer must have."""

    type: str = "text"


class TextSettings(BaseModel):
    """Settings of a text answer."""

    format: TextFormat = TextFormat()
    verbosity: str | None = None  # accepted, unused


class Reasoning(BaseModel):
    """How much the model should think; `effort` reaches the chat template."""

    effort: str | None = None
    summary: str | None = None  # accepted, unused


class ResponsesTool(BaseModel, extra="allow"):
    """A function on offer."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # accepted: what must be called is enforced either way


class ChosenTool(BaseModel):
    """The one function that must be called."""

    type: Literal["function"]
    name: str


class ResponsesRequest(GenerationRequest):
    """POST /v1/responses. Unknown fields are ignored."""

    @model_validator(mode="before")
    @classmethod
    def _format(cls, fields: Any) -> Any:
        """`text.format` is what chats call response_format."""
        text = fields.get("text") if isinstance(fields, dict) else None
        form = text.get("format") if isinstance(text, dict) else None
        if not isinstance(form, dict) or form.get("type") in (None, "text"):
            return fields
        if form["type"] == "json_schema":
            inner = {name: value for name, value in form.items() if name != "type"}
            form = {"type": "json_schema", "json_schema": inner}
        return {**fields, "response_format": form}

    @property
    def sent_names(self) -> dict[str, str]:
        names = {"prompt": "input", "max_tokens": "max_output_tokens", "logprobs": "top_logprobs"}
        if self.text is not None and not self.structured_outputs:
            names["structured_outputs"] = "text"
        return {**super().sent_names, **names}

    input: str | Messages[InputItem]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None  # None: yes
    max_output_tokens: int | None = Field(None, ge=1)
    metadata: dict[str, str] | None = Field(None, max_length=16)
    text: TextSettings | None = None
    reasoning: Reasoning | None = None
    include: Many[str] | None = None
    top_logprobs: int | None = Field(None, ge=0)
    chat_template_kwargs: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    tools: Tools[ResponsesTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    prompt_cache_key: str | None = None  # accepted, unused: every prefix is cached
    safety_identifier: str | None = None  # accepted, unused
    service_tier: str | None = None  # accepted, unused

    # Not supported: refused with their names.
    truncation: str | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None


class OutputText(BaseModel):
    """The text of an answer."""

    type: Literal["output_text"] = "output_text"
    text: str = ""
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


Status = Literal["in_progress", "completed", "incomplete"]


class OutputMessage(BaseModel):
    """An answer, whole or in the making."""

    id: str
    type: Literal["message"] = "message"
    status: Status = "in_progress"
    role: Literal["assistant"] = "assistant"
    content: list[OutputText] = []


class ReasoningText(BaseModel):
    """What the model thought."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str = ""


class ReasoningItem(BaseModel):
    """The model's thoughts before its answer."""

    id: str
    type: Literal["reasoning"] = "reasoning"
    status: Status = "in_progress"
    summary: list[Any] = []
    content: list[ReasoningText] = []


class FunctionCallItem(BaseModel):
    """A call of a function that the client runs."""

    id: str
    type: Literal["function_call"] = "function_call"
    status: Status = "in_progress"
    call_id: str
    name: str
    arguments: str = ""


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem


class InputTokensDetails(BaseModel):
    """Of the input's tokens, those that the prefix cache served."""

    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputTokensDetails(BaseModel):
    """Of the output's tokens, those that were thought rather than said."""

    reasoning_tokens: int = 0


class ResponsesUsage(BaseModel):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()
    total_tokens: int


class IncompleteDetails(BaseModel):
    """Why an answer ends too early."""

    reason: Literal["max_output_tokens", "content_filter"]


class ResponsesError(BaseModel):
    """Why there is no answer."""

    code: str
    message: str


class ResponsesResponse(BaseModel):
    """Answer of /v1/responses."""

    id: str
    object: Literal["response"] = "response"
    created_at: int = Field(default_factory=lambda: int(time.time()))
    completed_at: int | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed", "cancelled"] = "in_progress"
    background: bool = False
    error: ResponsesError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None = None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: Reasoning
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float
    text: TextSettings
    tool_choice: Literal["none", "auto", "required"] | ChosenTool = "auto"
    tools: list[ResponsesTool] = []
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponsesUsage | None = None
    user: str | None = omitted()


class DeletedResponse(BaseModel):
    """Answer of DELETE /v1/responses/{id}."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True
