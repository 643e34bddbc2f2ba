"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response

from jaxpaged.engine.errors import BadRequestError
from jaxpaged.outputs import CompletionOutput
from jaxpaged.server.answers import AnswerPlan, prepare_chat
from jaxpaged.server.context import Context, ServerContext
from jaxpaged.server.generation import Generation
from jaxpaged.server.logprobs import write_prompt_logprobs
from jaxpaged.server.parsing.answer import AnswerParser, Parts
from jaxpaged.server.parsing.calls import ToolCall
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
from jaxpaged.server.streaming import DONE, STREAMED, event, respond
from jaxpaged.server.templating import continued_text
from jaxpaged.server.tool_protocol import AnswerToolCall, DeltaToolCall, FunctionCall
from jaxpaged.server.tools import read_tools

router = APIRouter(tags=["OpenAI"])


@router.post("/v1/chat/completions", response_model=ChatResponse, responses=STREAMED)
async def create_chat_completion(
    body: ChatCompletionRequest, request: Request, context: Context
) -> Response:
    """Answer a chat."""
    context.check_model(body.model)
    chat = await _prepare(request, context, body)
    return await respond(request, chat, stream=body.stream)


async def _prepare(request: Request, context: ServerContext, body: ChatCompletionRequest) -> _Chat:
    refuse_unsupported(body)
    if body.functions or body.function_call not in (None, "none", "auto"):
        raise BadRequestError("functions are not supported: name tools instead", "functions")
    tools = read_tools(body.tools, body.tool_choice, body.parallel_tool_calls, context.config)
    if body.top_logprobs is not None and not body.logprobs:
        raise BadRequestError("top_logprobs needs logprobs=true", "top_logprobs")
    shown_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    overrides: dict[str, Any] = {"logprobs": shown_logprobs, **tools.overrides}
    if body.max_completion_tokens is not None:
        overrides["max_tokens"] = body.max_completion_tokens
    params = sampling_params(body, context, **overrides)
    generation, plan = await prepare_chat(
        request,
        context,
        body,
        body,
        params,
        tools,
        kind="chatcmpl",
        default_max_tokens=context.engine.sampling_defaults.get("max_tokens"),
        shown_logprobs=shown_logprobs,
    )
    continued = continued_text(body)
    return _Chat(
        generation,
        body,
        plan,
        role=context.config.response_role if continued is None else body.messages[-1].role,
        echoed=(continued or "") if body.echo else "",
    )


@dataclass
class _Chat:
    generation: Generation
    body: ChatCompletionRequest
    plan: AnswerPlan
    role: str
    echoed: str  # the message that the answer continues, if it is to be repeated

    async def response(self) -> ChatResponse:
        output = (await self.generation.collect())[0]
        answer = ChatResponse(
            choices=[self._choice(choice) for choice in output.outputs],
            usage=self.generation.counter.usage(),
            **self.generation.header,
        )
        if self.body.prompt_logprobs is not None and output.prompt_logprobs is not None:
            answer.prompt_logprobs = write_prompt_logprobs(output.prompt_logprobs)
        if self.body.return_token_ids:
            answer.prompt_token_ids = output.prompt_token_ids
        return answer

    async def events(self) -> AsyncGenerator[str, None]:
        parsers: dict[int, AnswerParser] = {}
        async for _, output in self.generation.stream():
            for fresh in output.outputs:
                if fresh.index not in parsers:
                    begin = DeltaMessage(role=self.role, content=self.echoed)
                    chunk = self._chunk([ChatChunkChoice(index=fresh.index, delta=begin)])
                    if self.body.return_token_ids and not parsers:
                        chunk.prompt_token_ids = output.prompt_token_ids
                    parsers[fresh.index] = self.plan.parser()
                    yield event(chunk.model_dump_json())
                choice = self._fresh_choice(fresh, parsers[fresh.index])
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

    def _choice(self, whole: CompletionOutput) -> ChatChoice:
        parser = self.plan.parser()
        parts = parser.feed(whole.text, final=True)
        content = self.echoed + parts.content
        reasoning = self._reasoning(parts)
        return ChatChoice(
            index=whole.index,
            message=AnswerMessage(
                role=self.role,
                content=content or (None if parts.calls else ""),
                tool_calls=[AnswerToolCall(**_written(call)) for call in parts.calls] or None,
                reasoning_content=reasoning,
                reasoning=reasoning,
            ),
            logprobs=self._logprobs(whole),
            finish_reason=_finish_reason(whole, parser),
            stop_reason=whole.stop_reason,
            token_ids=whole.token_ids if self.body.return_token_ids else None,
        )

    def _fresh_choice(
        self, fresh: CompletionOutput, parser: AnswerParser
    ) -> ChatChunkChoice | None:
        """What is new of a choice; None if there is nothing to tell."""
        first_call = parser.num_calls
        parts = parser.feed(fresh.text, final=fresh.finished)
        reasoning = self._reasoning(parts)
        calls = [
            DeltaToolCall(index=index, **_written(call))
            for index, call in enumerate(parts.calls, first_call)
        ]
        choice = ChatChunkChoice(
            index=fresh.index,
            delta=DeltaMessage(
                content=parts.content or None,
                tool_calls=calls or None,
                reasoning_content=reasoning,
                reasoning=reasoning,
            ),
            logprobs=self._logprobs(fresh),
            finish_reason=_finish_reason(fresh, parser),
            stop_reason=fresh.stop_reason,
            token_ids=fresh.token_ids if self.body.return_token_ids else None,
        )
        told = (parts.content, calls, reasoning, choice.token_ids, fresh.logprobs, fresh.finished)
        return choice if any(told) else None

    def _reasoning(self, parts: Parts) -> str | None:
        return parts.reasoning or None if self.body.include_reasoning else None

    def _logprobs(self, choice: CompletionOutput) -> ChatLogprobs | None:
        writer = self.generation.writer
        if writer is None:
            return None
        return writer.chat(choice.token_ids, choice.logprobs or [])


def _written(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "function": FunctionCall(name=call.name, arguments=call.arguments)}


def _finish_reason(choice: CompletionOutput, parser: AnswerParser) -> str | None:
    called = choice.finish_reason == "stop" and parser.num_calls
    return "tool_calls" if called else choice.finish_reason
