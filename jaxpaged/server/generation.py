"""What completions and chats have in common: prompts in, outputs and usage out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request

from jaxpaged.engine.errors import BadRequestError
from jaxpaged.engine.input_processor import Prompt
from jaxpaged.engine.messages import AddRequest
from jaxpaged.outputs import RequestOutput
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.server.context import ServerContext
from jaxpaged.server.errors import named_as_sent
from jaxpaged.server.logprobs import LogprobWriter
from jaxpaged.server.protocol import GenerationRequest, StreamOptions, Usage
from jaxpaged.server.request_id import request_id
from jaxpaged.server.streaming import merge, unless_gone
from jaxpaged.server.usage import UsageCounter

MAX_SEQUENCES = 4096  # prompts x n of one HTTP request


@dataclass
class Generation:
    """The engine's requests for one HTTP request: one a prompt, tokenized and valid.

    Args:
        names: as those of `prepare`.
    """

    id: str
    context: ServerContext
    body: GenerationRequest
    requests: list[AddRequest]
    counter: UsageCounter
    writer: LogprobWriter | None  # None: no log-probabilities wanted
    names: dict[str, str]
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def header(self) -> dict[str, Any]:
        """What every chunk of an answer repeats."""
        return {"id": self.id, "created": self.created, "model": self.context.model_name}

    @property
    def options(self) -> StreamOptions:
        return self.body.stream_options or StreamOptions()

    async def stream(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """What is new of a choice, as it comes, with the place of its prompt."""
        engine = self.context.engine
        with named_as_sent(self.names):
            async for place, output in merge([engine.run(request) for request in self.requests]):
                self.counter.add(output)
                yield place, output

    async def collect(self) -> list[RequestOutput]:
        """The finished outputs, in the order of the prompts."""
        engine = self.context.engine
        runs = [engine.run(request, delta=False) for request in self.requests]
        with named_as_sent(self.names):
            finished = {place: output async for place, output in merge(runs)}
        outputs = [finished[place] for place in range(len(runs))]
        for output in outputs:
            self.counter.add(output)
        return outputs

    def usage_so_far(self) -> Usage | None:
        """For a chunk of a stream: only if each is to tell."""
        options = self.options
        wanted = options.include_usage and options.continuous_usage_stats
        return self.counter.usage() if wanted else None


async def prepare(
    request: Request,
    context: ServerContext,
    body: GenerationRequest,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    kind: str,
    add_special_tokens: bool,
    default_max_tokens: int | None,
    shown_logprobs: int | None,
    names: dict[str, str],
) -> Generation:
    """Tokenize and check every prompt before any is queued.

    Args:
        kind: what the id begins with.
        shown_logprobs: how many of the most likely tokens to show at each; None: nothing.
        names: what the request calls the engine's fields, where that differs.

    Raises:
        BadRequestError: a prompt or the parameters.
        ClientGoneError: the client left while a grammar was compiled.
    """
    if len(prompts) * params.n > MAX_SEQUENCES:
        raise BadRequestError(
            f"a request may ask for at most {MAX_SEQUENCES} choices in all: "
            f"{len(prompts)} prompts x n {params.n} are more",
            "prompt",
        )
    answer_id = f"{kind}-{body.request_id or request_id(request.headers)}"
    requests = []
    for place, prompt in enumerate(prompts):
        with named_as_sent(names):
            preparing = context.engine.prepare(
                prompt,
                params,
                answer_id if len(prompts) == 1 else f"{answer_id}-{place}",
                add_special_tokens=add_special_tokens,
                truncate_prompt_tokens=body.truncate_prompt_tokens,
                default_max_tokens=default_max_tokens,
                cache_salt=body.cache_salt,
            )
            if params.structured_outputs is not None:  # its grammar may wait for its turn
                preparing = unless_gone(request, preparing)
            prepared = await preparing
        requests.append(prepared)
        await asyncio.sleep(0)  # the others' tokens don't wait for a large batch
    config = context.config
    as_ids = body.return_tokens_as_token_ids
    return Generation(
        answer_id,
        context,
        body,
        requests,
        UsageCounter(requests, config.enable_prompt_tokens_details),
        None
        if shown_logprobs is None
        else LogprobWriter(
            shown_logprobs,
            context.engine.tokenizer,
            config.return_tokens_as_token_ids if as_ids is None else as_ids,
        ),
        names,
    )
