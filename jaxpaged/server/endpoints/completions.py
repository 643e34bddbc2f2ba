"""POST /v1/completions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request, Response

from jaxpaged.engine.errors import BadRequestError
from jaxpaged.engine.input_processor import Prompt
from jaxpaged.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from jaxpaged.server.context import Context, ServerContext
from jaxpaged.server.generation import Generation, prepare
from jaxpaged.server.logprobs import write_prompt_logprobs
from jaxpaged.server.protocol import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
)
from jaxpaged.server.sampling import refuse_unsupported, sampling_params
from jaxpaged.server.streaming import DONE, STREAMED, event, respond

router = APIRouter(tags=["OpenAI"])

DEFAULT_MAX_TOKENS = 16  # OpenAI's


@router.post("/v1/completions", response_model=CompletionResponse, responses=STREAMED)
async def create_completion(
    body: CompletionRequest, request: Request, context: Context
) -> Response:
    """Continue one prompt or several."""
    context.check_model(body.model)
    completion = await _prepare(request, context, body)
    return await respond(request, completion, stream=body.stream)


async def _prepare(
    request: Request, context: ServerContext, body: CompletionRequest
) -> _Completion:
    refuse_unsupported(body)
    if body.suffix:
        raise BadRequestError("suffix is not supported: the model only continues", "suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise BadRequestError("best_of is not supported, other than equal to n", "best_of")
    overrides: dict[str, Any] = {"logprobs": body.logprobs}
    if body.echo and body.logprobs is not None:
        overrides["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    only_prompt = body.echo and body.max_tokens == 0
    if only_prompt:  # the engine always gives a token, which is not shown
        overrides["max_tokens"] = 1
    given: Any = body.prompt
    single = isinstance(given, str) or all(isinstance(item, int) for item in given)
    prompts: Sequence[Prompt] = [given] if single else given
    generation = await prepare(
        request,
        context,
        body,
        prompts,
        sampling_params(body, context, **overrides),
        kind="cmpl",
        add_special_tokens=body.add_special_tokens,
        default_max_tokens=context.engine.sampling_defaults.get("max_tokens", DEFAULT_MAX_TOKENS),
        shown_logprobs=body.logprobs,
        names=body.sent_names,
    )
    generation.counter.prompt_only = only_prompt
    for item in generation.requests:
        item.prompt_only = only_prompt
    texts = [""] * len(prompts)
    if body.echo:
        texts = [
            prompt
            if isinstance(prompt, str) and body.truncate_prompt_tokens is None
            else context.tokenizer.decode(item.prompt_token_ids)
            for prompt, item in zip(prompts, generation.requests, strict=True)
        ]
    return _Completion(generation, body, texts, only_prompt)


@dataclass
class _Completion:
    generation: Generation
    body: CompletionRequest
    texts: list[str]  # of the prompts, if they are echoed
    only_prompt: bool  # echo with max_tokens 0
    _offsets: dict[int, int] = field(default_factory=lambda: defaultdict(int))  # by choice

    async def response(self) -> CompletionResponse:
        outputs = await self.generation.collect()
        choices = [
            self._choice(place, output, choice, first=True)
            for place, output in enumerate(outputs)
            for choice in output.outputs
        ]
        answer = self._answer(choices)
        answer.usage = self.generation.counter.usage()
        return answer

    async def events(self) -> AsyncGenerator[str, None]:
        started = set()
        async for place, output in self.generation.stream():
            for fresh in output.outputs:
                index = self._index(place, fresh)
                choice = self._choice(place, output, fresh, first=index not in started)
                if not (choice.text or choice.logprobs or choice.token_ids or fresh.finished):
                    continue
                started.add(index)
                chunk = self._answer([choice])
                chunk.usage = self.generation.usage_so_far()
                yield event(chunk.model_dump_json())
        if self.generation.options.include_usage:
            last = self._answer([])
            last.usage = self.generation.counter.usage()
            yield event(last.model_dump_json())
        yield DONE

    def _answer(self, choices: list[CompletionChoice]) -> CompletionResponse:
        return CompletionResponse(choices=choices, **self.generation.header)

    def _index(self, place: int, choice: CompletionOutput) -> int:
        return place * self.generation.requests[place].params.n + choice.index

    def _choice(
        self, place: int, output: RequestOutput, choice: CompletionOutput, *, first: bool
    ) -> CompletionChoice:
        """A choice, or what is new of it; the prompt comes with the first."""
        index = self._index(place, choice)
        text = "" if self.only_prompt else choice.text
        written = CompletionChoice(
            index=index,
            text=self.texts[place] + text if first else text,
            logprobs=self._logprobs(index, output, choice, first and self.body.echo),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
        )
        if self.body.return_token_ids:
            written.token_ids = [] if self.only_prompt else choice.token_ids
            if first:
                written.prompt_token_ids = output.prompt_token_ids
        if self.body.prompt_logprobs is not None and output.prompt_logprobs is not None:
            written.prompt_logprobs = write_prompt_logprobs(output.prompt_logprobs)
        return written

    def _logprobs(
        self, index: int, output: RequestOutput, choice: CompletionOutput, with_prompt: bool
    ) -> CompletionLogprobs | None:
        writer = self.generation.writer
        if writer is None:
            return None
        token_ids = [*choice.token_ids]
        entries: list[TokenLogprobs | None] = [*(choice.logprobs or [])]
        if self.only_prompt:
            token_ids, entries = [], []
        if with_prompt and output.prompt_logprobs is not None:
            token_ids = [*output.prompt_token_ids, *token_ids]
            entries = [*output.prompt_logprobs, *entries]
        written, self._offsets[index] = writer.completion(token_ids, entries, self._offsets[index])
        return written
