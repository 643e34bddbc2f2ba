"""An engine core as a front end sees it: the two ZeroMQ sockets that lead to its process."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec
import zmq
import zmq.asyncio

from jaxpaged.engine.errors import EngineDeadError, EngineStartError
from jaxpaged.engine.messages import (
    CommandDone,
    CoreMessage,
    EngineDead,
    EngineInfo,
    FrontMessage,
    StepOutputs,
)

LAST_WORDS_MS = 1000  # for a death to be told while the sockets are closed


@dataclass(frozen=True)
class FrontEnd:
    """One of the processes that send requests to the cores.

    Its requests and commands end in a number of its own: `index`, `index + count`, and so on. So
    each core knows whom an answer is for.

    Args:
        folder: where the sockets are.
        index: which of `count` front ends.
        num_engines: cores that all of them share.
        pids: of their processes.
    """

    folder: str
    index: int
    count: int
    num_engines: int
    pids: tuple[int, ...] = ()

    @property
    def metrics_folder(self) -> str:
        """Where the front ends of one service keep the values of their metrics."""
        return f"{self.folder}/metrics"

    def to_core(self, engine: int) -> str:
        """Address of what a core reads."""
        return f"ipc://{self.folder}/core-{engine}"

    def from_core(self, engine: int) -> str:
        """Address of what this front end reads from a core."""
        return f"ipc://{self.folder}/front-{self.index}-core-{engine}"


class CoreClient:
    """A front end's sockets to one core. Who reads binds: what is sent early is not lost."""

    def __init__(self, front_end: FrontEnd, engine: int) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(CoreMessage)
        self._context = zmq.Context()
        self._front_end, self._engine = front_end, engine
        # Sending never waits: a plain socket needs no future for each message.
        self._sink = self._context.socket(zmq.PUSH)
        self._source = zmq.asyncio.Socket(self._context, zmq.PULL)
        for socket in (self._sink, self._source):
            socket.set_hwm(0)
            socket.setsockopt(zmq.LINGER, 0)
        self._source.bind(front_end.from_core(engine))
        self._sink.connect(front_end.to_core(engine))

    async def wait_ready(self) -> EngineInfo:
        """What the core settled on.

        Raises:
            EngineStartError: it could not start; in its own words.
        """
        try:
            message = await self._receive()
        except EngineDeadError as error:
            raise EngineStartError(error.message) from None
        if not isinstance(message, EngineInfo):
            raise EngineStartError(f"the engine began with {type(message).__name__}")
        return message

    def send(self, message: FrontMessage) -> None:
        """Send without waiting."""
        self._sink.send(self._encoder.encode(message))

    async def news(self) -> AsyncIterator[StepOutputs | CommandDone]:
        """What each step brings and what became of commands, without end.

        Raises:
            EngineDeadError: the core failed or its process ended.
        """
        while True:
            message = await self._receive()
            if not isinstance(message, EngineInfo):
                yield message

    def kill(self, reason: str) -> None:
        """End the core's process, and tell every front end why."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._front_end.pids[self._engine], signal.SIGKILL)
        for index in range(self._front_end.count):
            with self._context.socket(zmq.PUSH) as socket:
                socket.linger = LAST_WORDS_MS
                socket.connect(
                    dataclasses.replace(self._front_end, index=index).from_core(self._engine)
                )
                socket.send(self._encoder.encode(EngineDead(reason)))

    def close(self) -> None:
        """Close the sockets; what was not sent is lost."""
        self._source.close()
        self._sink.close()
        self._context.term()

    async def _receive(self) -> StepOutputs | CommandDone | EngineInfo:
        message = self._decoder.decode(await self._source.recv())
        if isinstance(message, EngineDead):
            raise EngineDeadError(message.message)
        return message
