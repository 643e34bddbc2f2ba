"""POST /v1/embeddings."""

from __future__ import annotations

import asyncio
import base64
import sys
from array import array
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request

from jaxpaged.engine.errors import BadRequestError, RequestFailedError
from jaxpaged.engine.input_processor import Prompt
from jaxpaged.engine.messages import AddRequest
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.server.context import Context, ServerContext
from jaxpaged.server.embeddings_protocol import (
    Embedding,
    EmbeddingRequest,
    EmbeddingResponse,
    EmbeddingUsage,
)
from jaxpaged.server.request_id import request_id
from jaxpaged.server.streaming import merge, unless_gone

router = APIRouter(tags=["OpenAI"])


@router.post("/v1/embeddings")
async def create_embeddings(
    body: EmbeddingRequest, request: Request, context: Context
) -> EmbeddingResponse:
    """Vectors of length 1 for texts or token ids; --pooling says of what."""
    context.check_model(body.model)
    size = context.engine.info.embedding_size
    if body.dimensions not in (None, size):
        raise BadRequestError(
            f"dimensions {body.dimensions} is not supported: embeddings have {size} numbers, and "
            "to cut them needs a model that was trained for it",
            "dimensions",
        )
    answer_id = f"embd-{body.request_id or request_id(request.headers)}"
    requests = await _prepare(body, context, answer_id)
    vectors = await unless_gone(request, _embed(context, requests))
    tokens = sum(len(item.prompt_token_ids) for item in requests)
    return EmbeddingResponse(
        id=answer_id,
        model=context.model_name,
        data=[
            Embedding(index=index, embedding=_encode(vector, body.encoding_format))
            for index, vector in enumerate(vectors)
        ],
        usage=EmbeddingUsage(prompt_tokens=tokens, total_tokens=tokens),
    )


async def _prepare(
    body: EmbeddingRequest, context: ServerContext, answer_id: str
) -> list[AddRequest]:
    """Tokenize and check every input before any is queued."""
    given: Any = body.input
    single = isinstance(given, str) or all(isinstance(item, int) for item in given)
    inputs: Sequence[Prompt] = [given] if single else given
    try:
        params = SamplingParams(
            max_tokens=None, temperature=0.0, detokenize=False, priority=body.priority
        )
        requests = []
        for place, one in enumerate(inputs):
            requests.append(
                await context.engine.prepare(
                    one,
                    params,
                    f"{answer_id}-{place}",
                    add_special_tokens=body.add_special_tokens,
                    truncate_prompt_tokens=body.truncate_prompt_tokens,
                    default_max_tokens=1,
                    cache_salt=body.cache_salt,
                    pooling=True,
                )
            )
            await asyncio.sleep(0)  # the others' tokens don't wait for a large batch
    except BadRequestError as error:
        raise _of_input(error) from None
    except ValueError as error:
        raise BadRequestError(str(error), "priority") from None
    return requests


def _of_input(error: BadRequestError) -> BadRequestError:
    """The engine speaks of prompts and outputs; here there are inputs."""
    if error.param not in ("prompt", "max_tokens"):
        return error
    message = error.message.replace("prompt or max_tokens", "input").replace("prompt", "input")
    return BadRequestError(message, "input")


async def _embed(context: ServerContext, requests: Sequence[AddRequest]) -> list[bytes]:
    """The embeddings, in the order of the requests."""
    runs = [context.engine.run(request, delta=False) for request in requests]
    found = {place: output.embedding async for place, output in merge(runs)}
    vectors = [vector for place in range(len(runs)) if (vector := found[place]) is not None]
    if len(vectors) < len(runs):
        raise RequestFailedError("the server is shutting down", 503)
    return vectors


def _encode(vector: bytes, encoding: str) -> list[float] | str:
    if encoding == "base64":
        return base64.b64encode(vector).decode()
    numbers = array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()
