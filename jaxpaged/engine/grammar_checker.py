"""Checks what a request wants its output to match, before anything of it is scheduled."""

from __future__ import annotations

import functools
import select
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec

from jaxpaged.engine.errors import BadRequestError
from jaxpaged.engine.grammar_worker import Verdict, receive, send
from jaxpaged.sampling_params import StructuredOutputs

COMPILE_SECONDS = 10.0  # until a worker is killed
WAIT_SECONDS = 20.0  # until a client hears that nobody has time for its grammar
WORKERS = 2  # the second is started when the first is busy
CACHED = 256  # good grammars that are remembered
PARAM = "structured_outputs"


class GrammarWorker:
    """A worker process, started when it is needed and again after it was killed. One thread's."""

    def __init__(self, tokenizer_file: Path) -> None:
        self._command = (
            sys.executable, "-m", "jaxpaged.engine.grammar_worker", str(tokenizer_file),
        )  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> subprocess.Popen[bytes]:
        """The process; a new one if there is none."""
        if self._process is None:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        return self._process

    def ask(self, question: bytes) -> Verdict:
        """The verdict on an encoded StructuredOutputs.

        Raises:
            TimeoutError: it takes more than COMPILE_SECONDS.
            ChildProcessError: the worker has died of it.
        """
        process = self.start()
        assert process.stdin is not None and process.stdout is not None
        try:
            send(process.stdin, question)
            ready = select.poll()
            ready.register(process.stdout, select.POLLIN)
            if not ready.poll(COMPILE_SECONDS * 1000):
                raise TimeoutError
            answer = receive(process.stdout)
            if answer is None:
                raise ChildProcessError
        except OSError as error:  # those two, and a pipe that broke
            self.kill()
            if isinstance(error, TimeoutError):
                raise
            raise ChildProcessError from error
        return msgspec.msgpack.decode(answer, type=Verdict)

    def kill(self) -> None:
        """End the process, if there is one; who waits for its answer hears that it has died."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()


class GrammarChecker:
    """Has grammars compiled by worker processes, and remembers good ones.

    Args:
        tokenizer_file: the tokenizer.json that the core reads too.
    """

    def __init__(self, tokenizer_file: Path) -> None:
        self._file = tokenizer_file
        self._workers: list[GrammarWorker] = []
        self._own = threading.local()  # each thread's worker
        self._threads = ThreadPoolExecutor(WORKERS, "grammar")
        self._text_of = functools.lru_cache(CACHED)(self._ask)

    def warm_up(self) -> None:
        """Start a worker now, so that no request has to wait for it."""
        self._threads.submit(lambda: self._worker.start())

    def submit(self, wanted: StructuredOutputs) -> Future[str]:
        """The grammar for the core, in a while; a BadRequestError if it cannot be followed.

        Wait for at most WAIT_SECONDS; `too_slow` is what to raise then.
        """
        return self._threads.submit(self._check, wanted)

    def check(self, wanted: StructuredOutputs) -> str:
        """The same, and wait for it.

        Raises:
            BadRequestError: says what is wrong.
        """
        future = self.submit(wanted)
        try:
            return future.result(WAIT_SECONDS)
        except TimeoutError:
            future.cancel()
            raise too_slow() from None

    def close(self) -> None:
        """End the workers; requests that wait for them fail."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.kill()

    @property
    def _worker(self) -> GrammarWorker:
        worker: GrammarWorker | None = getattr(self._own, "worker", None)
        if worker is None:
            worker = self._own.worker = GrammarWorker(self._file)
            self._workers.append(worker)
        return worker

    def _check(self, wanted: StructuredOutputs) -> str:
        try:
            question = msgspec.msgpack.encode(wanted)
        except UnicodeEncodeError:
            raise _refused("it holds half of a surrogate pair, which is no text") from None
        except RecursionError:
            raise _refused("it is nested too deeply") from None
        return self._text_of(question)

    def _ask(self, question: bytes) -> str:
        try:
            verdict = self._worker.ask(question)
        except TimeoutError:
            raise too_slow() from None
        except ChildProcessError:
            raise _refused("compiling it takes too much memory or too deep a stack") from None
        if verdict.text is None:
            raise _refused(verdict.error or "it is of no use")
        return verdict.text


def _refused(reason: str) -> BadRequestError:
    return BadRequestError(f"the output cannot be constrained as asked: {reason}", PARAM)


def too_slow() -> BadRequestError:
    """What a client hears whose grammar is not compiled in time."""
    return BadRequestError(
        "the output cannot be constrained as asked: compiling that takes more than "
        f"{COMPILE_SECONDS:.0f} seconds; simplify it or try again",
        PARAM,
    )
