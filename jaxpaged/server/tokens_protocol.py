"""What travels over HTTP at /tokenize and /detokenize."""

from __future__ import annotations

from pydantic import BaseModel

from jaxpaged.server.many import Many
from jaxpaged.server.protocol import ChatTemplateFields, omitted


class TokenizeTextRequest(BaseModel):
    """POST /tokenize with a text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatRequest(ChatTemplateFields):
    """POST /tokenize with a chat."""

    model: str | None = None
    return_token_strs: bool = False


class DetokenizeRequest(BaseModel):
    """POST /detokenize."""

    model: str | None = None
    tokens: Many[int]


class TokenizeResponse(BaseModel):
    """Answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = omitted()


class DetokenizeResponse(BaseModel):
    """Answer of /detokenize."""

    prompt: str
