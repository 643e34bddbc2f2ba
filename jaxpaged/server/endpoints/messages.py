"""POST /v1/messages, POST /v1/messages/count_tokens: Anthropic's API."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request, Response
from msgspec import json

from jaxpaged.engine.errors import BadRequestError, RequestFailedError
from jaxpaged.outputs import CompletionOutput
from jaxpaged.server.context import Context, ServerContext
from jaxpaged.server.dialogue import merged
from jaxpaged.server.errors import anthropic_error_body
from jaxpaged.server.generation import Generation, prepare
from jaxpaged.server.messages_protocol import (
    AnthropicErrorResponse,
    Blocks,
    CountTokensRequest,
    MessagesRequest,
    MessagesResponse,
    MessagesUsage,
    StopReason,
    TextBlock,
    TokenCount,
)
from jaxpaged.server.protocol import ChatMessage, ChatTemplateFields
from jaxpaged.server.sampling import refuse_unsupported, sampling_params
from jaxpaged.server.streaming import STREAMED, event, respond
from jaxpaged.server.templating import chat_token_ids

ERRORS: dict[int | str, dict[str, Any]] = {
    code: {"model": AnthropicErrorResponse} for code in (400, 401, 404, 413, 500, 503)
}
THOUGHTS = ("thinking", "redacted_thinking")  # blocks of earlier turns that no template wants

router = APIRouter(tags=["Anthropic"], responses=ERRORS)


@router.post("/v1/messages", response_model=MessagesResponse, responses=STREAMED)
async def create_message(body: MessagesRequest, request: Request, context: Context) -> Response:
    """Answer a conversation."""
    context.check_model(body.model)
    answering = await _prepare(request, context, body)
    return await respond(request, answering, stream=body.stream, failed=_failed)


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountTokensRequest, context: Context) -> TokenCount:
    """How many tokens the input of such a message would have."""
    context.check_model(body.model)
    return TokenCount(input_tokens=len(await _token_ids(body, context)))


async def _prepare(request: Request, context: ServerContext, body: MessagesRequest) -> _Answering:
    refuse_unsupported(body)
    if body.n not in (None, 1):
        raise BadRequestError("a message has one answer: n must be 1", "n")
    if body.prompt_logprobs is not None:
        raise BadRequestError("prompt_logprobs are not told at /v1/messages", "prompt_logprobs")
    overrides = {} if body.stop_sequences is None else {"stop": body.stop_sequences}
    params = sampling_params(body, context, **overrides)
    generation = await prepare(
        request,
        context,
        body,
        [await _token_ids(body, context)],
        params,
        kind="msg",
        add_special_tokens=False,  # they are ids already
        default_max_tokens=None,
        shown_logprobs=None,
    )
    return _Answering(generation)


async def _token_ids(
    body: MessagesRequest | CountTokensRequest, context: ServerContext
) -> list[int]:
    """The prompt. A conversation that ends with the assistant's turn has its answer begun."""
    if body.tools and (body.tool_choice or {}).get("type") != "none":
        raise BadRequestError("tools are not supported yet at /v1/messages", "tools")
    if (body.thinking or {}).get("type", "disabled") != "disabled":
        raise BadRequestError("thinking is not supported yet at /v1/messages", "thinking")
    turns = [ChatMessage(role=turn.role, content=_text(turn.content)) for turn in body.messages]
    system = _text(body.system or "")
    if system:
        turns.insert(0, ChatMessage(role="system", content=system))
    template = ChatTemplateFields(
        messages=merged(turns),
        continue_final_message=turns[-1].role == "assistant",
        chat_template_kwargs=body.chat_template_kwargs,
    )
    return await chat_token_ids(template, context)


def _text(content: Blocks) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for block in content:
        kind = block.get("type")
        if kind in THOUGHTS:
            continue
        if kind != "text" or not isinstance(block.get("text"), str):
            raise BadRequestError(
                f"the input has a content block of type {kind!r}; only text is supported",
                "messages",
            )
        texts.append(block["text"])
    return "\n".join(texts)


def _event(kind: str, **content: Any) -> str:
    return event(json.encode({"type": kind, **content}).decode(), kind)


def _failed(code: int, message: str, param: str | None) -> str:
    return event(anthropic_error_body(code, message), "error")


@dataclass
class _Answering:
    generation: Generation
    id: str = field(default_factory=lambda: f"msg_{uuid.uuid4().hex}")

    async def response(self) -> MessagesResponse:
        (output,) = await self.generation.collect()
        (choice,) = output.outputs
        reason, sequence = _stop(choice)
        return MessagesResponse(
            id=self.id,
            model=self.generation.context.model_name,
            content=[TextBlock(text=choice.text)] if choice.text else [],
            stop_reason=reason,
            stop_sequence=sequence,
            usage=self._usage(),
        )

    async def events(self) -> AsyncGenerator[str, None]:
        started = False
        async for _, output in self.generation.stream():
            (fresh,) = output.outputs
            if not started:
                started = True
                message = MessagesResponse(
                    id=self.id, model=self.generation.context.model_name, usage=self._usage()
                )
                yield _event("message_start", message=message.model_dump())
                yield _event("content_block_start", index=0, content_block=TextBlock().model_dump())
                yield _event("ping")
            if fresh.text:
                delta = {"type": "text_delta", "text": fresh.text}
                yield _event("content_block_delta", index=0, delta=delta)
            if fresh.finished:
                reason, sequence = _stop(fresh)
                yield _event("content_block_stop", index=0)
                yield _event(
                    "message_delta",
                    delta={"stop_reason": reason, "stop_sequence": sequence},
                    usage=self._usage().model_dump(),
                )
                yield _event("message_stop")

    def _usage(self) -> MessagesUsage:
        """So far; cached tokens are told apart only where the server tells of them at all."""
        usage = self.generation.counter.usage()
        details = usage.prompt_tokens_details
        cached = 0 if details is None else details.cached_tokens
        return MessagesUsage(
            input_tokens=usage.prompt_tokens - cached,
            cache_read_input_tokens=cached,
            output_tokens=usage.completion_tokens,
        )


def _stop(choice: CompletionOutput) -> tuple[StopReason, str | None]:
    """Why a choice ended, in Anthropic's words, and the stop sequence that ended it.

    Raises:
        RequestFailedError: it was aborted, for which there is no word.
    """
    if choice.finish_reason == "length":
        return "max_tokens", None
    if choice.finish_reason != "stop":
        raise RequestFailedError("the server is shutting down", 503)
    if isinstance(choice.stop_reason, str):
        return "stop_sequence", choice.stop_reason
    return "end_turn", None
