"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response

from jaxpaged.engine.errors import BadRequestError
from jaxpaged.outputs import CompletionOutput
from jaxpaged.server.context import Context, ServerContext
from jaxpaged.server.generation import Generation, prepare
from jaxpaged.server.logprobs import write_prompt_logprobs
from jaxpaged.server.protocol import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletionRequest,
    ChatLogprobs,
    ChatResponse,
    DeltaMessage,
)
from jaxpaged.server.sampling import refuse_unsupported, sampling_params
from jaxpaged.server.streaming import DONE, event, respond
from jaxpaged.server.templating import chat_token_ids, content_text

router = APIRouter(tags=["OpenAI"])


@router.post("/v1/chat/completions", response_model=ChatResponse)
async def create_chat_completion(
    body: ChatCompletionRequest, request: Request, context: Context
) -> Response:
    """Answer a chat."""
    context.check_model(body.model)
    chat = await _prepare(request, context, body)
    return await respond(request, chat, stream=body.stream)


async def _prepare(request: Request, context: ServerContext, body: ChatCompletionRequest) -> _Chat:
    refuse_unsupported(body)
    _refuse_tools(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise BadRequestError("top_logprobs needs logprobs=true", "top_logprobs")
    shown_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    overrides: dict[str, Any] = {"logprobs": shown_logprobs}
    if body.max_completion_tokens is not None:
        overrides["max_tokens"] = body.max_completion_tokens
    params = sampling_params(body, context, **overrides)
    token_ids = await chat_token_ids(body, context)
    generation = await prepare(
        request,
        context,
        body,
        [token_ids],
        params,
        kind="chatcmpl",
        add_special_tokens=False,  # they are ids already
        default_max_tokens=context.engine.sampling_defaults.get("max_tokens"),
        shown_logprobs=shown_logprobs,
    )
    last = body.messages[-1]
    continued = body.continue_final_message
    return _Chat(
        generation,
        body,
        role=last.role if continued else context.config.response_role,
        echoed=content_text(last) if body.echo and continued else "",
    )


def _refuse_tools(body: ChatCompletionRequest) -> None:
    if body.tools and body.tool_choice != "none":
        raise BadRequestError("tools are not supported yet", "tools")
    if body.tool_choice not in (None, "none", "auto"):
        raise BadRequestError("tool_choice is not supported yet", "tool_choice")
    if body.functions or body.function_call not in (None, "none", "auto"):
        raise BadRequestError("functions are not supported", "functions")


@dataclass
class _Chat:
    generation: Generation
    body: ChatCompletionRequest
    role: str
    echoed: str  # the message that the answer continues, if it is to be repeated

    async def response(self) -> ChatResponse:
        output = (await self.generation.collect())[0]
        answer = ChatResponse(
            choices=[
                ChatChoice(
                    index=choice.index,
                    message=AnswerMessage(role=self.role, content=self.echoed + choice.text),
                    logprobs=self._logprobs(choice),
                    finish_reason=choice.finish_reason,
                    stop_reason=choice.stop_reason,
                    token_ids=choice.token_ids if self.body.return_token_ids else None,
                )
                for choice in output.outputs
            ],
            usage=self.generation.counter.usage(),
            **self.generation.header,
        )
        if self.body.prompt_logprobs is not None and output.prompt_logprobs is not None:
            answer.prompt_logprobs = write_prompt_logprobs(output.prompt_logprobs)
        if self.body.return_token_ids:
            answer.prompt_token_ids = output.prompt_token_ids
        return answer

    async def events(self) -> AsyncGenerator[str, None]:
        started: set[int] = set()
        async for _, output in self.generation.stream():
            for fresh in output.outputs:
                if fresh.index not in started:
                    begin = DeltaMessage(role=self.role, content=self.echoed)
                    chunk = self._chunk([ChatChunkChoice(index=fresh.index, delta=begin)])
                    if self.body.return_token_ids and not started:
                        chunk.prompt_token_ids = output.prompt_token_ids
                    started.add(fresh.index)
                    yield event(chunk.model_dump_json())
                choice = self._fresh_choice(fresh)
                if choice is not None:
                    yield event(self._chunk([choice]).model_dump_json())
        if self.generation.options.include_usage:
            last = self._chunk([])
            last.usage = self.generation.counter.usage()
            yield event(last.model_dump_json())
        yield DONE

    def _chunk(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        return ChatChunk(
            choices=choices, usage=self.generation.usage_so_far(), **self.generation.header
        )

    def _fresh_choice(self, fresh: CompletionOutput) -> ChatChunkChoice | None:
        """What is new of a choice; None if there is nothing to tell."""
        choice = ChatChunkChoice(
            index=fresh.index,
            delta=DeltaMessage(content=fresh.text or None),
            logprobs=self._logprobs(fresh),
            finish_reason=fresh.finish_reason,
            stop_reason=fresh.stop_reason,
            token_ids=fresh.token_ids if self.body.return_token_ids else None,
        )
        told = (fresh.text, choice.token_ids, fresh.logprobs, fresh.finished)
        return choice if any(told) else None

    def _logprobs(self, choice: CompletionOutput) -> ChatLogprobs | None:
        writer = self.generation.writer
        if writer is None:
            return None
        return writer.chat(choice.token_ids, choice.logprobs or [])
