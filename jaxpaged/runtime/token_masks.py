"""Which tokens a sequence may take next, as packed bits: bit i of word w allows id 32 * w + i."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxpaged.core.request import Request
from jaxpaged.core.scheduler import ScheduledSequence


def num_words(vocab: int) -> int:
    """W: 32-bit words that a mask of the vocabulary takes."""
    return -(-vocab // 32)


def _bits(token_ids: Sequence[int], vocab: int) -> np.ndarray:
    """uint32[W] with the bits of these ids."""
    ids = np.asarray(token_ids, np.uint32)
    mask_W = np.zeros(num_words(vocab), np.uint32)
    np.bitwise_or.at(mask_W, ids // 32, np.uint32(1) << (ids % 32))
    return mask_W


def _without(mask_W: np.ndarray | None, banned: Sequence[int], vocab: int) -> np.ndarray | None:
    """The mask less some ids, unless nothing would be left: something must be sampled."""
    if not banned:
        return mask_W
    if mask_W is None:
        mask_W = np.full(num_words(vocab), 0xFFFFFFFF, np.uint32)
    left_W = mask_W & ~_bits(banned, vocab)
    return left_W if left_W.any() else mask_W


def static_mask(request: Request, vocab: int) -> np.ndarray | None:
    """uint32[W] that holds for every position of the request; None allows everything."""
    allowed = request.params.allowed_token_ids
    banned = [word[0] for word in request.bad_word_ids if len(word) == 1]
    return _without(None if allowed is None else _bits(allowed, vocab), banned, vocab)


def waits_for_last_token(item: ScheduledSequence) -> bool:
    """Whether the mask of the token that a sequence samples depends on the token before."""
    request = item.sequence.request
    return request.grammar is not None or any(len(word) > 1 for word in request.bad_word_ids)


def below_min_tokens(item: ScheduledSequence) -> bool:
    """Whether the token that this step samples may not end the sequence yet."""
    request = item.sequence.request
    made = item.start + item.num_tokens - len(request.prompt_token_ids)
    return made < request.params.min_tokens


def next_token_mask(
    item: ScheduledSequence,
    static_W: np.ndarray | None,
    vocab: int,
    grammar_W: np.ndarray | None = None,
) -> np.ndarray | None:
    """uint32[W] of the token that this step samples; None allows everything.

    What the grammar allows comes first: other wishes hold as far as they leave something of it.
    """
    request = item.sequence.request
    banned: list[int] = []
    if grammar_W is not None:
        both_W = grammar_W if static_W is None else grammar_W & static_W
        static_W = both_W if both_W.any() else grammar_W
        if request.params.ignore_eos:  # not before the grammar's end
            banned += request.eos_token_ids
    if below_min_tokens(item):
        banned += [*request.eos_token_ids, *request.params.stop_token_ids]
    prompt_len = len(request.prompt_token_ids)
    for word in request.bad_word_ids:
        before = len(word) - 1
        if before < 1:
            continue
        output = item.sequence.token_ids[max(prompt_len, item.start + item.num_tokens - before) :]
        if tuple(output[:before]) == word[:-1]:
            banned.append(word[-1])
    return _without(static_W, banned, vocab)
