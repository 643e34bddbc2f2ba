"""The engine core as a process of its own: `python -m jaxpaged.engine.core_process`.

Reads its settings from standard input, takes `FrontMessage`s from one ZeroMQ socket and sends
`CoreMessage`s to another. JSON, templates and tokenizers run elsewhere, so they never hold up a
step. Ends with 0 on `Shutdown`, with 1 after it told why in `EngineDead`.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
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
    Shutdown,
    StepOutputs,
)

if TYPE_CHECKING:
    from jaxpaged.engine.engine_core import EngineCore

log = logging.getLogger(__name__)

IDLE_POLL_MS = 1000  # how often an idle core looks whether its parent still lives
LOSS_SECONDS = 2.0  # until a host's end is noticed, after a computation may have failed for it
PICTURE_SHARE = 0.01  # most of a busy loop's time that pictures of the pool should take
PICTURE_SECONDS = 1.0  # most between two of them, if they are wanted


class CoreServer:
    """Moves messages between the sockets and an `EngineCore`."""

    def __init__(self, core: EngineCore, source: zmq.Socket, sink: zmq.Socket, parent: int) -> None:
        self._core, self._source, self._sink = core, source, sink
        self._decoder = msgspec.msgpack.Decoder(FrontMessage)
        self._encoder = msgspec.msgpack.Encoder()
        self._parent = parent
        self._pool_asked = False
        self._next_picture = 0.0  # not before; time.perf_counter()

    def send(self, message: CoreMessage) -> None:
        self._sink.send(self._encoder.encode(message))

    def run(self) -> None:
        """Serve until `Shutdown` or the parent's death."""
        self.send(self._core.info)
        while os.getppid() == self._parent:
            heard = False
            while self._source.poll(0 if self._core.has_work or heard else IDLE_POLL_MS):
                message = self._decoder.decode(self._source.recv())
                if isinstance(message, Shutdown):
                    return
                self._handle(message)
                heard = True
            if self._core.has_work:
                outputs = self._core.step()
                self.send(StepOutputs(outputs, self._core.stats(), self._picture()))
            elif heard:
                self._next_picture = 0.0  # nothing is held up
                self.send(StepOutputs([], self._core.stats(), self._picture()))
        log.error("the server process is gone: ending")

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
                self.send(self._core.command(message))
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


def _connect(context: zmq.Context, kind: int, address: str) -> zmq.Socket:
    socket = context.socket(kind)
    socket.set_hwm(0)
    socket.connect(address)
    return socket


def main() -> int:
    """Run an engine core until it is told to stop; the exit status."""
    began, parent = time.perf_counter(), os.getppid()
    parser = argparse.ArgumentParser(description="jaxpaged's engine core (started by the server)")
    parser.add_argument("--input", required=True, help="ZeroMQ address to take messages from")
    parser.add_argument("--output", required=True, help="ZeroMQ address to send messages to")
    args = parser.parse_args()
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.WARNING)  # tells what it lacks
    # Ctrl-C and a service manager reach the whole group: when to end, the server decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    config = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=EngineConfig)

    context = zmq.Context()
    source = _connect(context, zmq.PULL, args.input)
    sink = _connect(context, zmq.PUSH, args.output)

    def die(reason: str) -> NoReturn:
        """End at once, from any thread: JAX would wait for the other hosts."""
        last = zmq.Context()
        _connect(last, zmq.PUSH, args.output).send(msgspec.msgpack.encode(EngineDead(reason)))
        last.destroy(linger=5000)
        os._exit(1)

    try:
        core = _start(config, began, die)
        CoreServer(core, source, sink, parent).run()
        core.end()
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
    sink.send(msgspec.msgpack.encode(EngineDead(reason)))
    sink.close(linger=5000)
    return 1


class StartupError(Exception):
    """Settings, model or memory do not fit together: one line that says what to change."""


def _start(config: EngineConfig, began: float, on_loss: Callable[[str], None]) -> EngineCore:
    # Imported here: the share of GPU memory must be settled before JAX starts its backend, and
    # the time that the import takes is reported.
    from jaxpaged.engine.engine_core import EngineCore
    from jaxpaged.runtime.memory import claim_gpu_memory
    from jaxpaged.runtime.multi_host import join_hosts

    claim_gpu_memory(config.gpu_memory_utilization)
    imported = time.perf_counter() - began
    try:
        group = join_hosts(config, on_loss)
        return EngineCore(config, serving=True, import_seconds=imported, group=group)
    except (ValueError, OSError) as error:
        raise StartupError(str(error)) from error


if __name__ == "__main__":
    sys.exit(main())
