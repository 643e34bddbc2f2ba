"""A process that compiles grammars for the server: `python -m jaxpaged.engine.grammar_worker FILE`.

A few hundred bytes can make llguidance work for hours, take all memory, or overflow its stack. Here
that ends a process which nobody misses. FILE is a tokenizer.json. Each message, on standard input
and output, is msgpack behind its length; standard input's end is the process's.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
from pathlib import Path
from typing import IO

import msgspec
from llguidance import LLTokenizer

from jaxpaged.grammar import (
    CompilerThreads,
    GrammarError,
    compile_grammar,
    grammar_text,
    read_vocabulary,
)
from jaxpaged.sampling_params import StructuredOutputs

MAX_MEMORY = 8 << 30  # of address space; stacks count, whether touched or not
LENGTH_BYTES = 4


class Verdict(msgspec.Struct):
    """What became of a StructuredOutputs: one of the two is set."""

    text: str | None = None  # for the core, as llguidance takes it
    error: str | None = None  # one line


def send(stream: IO[bytes], message: bytes) -> None:
    """Write a message."""
    stream.write(len(message).to_bytes(LENGTH_BYTES, "big") + message)
    stream.flush()


def receive(stream: IO[bytes]) -> bytes | None:
    """Read a message; None: the other side is gone."""
    length = int.from_bytes(stream.read(LENGTH_BYTES), "big")
    message = stream.read(length)
    return message if length and len(message) == length else None


class Compiler:
    """Answers one question after the other."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._vocabulary: LLTokenizer | None = None

    def warm_up(self) -> None:
        """Read the tokenizer; if that fails, each question will hear why."""
        with contextlib.suppress(GrammarError):
            self._vocabulary = read_vocabulary(self._file)

    def answer(self, question: bytes) -> None:
        """Compile what the question asks for, and tell what became of it."""
        try:
            if self._vocabulary is None:
                self._vocabulary = read_vocabulary(self._file)
            text = grammar_text(msgspec.msgpack.decode(question, type=StructuredOutputs))
            compile_grammar(self._vocabulary, text)
            verdict = Verdict(text=text)
        except GrammarError as error:
            verdict = Verdict(error=str(error))
        except BaseException as error:
            verdict = Verdict(error=f"{type(error).__name__}: {error}".splitlines()[0])
        send(sys.stdout.buffer, msgspec.msgpack.encode(verdict))


def main() -> None:
    """Answer until standard input ends."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the server decides when it ends
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    compiler, thread = Compiler(Path(sys.argv[1])), CompilerThreads(1)
    thread.submit(compiler.warm_up)  # the first question need not wait for it
    while (question := receive(sys.stdin.buffer)) is not None:
        thread.submit(compiler.answer, question)
    os._exit(0)  # whatever is being compiled


if __name__ == "__main__":
    main()
