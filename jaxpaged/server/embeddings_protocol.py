"""What travels over HTTP at /v1/embeddings."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

from jaxpaged.server.many import Many

MAX_INPUTS = 2048  # of one request, as at OpenAI's


def _read_input(given: Any, read: ValidatorFunctionWrapHandler) -> Any:
    try:
        return read(given)
    except ValidationError:
        raise ValueError(
            "an input is a string, a list of token ids, or a list of at most "
            f"{MAX_INPUTS} of either"
        ) from None


SEVERAL = Field(min_length=1, max_length=MAX_INPUTS)


class EmbeddingRequest(BaseModel):
    """POST /v1/embeddings. Unknown fields are ignored."""

    input: Annotated[
        str | Many[int] | Annotated[Many[str], SEVERAL] | Annotated[Many[Many[int]], SEVERAL],
        WrapValidator(_read_input),
    ]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    user: str | None = None  # accepted, unused
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    request_id: str | None = Field(None, pattern="^[!-~]{1,256}$")  # printable ASCII
    priority: int = 0
    cache_salt: str | None = Field(None, min_length=1)


class Embedding(BaseModel):
    """Of one input: numbers, or base64 of float32 in little-endian order."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingResponse(BaseModel):
    """Answer of /v1/embeddings."""

    id: str
    object: Literal["list"] = "list"
    created: int = Field(default_factory=lambda: int(time.time()))
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage
