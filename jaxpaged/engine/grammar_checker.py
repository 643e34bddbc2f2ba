"""Checks what a request wants its output to match, before anything of it is scheduled."""

from __future__ import annotations

import asyncio
import select
import subprocess
import sys
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec

from jaxpaged.engine.errors import BadRequestError, RequestFailedError
from jaxpaged.engine.grammar_worker import Verdict, receive, send
from jaxpaged.sampling_params import StructuredOutputs

COMPILE_SECONDS = 10.0  # until a worker is killed
WAIT_SECONDS = 20.0  # until a client hears that no worker has had time to begin with its grammar
MAX_WAITING = 32  # grammars that no worker has begun with; more clients hear so at once
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
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, str] = OrderedDict()  # what became of good questions
        self._waiting = 0
        self._closed = False

    def warm_up(self) -> None:
        """Start a worker now, so that no request has to wait for it."""
        self._threads.submit(lambda: self._worker.start())

    def submit(self, wanted: StructuredOutputs) -> Future[str]:
        """The grammar for the core, in a while; a BadRequestError if it cannot be followed.

        Raises:
            BadRequestError: says what is wrong.
            RequestFailedError: too many wait already.
        """
        try:
            question = msgspec.msgpack.encode(wanted)
        except UnicodeEncodeError:
            raise _refused("it holds half of a surrogate pair, which is no text") from None
        except RecursionError:
            raise _refused("it is nested too deeply") from None
        with self._lock:
            if self._closed:
                raise _closing()
            if question in self._known:
                self._known.move_to_end(question)
                known: Future[str] = Future()
                known.set_result(self._known[question])
                return known
            if self._waiting >= MAX_WAITING:
                raise _busy()
            self._waiting += 1
        return self._threads.submit(self._check, question)

    async def checked(self, wanted: StructuredOutputs) -> str:
        """The grammar for the core. Nobody works on it any more if this is cancelled in time.

        Raises:
            BadRequestError: says what is wrong.
            RequestFailedError: no worker has time for it.
        """
        future = self.submit(wanted)
        waiting = asyncio.wrap_future(future)  # if cancelled, `future` is, too
        try:
            done, _ = await asyncio.wait([waiting], timeout=WAIT_SECONDS)
            if not done and self._give_up(future):
                raise _busy()
            return await waiting
        except asyncio.CancelledError:
            self._give_up(future)
            waiting.cancel()  # nobody asks for its exception
            if self._closed:
                raise _closing() from None
            raise

    def check(self, wanted: StructuredOutputs) -> str:
        """The same, where nothing else has to go on meanwhile."""
        future = self.submit(wanted)
        try:
            return future.result(WAIT_SECONDS)
        except TimeoutError:
            if self._give_up(future):
                raise _busy() from None
            return future.result()  # it has begun, and ends in time

    def close(self) -> None:
        """End the workers; requests that wait for them fail."""
        with self._lock:
            self._closed = True
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

    def _give_up(self, future: Future[str]) -> bool:
        """Whether nobody had begun with it, and nobody will."""
        if future.done() or not future.cancel():
            return False
        with self._lock:
            self._waiting -= 1
        return True

    def _check(self, question: bytes) -> str:
        with self._lock:
            self._waiting -= 1
            if question in self._known:  # another has asked the same meanwhile
                return self._known[question]
        try:
            verdict = self._worker.ask(question)
        except TimeoutError:
            raise _refused(
                f"compiling it takes more than {COMPILE_SECONDS:.0f} seconds; simplify it"
            ) from None
        except ChildProcessError:
            if self._closed:
                raise _closing() from None
            raise _refused("compiling it takes too much memory or too deep a stack") from None
        if verdict.text is None:
            raise _refused(verdict.error or "it is of no use")
        with self._lock:
            self._known[question] = verdict.text
            if len(self._known) > CACHED:
                self._known.popitem(last=False)
        return verdict.text


def _refused(reason: str) -> BadRequestError:
    return BadRequestError(f"the output cannot be constrained as asked: {reason}", PARAM)


def _busy() -> RequestFailedError:
    return RequestFailedError("too many grammars wait to be compiled; try again later", 503)


def _closing() -> RequestFailedError:
    return RequestFailedError("the server is shutting down", 503)
