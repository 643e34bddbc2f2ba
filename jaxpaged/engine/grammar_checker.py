"""Checks what a request wants its output to match, before anything of it is scheduled."""

from __future__ import annotations

import contextlib
import functools
from concurrent.futures import Future
from pathlib import Path

from llguidance import LLTokenizer

from jaxpaged.engine.errors import BadRequestError
from jaxpaged.grammar import (
    CompilerThreads,
    GrammarError,
    compile_grammar,
    grammar_text,
    read_vocabulary,
)
from jaxpaged.sampling_params import StructuredOutputs

COMPILE_SECONDS = 10.0  # until the client is told that its grammar takes too long
PARAM = "structured_outputs"
CACHED = 256  # grammars that were found to be good


class GrammarChecker:
    """Compiles grammars in threads of its own, and remembers good ones.

    Args:
        tokenizer_file: the tokenizer.json that the core reads too.
    """

    def __init__(self, tokenizer_file: Path) -> None:
        self._file = tokenizer_file
        self._threads = CompilerThreads(2)
        self._compile = functools.lru_cache(CACHED)(self._compile_anew)

    def warm_up(self) -> None:
        """Read the tokenizer now, so that no request has to wait for it.

        Not being able to is no failure before a request asks for a grammar.
        """
        with contextlib.suppress(GrammarError):
            self._vocabulary  # noqa: B018

    def submit(self, wanted: StructuredOutputs) -> Future[str]:
        """The grammar for the core, in a while; a BadRequestError if it cannot be followed.

        Wait for at most COMPILE_SECONDS; `too_slow` is what to raise then.
        """
        return self._threads.submit(self._check, wanted)

    def check(self, wanted: StructuredOutputs) -> str:
        """The same, and wait for it.

        Raises:
            BadRequestError: says what is wrong.
        """
        future = self.submit(wanted)
        try:
            return future.result(COMPILE_SECONDS)
        except TimeoutError:
            future.cancel()
            raise too_slow() from None

    def _check(self, wanted: StructuredOutputs) -> str:
        try:
            text = grammar_text(wanted)
            self._compile(text)
        except GrammarError as error:
            raise BadRequestError(
                f"the output cannot be constrained as asked: {error}", PARAM
            ) from error
        return text

    def _compile_anew(self, text: str) -> None:
        compile_grammar(self._vocabulary, text)

    @functools.cached_property
    def _vocabulary(self) -> LLTokenizer:
        return read_vocabulary(self._file)


def too_slow() -> BadRequestError:
    """What a client hears whose grammar is not compiled in time."""
    return BadRequestError(
        f"compiling the constraint of the output takes more than {COMPILE_SECONDS:.0f} seconds: "
        f"simplify it or try again",
        PARAM,
    )
