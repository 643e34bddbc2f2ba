"""The engine core as a process of its own: `python -m jaxpaged.engine.core_process`.

Reads its settings from standard input, takes `FrontMessage`s from one ZeroMQ socket and sends
`CoreMessage`s to one socket for each front end. JSON, templates and tokenizers run elsewhere, so
they never hold up a step. Ends with 0 on `Shutdown`, with 1 after it told why in `EngineDead`.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

import msgspec
import zmq

from jaxpaged.config import EngineConfig
from jaxpaged.engine.messages import (
    AbortRequests,
    AddRequest,
    AskPool,
    Command,
    CoreMessage,
    EngineDead,
    FinishSequence,
    FrontMessage,
    PoolSnapshot,
    SequenceOutput,
    Shutdown,
    StepOutputs,
)
from jaxpaged.error_log import log_to_stderr

if TYPE_CHECKING:
    from jaxpaged.engine.engine_core import EngineCore

log = logging.getLogger(__name__)

IDLE_POLL_MS = 1000  # how often an idle core looks whether its parent still lives
LAST_WORDS_MS = 30_000  # most that the end waits for a front end to hear the reason
LOSS_SECONDS = 2.0  # until a host's end is noticed, after a computation may have failed for it
PICTURE_SHARE = 0.01  # most of a busy loop's time that pictures of the pool should take
PICTURE_SECONDS = 1.0  # most between two of them, if they are wanted


class CoreServer:
    """Moves messages between the sockets and an `EngineCore`.

    Args:
        sinks: one for each front end.
        parent: the process without which this one ends.
    """

    def __init__(
        self, core: EngineCore, source: zmq.Socket, sinks: Sequence[zmq.Socket], parent: int
    ) -> None:
        self._core, self._source, self._sinks = core, source, sinks
        self._decoder = msgspec.msgpack.Decoder(FrontMessage)
        self._encoder = msgspec.msgpack.Encoder()
        self._parent = parent
        self._pool_asked = False
        self._next_picture = 0.0  # not before; time.perf_counter()

    def run(self) -> None:
        """Serve until `Shutdown` or the parent's death."""
        for sink in self._sinks:
            self._send(sink, self._core.info)
        while os.getppid() == self._parent:
            heard = False
            while self._source.poll(0 if self._core.has_work or heard else IDLE_POLL_MS):
                message = self._decoder.decode(self._source.recv())
                if isinstance(message, Shutdown):
                    return
                self._handle(message)
                heard = True
            if self._core.has_work:
                self._tell(self._core.step())
            elif heard:
                self._next_picture = 0.0  # nothing is held up
                self._tell([])
        log.error("the server process is gone: ending")

    def _send(self, sink: zmq.Socket, message: CoreMessage) -> None:
        sink.send(self._encoder.encode(message))

    def _tell(self, outputs: list[SequenceOutput]) -> None:
        """To each front end what is its own, and the state to all."""
        stats, picture = self._core.stats(), self._picture()
        count = len(self._sinks)
        shares = [outputs] if count == 1 else _shares(outputs, count)
        for sink, share in zip(self._sinks, shares, strict=True):
            self._send(sink, StepOutputs(share, stats, picture))

    def _handle(self, message: FrontMessage) -> None:
        match message:
            case AddRequest():
                self._core.add(message)
            case AbortRequests():
                for request_id in message.request_ids:
                    self._core.abort(request_id)
            case FinishSequence():
                self._core.finish(message.request_id, message.index, message.num_tokens)
            case Command():
                sink = self._sinks[message.number % len(self._sinks)]
                self._send(sink, self._core.command(message))
            case AskPool():
                self._pool_asked = True

    def _picture(self) -> PoolSnapshot | None:
        """The pool, if somebody asked and it is cheap enough: the device computes meanwhile."""
        if not self._pool_asked or (begin := time.perf_counter()) < self._next_picture:
            return None
        self._pool_asked = False
        cpu = time.thread_time()
        picture = self._core.pool()
        cost = time.thread_time() - cpu
        self._next_picture = begin + min(PICTURE_SECONDS, cost / PICTURE_SHARE)
        return picture


def _shares(outputs: list[SequenceOutput], count: int) -> list[list[SequenceOutput]]:
    """The outputs for each of `count` front ends; the number behind a request's id tells whose."""
    shares: list[list[SequenceOutput]] = [[] for _ in range(count)]
    for output in outputs:
        number = int(output.request_id.rpartition("-")[2])
        shares[number % count].append(output)
    return shares


def _connect(context: zmq.Context, address: str) -> zmq.Socket:
    socket = context.socket(zmq.PUSH)
    socket.set_hwm(0)
    socket.connect(address)
    return socket


def main() -> int:
    """Run an engine core until it is told to stop; the exit status."""
    began, parent = time.perf_counter(), os.getppid()
    parser = argparse.ArgumentParser(description="jaxpaged's engine core (started by the server)")
    parser.add_argument("--replica", type=int, default=0, help="which of several engines it is")
    parser.add_argument("--input", required=True, help="ZeroMQ address to read messages at")
    parser.add_argument(
        "--output", required=True, nargs="+", help="ZeroMQ address of each front end"
    )
    args = parser.parse_args()
    # Ctrl-C and a service manager reach the whole group: when to end, the server decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    config = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=EngineConfig)
    several = config.data_parallel_size > 1
    log_to_stderr("info", f"engine {args.replica}" if several else "")
    for name in ("xla_bridge", "compilation_cache"):  # what it lacks, and each time it is reset
        logging.getLogger(f"jax._src.{name}").setLevel(logging.WARNING)

    context = zmq.Context()
    source = context.socket(zmq.PULL)
    source.set_hwm(0)
    source.bind(args.input)
    sinks = [_connect(context, address) for address in args.output]

    def die(reason: str) -> NoReturn:
        """End at once, from any thread: JAX would wait for the other hosts."""
        last = zmq.Context()
        for address in args.output:
            _connect(last, address).send(msgspec.msgpack.encode(EngineDead(reason)))
        last.destroy(linger=LAST_WORDS_MS)
        os._exit(1)

    try:
        core = _start(config, args.replica, began, die)
        gc.collect()
        gc.freeze()  # half a million objects of tracing: a step would wait while they are searched
        CoreServer(core, source, sinks, parent).run()
        core.end()
        context.destroy(linger=0)  # nobody listens any more
        return 0
    except StartupError as error:
        reason = str(error)
    except BaseException as error:
        if config.num_hosts > 1:
            time.sleep(LOSS_SECONDS)  # a host that is gone makes computing fail: `die` tells of it
        log.exception("the engine core failed")
        reason = f"the engine core failed: {type(error).__name__}: {error}".splitlines()[0]
    if config.num_hosts > 1:
        die(reason)
    for sink in sinks:
        sink.send(msgspec.msgpack.encode(EngineDead(reason)))
        sink.close(linger=LAST_WORDS_MS)
    return 1


class StartupError(Exception):
    """Settings, model or memory do not fit together: one line that says what to change."""


def _start(
    config: EngineConfig, replica: int, began: float, on_loss: Callable[[str], None]
) -> EngineCore:
    # Imported here: the share of GPU memory must be settled before JAX starts its backend, and
    # the time that the import takes is reported.
    from jaxpaged.engine.engine_core import EngineCore
    from jaxpaged.runtime.memory import claim_memory
    from jaxpaged.runtime.multi_host import join_hosts

    claim_memory(config)
    imported = time.perf_counter() - began
    try:
        group = join_hosts(config, on_loss)
        return EngineCore(
            config, serving=True, replica=replica, import_seconds=imported, group=group
        )
    except (ValueError, OSError) as error:
        raise StartupError(str(error)) from error


if __name__ == "__main__":
    sys.exit(main())
