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
from jaxpaged.server.answers import prepare_chat
from jaxpaged.server.context import Context, ServerContext
from jaxpaged.server.errors import anthropic_error_body
from jaxpaged.server.generation import Generation
from jaxpaged.server.messages_input import template_fields, tool_use
from jaxpaged.server.messages_protocol import (
    AnthropicErrorResponse,
    Block,
    CountTokensRequest,
    MessagesRequest,
    MessagesResponse,
    MessagesUsage,
    StopReason,
    TextBlock,
    ThinkingBlock,
    TokenCount,
    ToolUseBlock,
)
from jaxpaged.server.parsing.answer import AnswerParser
from jaxpaged.server.parsing.runs import Change, Run, Runs
from jaxpaged.server.sampling import refuse_unsupported, sampling_params
from jaxpaged.server.streaming import STREAMED, event, respond
from jaxpaged.server.templating import chat_prompt

ERRORS: dict[int | str, dict[str, Any]] = {
    code: {"model": AnthropicErrorResponse} for code in (400, 401, 404, 413, 500, 503)
}

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
    template = template_fields(body, body.chat_template_kwargs, context)
    prompt = await chat_prompt(template, context, tool_use(body, context).offered)
    return TokenCount(input_tokens=len(prompt.token_ids))


async def _prepare(request: Request, context: ServerContext, body: MessagesRequest) -> _Answering:
    refuse_unsupported(body)
    if body.n not in (None, 1):
        raise BadRequestError("a message has one answer: n must be 1", "n")
    if body.prompt_logprobs is not None:
        raise BadRequestError("prompt_logprobs are not told at /v1/messages", "prompt_logprobs")
    tools = tool_use(body, context)
    stop = {} if body.stop_sequences is None else {"stop": body.stop_sequences}
    params = sampling_params(body, context, **{**stop, **tools.overrides})
    template = template_fields(body, body.chat_template_kwargs, context)
    generation, plan = await prepare_chat(
        request,
        context,
        body,
        template,
        params,
        tools,
        kind="msg",
        default_max_tokens=None,
        shown_logprobs=None,
    )
    return _Answering(generation, plan.parser())


def _event(kind: str, **content: Any) -> str:
    return event(json.encode({"type": kind, **content}).decode(), kind)


def _failed(code: int, message: str, param: str | None) -> str:
    return event(anthropic_error_body(code, message), "error")


@dataclass
class _Answering:
    generation: Generation
    parser: AnswerParser
    runs: Runs = field(default_factory=Runs)
    id: str = field(default_factory=lambda: f"msg_{uuid.uuid4().hex}")

    async def response(self) -> MessagesResponse:
        (output,) = await self.generation.collect()
        (choice,) = output.outputs
        for _ in self.runs.feed(self.parser.feed(choice.text, final=True)):
            pass
        reason, sequence = self._stop(choice)
        return MessagesResponse(
            id=self.id,
            model=self.generation.context.model_name,
            content=[_block(run) for run in self.runs.runs],
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
                yield _event("ping")
            for change in self.runs.feed(self.parser.feed(fresh.text, final=fresh.finished)):
                yield _change_event(change)
            if fresh.finished:
                reason, sequence = self._stop(fresh)
                for change in self.runs.close():
                    yield _change_event(change)
                yield _event(
                    "message_delta",
                    delta={"stop_reason": reason, "stop_sequence": sequence},
                    usage=self._usage().model_dump(),
                )
                yield _event("message_stop")

    def _stop(self, choice: CompletionOutput) -> tuple[StopReason, str | None]:
        """Why a choice ended, in Anthropic's words, and the stop sequence that ended it.

        Raises:
            RequestFailedError: it was aborted, for which there is no word.
        """
        if choice.finish_reason == "length":
            return "max_tokens", None
        if choice.finish_reason != "stop":
            raise RequestFailedError("the server is shutting down", 503)
        if self.parser.num_calls:
            return "tool_use", None
        if isinstance(choice.stop_reason, str):
            return "stop_sequence", choice.stop_reason
        return "end_turn", None

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


def _change_event(change: Change) -> str:
    run, index = change.run, change.place
    if change.what == "end":
        return _event("content_block_stop", index=index)
    if change.what == "add":
        kind, name = (
            ("text_delta", "text") if run.kind == "content" else ("thinking_delta", "thinking")
        )
        return _event("content_block_delta", index=index, delta={"type": kind, name: change.text})
    begun = _event("content_block_start", index=index, content_block=_empty(run).model_dump())
    if run.call is None:
        return begun
    delta = {"type": "input_json_delta", "partial_json": run.call.arguments}
    return begun + _event("content_block_delta", index=index, delta=delta)


def _empty(run: Run) -> Block:
    if run.call is not None:
        return ToolUseBlock(id=run.call.id, name=run.call.name)
    return TextBlock() if run.kind == "content" else ThinkingBlock()


def _block(run: Run) -> Block:
    if run.call is not None:
        return ToolUseBlock(
            id=run.call.id, name=run.call.name, input=json.decode(run.call.arguments)
        )
    return TextBlock(text=run.text) if run.kind == "content" else ThinkingBlock(thinking=run.text)
