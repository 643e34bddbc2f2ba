"""Masks of grammars, when the model's vocabulary is not the tokenizer's."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from tiny_tokenizer import END, write_byte_level

import jaxpaged.grammar
import jaxpaged.runtime.grammar
from jaxpaged.core.request import Request
from jaxpaged.core.scheduler import ScheduledSequence
from jaxpaged.core.sequence import SequenceState, Status
from jaxpaged.grammar import GrammarError
from jaxpaged.runtime.grammar import Grammars
from jaxpaged.runtime.token_masks import next_token_mask, num_words, waits_for_last_token
from jaxpaged.sampling_params import SamplingParams

LEXICON = "start: /[0-9]{1,2}/"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_level(tmp_path_factory.mktemp("grammar")) / "tokenizer.json"


@pytest.fixture(scope="module")
def grammars(file: Path) -> Grammars:
    return Grammars(lambda: file)


def scheduled(grammars: Grammars, text: str = LEXICON, **params: object) -> ScheduledSequence:
    """A sequence behind its prompt, about to sample."""
    request = Request(
        request_id="r",
        prompt_token_ids=(7, 8),
        params=SamplingParams(**params),  # type: ignore[arg-type]
        seed=0,
        eos_token_ids=frozenset({END, 299}),
        grammar=grammars.compile(text).result(),
    )
    sequence = SequenceState(request, 0, (0, 0, 0), 99, [7, 8], [[]])
    return ScheduledSequence(sequence, 1, 1, 5, True, 0, 0)


def ids(mask_W: np.ndarray | None) -> set[int]:
    assert mask_W is not None
    return set(np.flatnonzero(np.unpackbits(mask_W.view(np.uint8), bitorder="little")).tolist())


@pytest.mark.parametrize("vocab", [300, 320, 350, 4000])
def test_masks_have_the_models_length(grammars: Grammars, vocab: int) -> None:
    item = scheduled(grammars)
    first, failed = grammars.masks([item], vocab)
    assert not failed and list(first) == [5] and first[5].shape == (num_words(vocab),)
    digits = ids(first[5])
    assert len(digits) == 10 and max(digits) < vocab
    item.sequence.token_ids += [min(digits)]
    assert ids(grammars.masks([item], vocab)[0][5]) == digits | {END, 299}
    item.sequence.token_ids += [max(digits)]
    assert ids(grammars.masks([item], vocab)[0][5]) == {END, 299}


def test_choices_go_their_own_ways(grammars: Grammars) -> None:
    one, other = scheduled(grammars), scheduled(grammars)
    assert one.sequence.request.grammar is other.sequence.request.grammar  # compiled once
    one.sequence.token_ids += [digit := min(ids(grammars.masks([one], 400)[0][5]))] * 2
    assert ids(grammars.masks([one], 400)[0][5]) == {END, 299}
    assert digit in ids(grammars.masks([other], 400)[0][5])


def test_an_impossible_token_fails_one_sequence(grammars: Grammars) -> None:
    good, bad = scheduled(grammars), scheduled(grammars)
    bad.sequence.token_ids += [END + 1]
    masks, failed = grammars.masks([bad, good], 400)
    assert [sequence for sequence, _ in failed] == [bad.sequence]
    assert list(masks) == [5]
    bad.sequence.status = Status.FINISHED
    assert grammars.masks([bad], 400) == ({}, [])


def test_other_wishes_hold_as_far_as_they_leave_something(grammars: Grammars) -> None:
    item = scheduled(grammars, ignore_eos=True, min_tokens=1)
    digits = ids(grammar_W := grammars.masks([item], 400)[0][5])
    assert waits_for_last_token(item)
    static_W = np.zeros(num_words(400), np.uint32)
    assert ids(next_token_mask(item, static_W, 400, grammar_W)) == digits
    static_W[:] = grammar_W
    static_W[min(digits) // 32] &= ~np.uint32(1 << min(digits) % 32)
    assert ids(next_token_mask(item, static_W, 400, grammar_W)) == digits - {min(digits)}
    item.sequence.token_ids += [min(digits)]
    grammar_W = grammars.masks([item], 400)[0][5]
    assert ids(next_token_mask(item, None, 400, grammar_W)) == digits
    item.sequence.token_ids += [min(digits)]
    grammar_W = grammars.masks([item], 400)[0][5]
    assert ids(next_token_mask(item, static_W, 400, grammar_W)) == {END, 299}


def test_a_missing_tokenizer_fails_what_needs_it(file: Path, tmp_path: Path) -> None:
    grammars = Grammars(lambda: tmp_path / "tokenizer.json")
    with pytest.raises(GrammarError, match="tokenizer"):
        grammars.warm_up().result()
    with pytest.raises(GrammarError, match="tokenizer"):
        grammars.compile(LEXICON).result()
    shutil.copy(file, tmp_path)
    assert grammars.compile(LEXICON).result()


SLOW = "e: " + " | ".join(["e e e"] * 500) + ' | "a"'


def test_a_grammar_that_takes_too_long_is_left_behind(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a second, where others take a millisecond."""
    monkeypatch.setattr(jaxpaged.grammar, "MAX_ITEMS", 100_000)
    slow, good = scheduled(grammars, 'start: "b" e\n' + SLOW), scheduled(grammars)
    assert grammars.masks([slow, good], 400)[1] == []
    slow.sequence.token_ids += grammars._vocabulary.greedy_tokenize("baa")
    monkeypatch.setattr(jaxpaged.runtime.grammar, "MASK_SECONDS", 0.1)
    masks, failed = grammars.masks([slow, good], 400)
    assert failed == [(slow.sequence, "it takes too long")]
    assert len(ids(masks[5])) == 10


def test_a_grammar_that_takes_too_long_from_the_start(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jaxpaged.grammar, "MASK_SECONDS", 0.1)
    monkeypatch.setattr(jaxpaged.grammar, "MAX_ITEMS", 100_000)
    with pytest.raises(GrammarError, match="too long"):
        grammars.compile("start: e\n" + SLOW).result()


def test_an_ambiguous_grammar_ends_before_it_takes_long(grammars: Grammars) -> None:
    """100 bytes that took seconds a token."""
    any_way = " | ".join("e " * count for count in range(2, 11))
    item = scheduled(grammars, f'start: e\ne: {any_way} | "a" | "b" | ""')
    letter = grammars._vocabulary.greedy_tokenize("a")
    began, failed = time.monotonic(), []
    while not failed and len(item.sequence.token_ids) < 40:
        failed = grammars.masks([item], 400)[1]
        item.sequence.token_ids += letter
    assert failed and time.monotonic() - began < 10


def test_a_grammar_that_is_slow_again_and_again_fails_alone(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jaxpaged.grammar, "MAX_ITEMS", 100_000)
    # Far below what the last of its masks take, on any machine.
    monkeypatch.setattr(jaxpaged.runtime.grammar, "SLOW_SECONDS", 0.02)
    monkeypatch.setattr(jaxpaged.runtime.grammar, "BUDGET_SECONDS", 0.04)
    slow = scheduled(grammars, 'start: "c" e\n' + SLOW.replace(" | e e e" * 400, ""))
    good = scheduled(grammars, "start: /[0-9]{1,99}/")
    assert grammars.masks([slow, good], 400)[1] == []
    slow.sequence.token_ids += grammars._vocabulary.greedy_tokenize("caa")
    for _ in range(9):
        masks, failed = grammars.masks([slow, good], 400)
        if failed:
            break
        slow.sequence.token_ids += grammars._vocabulary.greedy_tokenize("a")
    assert failed == [(slow.sequence, "it takes too long")]
    assert masks
