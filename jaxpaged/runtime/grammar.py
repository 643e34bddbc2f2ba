"""Follows the grammars of constrained sequences: which tokens each may take next."""

from __future__ import annotations

import functools
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask_par

from jaxpaged.core.scheduler import ScheduledSequence
from jaxpaged.core.sequence import SequenceState
from jaxpaged.grammar import CompilerThreads, compile_grammar, one_line, read_vocabulary
from jaxpaged.runtime.token_masks import num_words

CACHED = 64  # compiled grammars
MAX_THREADS = 8  # that compute masks


class GrammarState:
    """A place in a grammar: behind the first `num_taken` outputs of a sequence."""

    def __init__(self, matcher: LLMatcher, num_taken: int = 0) -> None:
        self.matcher = matcher
        self.num_taken = num_taken

    def fork(self) -> GrammarState:
        """The same place, to go on from alone."""
        return GrammarState(self.matcher.deep_copy(), self.num_taken)

    def take(self, output_ids: Sequence[int]) -> None:
        """Move behind all of these outputs, of which it knows the first ones.

        A preempted sequence keeps its outputs, so that a place never moves back.
        """
        self.matcher.consume_tokens(list(output_ids[self.num_taken :]))
        self.num_taken = len(output_ids)


class Grammars:
    """Compiles grammars beside the loop, and computes masks while the device runs.

    Args:
        tokenizer_file: finds the model's tokenizer.json; called once, in a thread.
        vocab: size of the model's vocabulary.
    """

    def __init__(self, tokenizer_file: Callable[[], Path], vocab: int) -> None:
        self._tokenizer_file, self._vocab = tokenizer_file, vocab
        self._compiled: OrderedDict[str, GrammarState] = OrderedDict()
        self._vocabulary: LLTokenizer | None = None

    @functools.cached_property
    def _threads(self) -> CompilerThreads:
        return CompilerThreads(1)

    @functools.cached_property
    def _executor(self) -> LLExecutor:
        return LLExecutor(max(1, min(MAX_THREADS, (os.cpu_count() or 1) // 2)))

    def compile(self, text: str, eos_token_ids: Sequence[int]) -> Future[GrammarState]:
        """The place where every sequence of this grammar begins, in a while.

        The future raises GrammarError where the grammar or the tokenizer is of no use.
        """
        return self._threads.submit(self._compile, text, eos_token_ids)

    def _compile(self, text: str, eos_token_ids: Sequence[int]) -> GrammarState:
        if self._vocabulary is None:
            self._vocabulary = read_vocabulary(self._tokenizer_file(), self._vocab, eos_token_ids)
        state = self._compiled.pop(text, None)
        if state is None:
            state = GrammarState(compile_grammar(self._vocabulary, text))
        self._compiled[text] = state  # the last used is the last to go
        if len(self._compiled) > CACHED:
            self._compiled.popitem(last=False)
        return state

    def masks(
        self, scheduled: Sequence[ScheduledSequence]
    ) -> tuple[dict[int, np.ndarray], list[tuple[SequenceState, str]]]:
        """Masks of the sequences that sample under a grammar, once their tokens are known.

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
        for item in items:
            sequence = item.sequence
            if sequence.grammar is None:
                sequence.grammar = sequence.request.grammar.fork()
            sequence.grammar.take(sequence.output_token_ids)
        assert self._vocabulary is not None
        mask_NW = np.zeros((len(items), num_words(self._vocabulary.vocab_size)), np.int32)
        matchers = [(item.sequence.grammar.matcher, n) for n, item in enumerate(items)]
        fill_next_token_bitmask_par(self._executor, matchers, mask_NW)
        words = mask_NW.view(np.uint32)[:, : num_words(self._vocab)]
        masks, failed = {}, []
        for item, mask_W in zip(items, words, strict=True):
            matcher = item.sequence.grammar.matcher
            if matcher.is_error() or not mask_W.any():
                failed.append((item.sequence, one_line(matcher.get_error()) or "no token fits"))
            else:
                masks[item.slot] = mask_W
        return masks, failed
