"""Which tokens a sequence may take next, as packed bits: bit i of word w allows id 32 * w + i."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from jaxpaged.core.request import Request
from jaxpaged.core.scheduler import ScheduledSequence


def num_words(vocab: int) -> int:
    """W: 32-bit words that a mask of the vocabulary takes."""
    return -(-vocab // 32)


def _set_bits(mask_W: np.ndarray, ids: Iterable[int], allow: bool) -> None:
    for token_id in ids:
        bit = np.uint32(1 << (token_id % 32))
        if allow:
            mask_W[token_id // 32] |= bit
        else:
            mask_W[token_id // 32] &= ~bit


def static_mask(request: Request, vocab: int) -> np.ndarray | None:
    """uint32[W] that holds for every position of the request; None allows everything."""
    params = request.params
    banned = [word[0] for word in request.bad_word_ids if len(word) == 1]
    if params.allowed_token_ids is None and not banned:
        return None
    if params.allowed_token_ids is None:
        mask_W = np.full(num_words(vocab), 0xFFFFFFFF, np.uint32)
    else:
        mask_W = np.zeros(num_words(vocab), np.uint32)
        _set_bits(mask_W, params.allowed_token_ids, allow=True)
    _set_bits(mask_W, banned, allow=False)
    return mask_W


def waits_for_last_token(request: Request) -> bool:
    """Whether the mask at a position depends on the token just before it."""
    return any(len(word) > 1 for word in request.bad_word_ids)


def below_min_tokens(item: ScheduledSequence) -> bool:
    """Whether the token that this step samples may not end the sequence yet."""
    request = item.sequence.request
    made = item.start + item.num_tokens - len(request.prompt_token_ids)
    return made < request.params.min_tokens


def next_token_mask(
    item: ScheduledSequence, static_W: np.ndarray | None, vocab: int
) -> np.ndarray | None:
    """uint32[W] of the token that this step samples; None allows everything."""
    request = item.sequence.request
    banned: list[int] = []
    if below_min_tokens(item):
        banned += [*request.eos_token_ids, *request.params.stop_token_ids]
    prompt_len = len(request.prompt_token_ids)
    for word in request.bad_word_ids:
        before = len(word) - 1
        output = item.sequence.token_ids[max(prompt_len, item.start + item.num_tokens - before) :]
        if before and tuple(output[:before]) == word[:-1]:
            banned.append(word[-1])
    if not banned:
        return static_W
    full = np.full(num_words(vocab), 0xFFFFFFFF, np.uint32)
    mask_W = full if static_W is None else static_W.copy()
    _set_bits(mask_W, banned, allow=False)
    return mask_W
