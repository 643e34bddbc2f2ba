"""POST /tokenize, POST /detokenize."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter

from jaxpaged.engine.errors import BadRequestError
from jaxpaged.server.context import Context
from jaxpaged.server.templating import chat_token_ids
from jaxpaged.server.tokens_protocol import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeChatRequest,
    TokenizeResponse,
    TokenizeTextRequest,
)

router = APIRouter(tags=["tokens"])


@router.post("/tokenize", response_model_exclude_none=True)
async def tokenize(
    body: TokenizeTextRequest | TokenizeChatRequest, context: Context
) -> TokenizeResponse:
    """The token ids of a text or a chat, as a request would get them."""
    context.check_model(body.model)
    tokenizer, max_model_len = context.tokenizer, context.engine.info.max_model_len
    if isinstance(body, TokenizeTextRequest):
        token_ids = await asyncio.to_thread(
            tokenizer.encode_sent, body.prompt, max_model_len, body.add_special_tokens
        )
    else:
        token_ids = await chat_token_ids(body, context)
    spellings = None
    if body.return_token_strs:
        spellings = await asyncio.to_thread(lambda: [tokenizer.token(i) for i in token_ids])
    return TokenizeResponse(
        count=len(token_ids),
        max_model_len=max_model_len,
        tokens=token_ids,
        token_strs=spellings,
    )


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, context: Context) -> DetokenizeResponse:
    """The text of token ids, special tokens included."""
    context.check_model(body.model)
    vocab = context.engine.info.vocab_size
    for token_id in body.tokens:
        if not 0 <= token_id < vocab:
            raise BadRequestError(
                f"tokens holds token id {token_id}, which is outside the vocabulary: ids are 0 to "
                f"{vocab - 1}",
                "tokens",
            )
    return DetokenizeResponse(prompt=await asyncio.to_thread(context.tokenizer.decode, body.tokens))
