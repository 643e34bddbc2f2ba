"""POST /v1/responses; GET and DELETE of those that were stored."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request, Response
from msgspec import json

from jaxpaged.engine.errors import BadRequestError
from jaxpaged.outputs import CompletionOutput
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.server.answers import prepare_chat
from jaxpaged.server.context import Context, ServerContext
from jaxpaged.server.dialogue import merged, said
from jaxpaged.server.errors import NotFoundError
from jaxpaged.server.generation import Generation
from jaxpaged.server.parsing.answer import AnswerParser
from jaxpaged.server.protocol import ChatMessage, ChatTemplateFields, TokenLogprob
from jaxpaged.server.response_store import StoredResponse
from jaxpaged.server.responses_input import conversation, refuse_unsupported_fields, tool_use
from jaxpaged.server.responses_output import Event, OutputItems, plain
from jaxpaged.server.responses_protocol import (
    DeletedResponse,
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    Reasoning,
    ResponsesError,
    ResponsesRequest,
    ResponsesResponse,
    ResponsesUsage,
    TextSettings,
)
from jaxpaged.server.sampling import refuse_unsupported, sampling_params
from jaxpaged.server.streaming import STREAMED, event, respond

router = APIRouter(tags=["OpenAI"])

LOGPROBS = "message.output_text.logprobs"  # of `include`


@router.post("/v1/responses", response_model=ResponsesResponse, responses=STREAMED)
async def create_response(body: ResponsesRequest, request: Request, context: Context) -> Response:
    """Answer a conversation, which may go on from a stored response."""
    context.check_model(body.model)
    answering = await _prepare(request, context, body)
    return await respond(request, answering, stream=body.stream, failed=answering.failed)


@router.get("/v1/responses/{response_id}")
async def get_response(
    response_id: str, context: Context, stream: bool = False
) -> ResponsesResponse:
    """A response that was stored."""
    if stream:
        raise BadRequestError("a stored response is not streamed again", "stream")
    return _stored(context, response_id).response


@router.delete("/v1/responses/{response_id}")
async def delete_response(response_id: str, context: Context) -> DeletedResponse:
    """Forget a stored response."""
    _stored(context, response_id)
    context.responses.delete(response_id)
    return DeletedResponse(id=response_id)


def _stored(context: ServerContext, response_id: str) -> StoredResponse:
    stored = context.stored_response(response_id)
    if stored is None:
        raise NotFoundError(f"there is no response {response_id!r}", "response_id")
    return stored


async def _prepare(request: Request, context: ServerContext, body: ResponsesRequest) -> _Answering:
    refuse_unsupported_fields(body)
    refuse_unsupported(body)
    tools = tool_use(body, context.config)
    shown = body.top_logprobs or 0 if LOGPROBS in (body.include or ()) else None
    overrides = {"max_tokens": body.max_output_tokens, "logprobs": shown, **tools.overrides}
    params = sampling_params(body, context, **overrides)
    turns = conversation(body, context.stored_response)
    system = [ChatMessage(role="system", content=body.instructions)] if body.instructions else []
    kwargs = {**(body.chat_template_kwargs or {})}
    if body.reasoning is not None and body.reasoning.effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning.effort)
    template = ChatTemplateFields(messages=merged([*system, *turns]), chat_template_kwargs=kwargs)
    generation, plan = await prepare_chat(
        request,
        context,
        body,
        template,
        params,
        tools,
        kind="resp",
        default_max_tokens=context.engine.sampling_defaults.get("max_tokens"),
        shown_logprobs=shown,
    )
    answer = _begin(body, params, context)
    json.encode(plain(answer))  # what cannot be echoed is refused now
    return _Answering(generation, plan.parser(), turns, answer)


def _begin(
    body: ResponsesRequest, params: SamplingParams, context: ServerContext
) -> ResponsesResponse:
    """The response before anything was generated."""
    return ResponsesResponse(
        # Never an id that the client chose: whoever knows it may read the response.
        id=f"resp_{uuid.uuid4().hex}",
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        model=context.model_name,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning=body.reasoning or Reasoning(),
        safety_identifier=body.safety_identifier,
        store=body.store is not False and context.stores_responses,
        temperature=params.temperature,
        text=body.text or TextSettings(),
        tool_choice=body.tool_choice or "auto",
        tools=body.tools or [],
        top_logprobs=body.top_logprobs or 0,
        top_p=params.top_p,
        user=body.user,
    )


@dataclass
class _Answering:
    generation: Generation
    parser: AnswerParser
    turns: list[ChatMessage]  # the conversation so far, instructions left out
    answer: ResponsesResponse
    items: OutputItems = field(default_factory=OutputItems)
    pending: list[TokenLogprob] = field(default_factory=list)  # of text that is held back
    _sequence_number: int = 0

    async def response(self) -> ResponsesResponse:
        (output,) = await self.generation.collect()
        (choice,) = output.outputs
        for _ in self._told(choice):
            pass
        self._finish(choice.finish_reason)
        return self.answer

    async def events(self) -> AsyncGenerator[str, None]:
        finish_reason = None
        async for _, output in self.generation.stream():
            if self._sequence_number == 0:
                yield self._event("created", response=plain(self.answer))
                yield self._event("in_progress", response=plain(self.answer))
            (fresh,) = output.outputs
            finish_reason = fresh.finish_reason
            for name, content in self._told(fresh):
                yield self._event(name, **content)
        self._finish(finish_reason)
        # "cancelled" has no event of its own.
        name = "completed" if self.answer.status == "completed" else "incomplete"
        yield self._event(name, response=plain(self.answer))

    def failed(self, code: int, message: str, param: str | None) -> str:
        """The last event of a stream that cannot go on."""
        self.answer.status = "failed"
        kind = "server_error" if code >= 500 else "invalid_prompt"
        self.answer.error = ResponsesError(code=kind, message=message)
        return self._event("failed", response=plain(self.answer))

    def _told(self, choice: CompletionOutput) -> Iterator[Event]:
        """What is new of the answer."""
        writer = self.generation.writer
        if writer is not None:
            self.pending += writer.chat(choice.token_ids, choice.logprobs or []).content
        parts = self.parser.feed(choice.text, final=choice.finished)
        if parts.content or parts.reasoning or parts.calls:
            logprobs, self.pending = self.pending, []
            yield from self.items.feed(parts, logprobs)
        if choice.finished:
            yield from self.items.close(self.pending, complete=choice.finish_reason == "stop")

    def _finish(self, reason: str | None) -> None:
        """Complete the response and store it."""
        context, answer, counter = self.generation.context, self.answer, self.generation.counter
        answer.output = self.items.items
        answer.completed_at = int(time.time())
        if reason == "stop":
            answer.status = "completed"
        elif reason == "length":
            answer.status = "incomplete"
            answer.incomplete_details = IncompleteDetails(reason="max_output_tokens")
        else:
            answer.status = "cancelled"  # the server is shutting down
        usage, thoughts = counter.usage(), self.items.reasoning
        reasoning_tokens = len(context.tokenizer.encode(thoughts, False)) if thoughts else 0
        answer.usage = ResponsesUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=counter.cached_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=reasoning_tokens),
            total_tokens=usage.total_tokens,
        )
        if answer.store:
            turns = [*self.turns, said(self.items.text, self.items.calls)]
            context.responses.put(StoredResponse(answer, turns))

    def _event(self, name: str, /, **content: Any) -> str:
        name = f"response.{name}"
        told = {"type": name, "sequence_number": self._sequence_number, **content}
        self._sequence_number += 1
        return event(json.encode(told).decode(), name)
