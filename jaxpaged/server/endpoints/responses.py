"""POST /v1/responses; GET and DELETE of those that were stored."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request, Response
from msgspec import json

from jaxpaged.engine.errors import BadRequestError
from jaxpaged.outputs import CompletionOutput
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.server.context import Context, ServerContext
from jaxpaged.server.dialogue import merged
from jaxpaged.server.errors import NotFoundError
from jaxpaged.server.generation import Generation, prepare
from jaxpaged.server.protocol import ChatMessage, ChatTemplateFields, TokenLogprob
from jaxpaged.server.response_store import StoredResponse
from jaxpaged.server.responses_input import conversation, refuse_unsupported_fields
from jaxpaged.server.responses_protocol import (
    DeletedResponse,
    IncompleteDetails,
    InputTokensDetails,
    OutputMessage,
    OutputText,
    Reasoning,
    ResponsesError,
    ResponsesRequest,
    ResponsesResponse,
    ResponsesUsage,
    TextSettings,
)
from jaxpaged.server.sampling import refuse_unsupported, sampling_params
from jaxpaged.server.streaming import STREAMED, event, respond
from jaxpaged.server.templating import chat_token_ids

router = APIRouter(tags=["OpenAI"])

LOGPROBS = "message.output_text.logprobs"  # of `include`
PLACE = {"output_index": 0, "content_index": 0}  # there is one answer, of one part


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
    stored = context.responses.get(response_id)
    if stored is None:
        raise NotFoundError(f"there is no response {response_id!r}", "response_id")
    return stored


async def _prepare(request: Request, context: ServerContext, body: ResponsesRequest) -> _Answering:
    refuse_unsupported_fields(body)
    refuse_unsupported(body)
    shown = body.top_logprobs or 0 if LOGPROBS in (body.include or ()) else None
    params = sampling_params(body, context, max_tokens=body.max_output_tokens, logprobs=shown)
    turns = conversation(body, context.responses)
    system = [ChatMessage(role="system", content=body.instructions)] if body.instructions else []
    kwargs = {**(body.chat_template_kwargs or {})}
    if body.reasoning is not None and body.reasoning.effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning.effort)
    template = ChatTemplateFields(messages=merged([*system, *turns]), chat_template_kwargs=kwargs)
    generation = await prepare(
        request,
        context,
        body,
        [await chat_token_ids(template, context)],
        params,
        kind="resp",
        add_special_tokens=False,  # they are ids already
        default_max_tokens=context.engine.sampling_defaults.get("max_tokens"),
        shown_logprobs=shown,
    )
    answer = _begin(body, params, context)
    json.encode(_plain(answer))  # what cannot be echoed is refused now
    return _Answering(generation, body, turns, answer)


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
        store=body.store is not False,
        temperature=params.temperature,
        text=body.text or TextSettings(),
        top_logprobs=body.top_logprobs or 0,
        top_p=params.top_p,
        user=body.user,
    )


@dataclass
class _Answering:
    generation: Generation
    body: ResponsesRequest
    turns: list[ChatMessage]  # the conversation so far, instructions left out
    answer: ResponsesResponse
    item: OutputMessage = field(default_factory=lambda: OutputMessage(id=f"msg_{uuid.uuid4().hex}"))
    _sequence_number: int = 0

    async def response(self) -> ResponsesResponse:
        (output,) = await self.generation.collect()
        (choice,) = output.outputs
        part = OutputText(text=choice.text, logprobs=self._logprobs(choice))
        self._finish(part, choice.finish_reason)
        return self.answer

    async def events(self) -> AsyncGenerator[str, None]:
        part = OutputText()
        place = {"item_id": self.item.id, **PLACE}
        finish_reason = None
        async for _, output in self.generation.stream():
            if self._sequence_number == 0:
                yield self._response_event("created")
                yield self._response_event("in_progress")
                yield self._event("output_item.added", output_index=0, item=_plain(self.item))
                yield self._event("content_part.added", **place, part=_plain(part))
            (fresh,) = output.outputs
            logprobs = self._logprobs(fresh)
            part.text += fresh.text
            part.logprobs.extend(logprobs)
            finish_reason = fresh.finish_reason
            if fresh.text or logprobs:
                yield self._event(
                    "output_text.delta",
                    **place,
                    delta=fresh.text,
                    logprobs=[_plain(entry) for entry in logprobs],
                )
        self._finish(part, finish_reason)
        done = _plain(part)
        yield self._event("output_text.done", **place, text=part.text, logprobs=done["logprobs"])
        yield self._event("content_part.done", **place, part=done)
        yield self._event("output_item.done", output_index=0, item=_plain(self.item))
        # "cancelled" has no event of its own.
        status = self.answer.status
        yield self._response_event("completed" if status == "completed" else "incomplete")

    def failed(self, code: int, message: str, param: str | None) -> str:
        """The last event of a stream that cannot go on."""
        self.answer.status = "failed"
        kind = "server_error" if code >= 500 else "invalid_prompt"
        self.answer.error = ResponsesError(code=kind, message=message)
        return self._response_event("failed")

    def _finish(self, part: OutputText, reason: str | None) -> None:
        """Complete the response and store it."""
        answer, counter = self.answer, self.generation.counter
        self.item.content = [part]
        self.item.status = "completed" if reason == "stop" else "incomplete"
        answer.output = [self.item]
        answer.completed_at = int(time.time())
        if reason == "stop":
            answer.status = "completed"
        elif reason == "length":
            answer.status = "incomplete"
            answer.incomplete_details = IncompleteDetails(reason="max_output_tokens")
        else:
            answer.status = "cancelled"  # the server is shutting down
        usage = counter.usage()
        answer.usage = ResponsesUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=counter.cached_tokens),
            output_tokens=usage.completion_tokens,
            total_tokens=usage.total_tokens,
        )
        if answer.store:
            said = ChatMessage(role="assistant", content=part.text)
            self.generation.context.responses.put(StoredResponse(answer, [*self.turns, said]))

    def _event(self, name: str, **content: Any) -> str:
        name = f"response.{name}"
        said = {"type": name, "sequence_number": self._sequence_number, **content}
        self._sequence_number += 1
        return event(json.encode(said).decode(), name)

    def _response_event(self, name: str) -> str:
        return self._event(name, response=_plain(self.answer))

    def _logprobs(self, choice: CompletionOutput) -> list[TokenLogprob]:
        writer = self.generation.writer
        if writer is None:
            return []
        return writer.chat(choice.token_ids, choice.logprobs or []).content


def _plain(model: Any) -> dict[str, Any]:
    return model.model_dump(mode="json")
