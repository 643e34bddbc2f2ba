"""What travels over HTTP: OpenAI's requests and responses, and vLLM's additions to them."""

from __future__ import annotations

import math
import time
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

from jaxpaged.outputs import Logprob
from jaxpaged.sampling_params import MAX_LOGIT_BIAS
from jaxpaged.server.many import Many, Messages, Strings, Tools
from jaxpaged.server.structured import ResponseFormat, StructuredOutputsField
from jaxpaged.server.tool_protocol import (
    AnswerToolCall,
    DeltaToolCall,
    MessageToolCall,
    Tool,
    ToolChoice,
)

LOWEST_LOGPROB = -9999.0  # JSON has no -inf


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return logprob if math.isfinite(logprob) else LOWEST_LOGPROB


def _now() -> int:
    return int(time.time())


def omitted() -> Any:
    """A field of a response that is left out, not null, when it is None."""
    return Field(None, exclude_if=lambda value: value is None)


# -- requests ------------------------------------------------------------------------------------


class StreamOptions(BaseModel):
    """When a stream tells its usage: once at the end, or in each chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class SamplingFields(BaseModel):
    """How tokens are chosen; None: the model's own default, else `SamplingParams`'s."""

    n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | Strings | None = None
    stop_token_ids: Many[int] | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    logit_bias: dict[str, float] | None = Field(None, max_length=MAX_LOGIT_BIAS)
    allowed_token_ids: Many[int] | None = None
    bad_words: Strings | None = None
    skip_reading_prefix_cache: bool | None = None
    priority: int | None = None


class GenerationRequest(SamplingFields):
    """What completions and chats have in common. Unknown fields are ignored."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None  # accepted, unused
    truncate_prompt_tokens: int | None = None
    request_id: str | None = Field(None, pattern="^[!-~]{1,256}$")  # printable ASCII
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool | None = None  # None: the server's flag
    cache_salt: str | None = Field(None, min_length=1)

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsField | None = None

    # Not supported: refused with their names, since an answer without them would be wrong.
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None

    @property
    def sent_names(self) -> dict[str, str]:
        """What this request calls the engine's fields, where that differs."""
        return {} if self.structured_outputs else {"structured_outputs": "response_format"}


def _read_prompt(prompt: Any, read: ValidatorFunctionWrapHandler) -> Any:
    try:
        return read(prompt)
    except ValidationError:
        raise ValueError(
            "a prompt is a string, a list of token ids, or a list of several of either"
        ) from None


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: Annotated[str | Many[int] | Many[str] | Many[Many[int]], WrapValidator(_read_prompt)]
    echo: bool = False
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None
    add_special_tokens: bool = True


class ChatMessage(BaseModel, extra="allow"):
    """A message of a chat; more fields reach the template as they are."""

    role: str
    content: str | Many[dict[str, Any]] | None = None
    tool_calls: Tools[MessageToolCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same by its newer name


class ChatTemplateFields(BaseModel):
    """How a chat becomes a prompt."""

    messages: Messages[ChatMessage] = Field(min_length=1)
    add_generation_prompt: bool | None = None  # None: unless the last message is continued
    continue_final_message: bool = False
    add_special_tokens: bool = False
    tools: Tools[Tool] | None = None
    documents: Many[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ChatCompletionRequest(GenerationRequest, ChatTemplateFields):
    """POST /v1/chat/completions."""

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    echo: bool = False
    include_reasoning: bool = True
    tool_choice: ToolChoice | None = None  # None: auto
    parallel_tool_calls: bool | None = None  # False: at most one call
    functions: list[Any] | None = None
    function_call: Any = None

    @property
    def sent_names(self) -> dict[str, str]:
        names = {"prompt": "messages", "logprobs": "top_logprobs"}
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        return {**super().sent_names, **names}


# -- responses -----------------------------------------------------------------------------------


class ErrorInfo(BaseModel):
    """Why a request failed."""

    message: str
    type: str
    param: str | None = None
    code: int  # the HTTP status


class ErrorResponse(BaseModel):
    """Body of every 4xx and 5xx."""

    error: ErrorInfo


class PromptTokensDetails(BaseModel):
    """Of the prompt's tokens, those that the prefix cache served."""

    cached_tokens: int


class Usage(BaseModel):
    """Tokens of a request, over all its prompts and choices."""

    prompt_tokens: int = 0
    total_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails | None = omitted()


class PromptLogprob(BaseModel):
    """vLLM's form of a log-probability."""

    logprob: float
    rank: int
    decoded_token: str | None

    @classmethod
    def of(cls, logprob: Logprob) -> PromptLogprob:
        return cls(
            logprob=finite(logprob.logprob),
            rank=logprob.rank,
            decoded_token=logprob.decoded_token,
        )


PromptLogprobs = list[dict[int, PromptLogprob] | None]


class CompletionLogprobs(BaseModel):
    """OpenAI's older form: parallel lists, one entry a token."""

    text_offset: list[int] = []
    token_logprobs: list[float | None] = []
    tokens: list[str] = []
    top_logprobs: list[dict[str, float] | None] = []


class CompletionChoice(BaseModel):
    """One choice of one prompt: whole, or what is new of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = omitted()
    prompt_token_ids: list[int] | None = omitted()
    prompt_logprobs: PromptLogprobs | None = omitted()


class CompletionResponse(BaseModel):
    """Answer of /v1/completions, and each chunk of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int = Field(default_factory=_now)
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = omitted()


class TopLogprob(BaseModel):
    """A token that might have been chosen."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A token that was chosen, and the most likely ones at its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """OpenAI's newer form: one object a token."""

    content: list[TokenLogprob]


class AnswerMessage(BaseModel):
    """A whole answer."""

    role: str
    content: str | None
    refusal: None = None
    tool_calls: list[AnswerToolCall] | None = omitted()
    reasoning_content: str | None = omitted()
    reasoning: str | None = omitted()  # the same by its newer name


class DeltaMessage(BaseModel):
    """What is new of an answer; the role comes once."""

    role: str | None = omitted()
    content: str | None = omitted()
    tool_calls: list[DeltaToolCall] | None = omitted()
    reasoning_content: str | None = omitted()
    reasoning: str | None = omitted()


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = omitted()


class ChatResponse(BaseModel):
    """Answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int = Field(default_factory=_now)
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = omitted()
    prompt_token_ids: list[int] | None = omitted()


class ChatChunkChoice(BaseModel):
    """What is new of one answer."""

    index: int
    delta: DeltaMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = omitted()


class ChatChunk(BaseModel):
    """One event of a streamed chat."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int = Field(default_factory=_now)
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = omitted()
    prompt_token_ids: list[int] | None = omitted()


class ModelCard(BaseModel):
    """A name that requests may use."""

    id: str
    object: Literal["model"] = "model"
    created: int = Field(default_factory=_now)
    owned_by: str = "jaxpaged"
    root: str
    parent: None = None
    max_model_len: int


class ModelList(BaseModel):
    """Answer of /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
