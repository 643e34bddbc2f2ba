"""Follows the grammars of constrained sequences: which tokens each may take next."""

from __future__ import annotations

import functools
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask_par

from jaxpaged.core.request import Request
from jaxpaged.core.scheduler import ScheduledSequence
from jaxpaged.core.sequence import SequenceState
from jaxpaged.grammar import (
    MASK_SECONDS,
    CompilerThreads,
    compile_grammar,
    one_line,
    read_vocabulary,
)
from jaxpaged.runtime.token_masks import num_words

CACHED = 64  # compiled grammars
MAX_THREADS = 8  # that compute masks


class GrammarState:
    """A place in a grammar: behind the first `num_taken` outputs of one sequence."""

    def __init__(self, matcher: LLMatcher, num_taken: int = 0) -> None:
        self.matcher = matcher
        self.num_taken = num_taken

    def fork(self) -> GrammarState:
        """The same place, to go on from alone."""
        return GrammarState(self.matcher.deep_copy(), self.num_taken)

    def catch_up(self, sequence: SequenceState) -> None:
        """Move behind all outputs that the host knows.

        A preempted sequence keeps its outputs, so that a place never moves back.
        """
        fresh = sequence.token_ids[sequence.prompt_len + self.num_taken :]
        self.matcher.consume_tokens(fresh)
        self.num_taken += len(fresh)


class _Fill:
    """The masks of some sequences in the making, in a thread that can be left behind.

    llguidance's limits of work hold off most of what takes long, but not all.
    """

    def __init__(self, items: list[ScheduledSequence], num_words: int) -> None:
        self._sequences = [item.sequence for item in items]
        self._states: list[GrammarState] = []
        self._abandoned = False
        self._behind: int | None = None  # row of the one that catches up just now
        self._error: BaseException | None = None
        self.mask_NW = np.zeros((len(items), num_words), np.int32)

    def run(self, executor: LLExecutor) -> list[int]:
        """Compute all masks; rows that may have held up the rest for too long."""
        # A thread a step costs 0.1 ms. Nobody can stop one: it is left behind.
        thread = threading.Thread(target=self._try, args=(executor,), daemon=True)
        thread.start()
        thread.join(MASK_SECONDS)
        if thread.is_alive():
            return self._abandon()
        if self._error is not None:
            raise self._error
        for sequence, state in zip(self._sequences, self._states, strict=True):
            sequence.grammar = state
        return []

    def _abandon(self) -> list[int]:
        self._abandoned = True
        for sequence in self._sequences:
            sequence.grammar = None  # the thread still uses it: begin anew
        if self._behind is not None:
            return [self._behind]
        return np.flatnonzero(~self.mask_NW.any(axis=1)).tolist()

    def _try(self, executor: LLExecutor) -> None:
        try:
            self._fill(executor)
        except BaseException as error:
            self._error = error

    def _fill(self, executor: LLExecutor) -> None:
        for row, sequence in enumerate(self._sequences):
            self._behind = row
            state = sequence.grammar or sequence.request.grammar.fork()
            state.catch_up(sequence)
            if self._abandoned:
                return
            self._states.append(state)
        self._behind = None
        matchers = [(state.matcher, row) for row, state in enumerate(self._states)]
        fill_next_token_bitmask_par(executor, matchers, self.mask_NW)


class Grammars:
    """Compiles grammars beside the loop, and computes masks while the device runs.

    Args:
        tokenizer_file: finds the model's tokenizer.json; called once, in a thread.
    """

    def __init__(self, tokenizer_file: Callable[[], Path]) -> None:
        self._tokenizer_file = tokenizer_file
        self._compiled: OrderedDict[str, GrammarState] = OrderedDict()

    @functools.cached_property
    def _vocabulary(self) -> LLTokenizer:
        return read_vocabulary(self._tokenizer_file())

    @functools.cached_property
    def _threads(self) -> CompilerThreads:
        return CompilerThreads(2)

    @functools.cached_property
    def _executor(self) -> LLExecutor:
        return LLExecutor(max(1, min(MAX_THREADS, (os.cpu_count() or 1) // 2)))

    def warm_up(self) -> Future[LLTokenizer]:
        """Read the tokenizer now, so that no step has to wait for it."""
        return self._threads.submit(lambda: self._vocabulary)

    def compile(self, text: str) -> Future[GrammarState]:
        """The place where every sequence of this grammar begins, in a while.

        The future raises GrammarError where the grammar or the tokenizer is of no use.
        """
        return self._threads.submit(self._compile, text)

    def _compile(self, text: str) -> GrammarState:
        state = self._compiled.pop(text, None)
        if state is None:
            state = GrammarState(compile_grammar(self._vocabulary, text))
        self._compiled[text] = state  # the last used is the last to go
        if len(self._compiled) > CACHED:
            self._compiled.popitem(last=False)
        return state

    def masks(
        self, scheduled: Sequence[ScheduledSequence], vocab: int
    ) -> tuple[dict[int, np.ndarray], list[tuple[SequenceState, str]]]:
        """Masks of the sequences that sample under a grammar, once their tokens are known.

        Args:
            vocab: size of the model's vocabulary; the tokenizer's may be larger or smaller.

        Returns:
            uint32[W] by slot; and the sequences that cannot go on, with the reason.
        """
        items = [
            item
            for item in scheduled
            if item.samples
            and item.sequence.request.grammar is not None
            and not item.sequence.finished
        ]
        if not items:
            return {}, []
        masks: dict[int, np.ndarray] = {}
        failed: list[tuple[SequenceState, str]] = []
        groups = [items]
        while groups:
            group = groups.pop()
            fill = _Fill(group, num_words(self._vocabulary.vocab_size))
            suspects = fill.run(self._executor)
            if not suspects:
                for item, known_W in zip(group, fill.mask_NW.view(np.uint32), strict=True):
                    mask_W = self._for_model(known_W, vocab, item.sequence.request)
                    matcher = item.sequence.grammar.matcher
                    if matcher.is_error() or not mask_W.any():
                        reason = one_line(matcher.get_error()) or "no token fits"
                        failed.append((item.sequence, reason))
                    else:
                        masks[item.slot] = mask_W
                continue
            del self._executor  # its threads may be busy for hours
            if len(group) == 1:
                failed.append((group[0].sequence, "it takes too long"))
                continue
            alone = [group[row] for row in suspects]
            groups += [[item] for item in alone]
            if rest := [item for item in group if item not in alone]:
                groups.append(rest)
        return masks, failed

    def _for_model(self, known_W: np.ndarray, vocab: int, request: Request) -> np.ndarray:
        """A mask as long as the model's; where the text may end, with the ends of this request."""
        word, bit = divmod(self._vocabulary.eos_token, 32)
        may_end = known_W[word] >> bit & 1
        known_W[word] &= ~np.uint32(1 << bit)
        mask_W = np.zeros(num_words(vocab), np.uint32)
        shared = min(mask_W.size, known_W.size)
        mask_W[:shared] = known_W[:shared]
        if may_end:
            for token_id in request.eos_token_ids:
                mask_W[token_id // 32] |= np.uint32(1 << token_id % 32)
        return mask_W
