"""The engine core's process as the server sees it: start it, send, receive, notice its death."""

from __future__ import annotations

import asyncio
import logging
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence

import msgspec
import zmq
import zmq.asyncio

from jaxpaged.config import EngineConfig
from jaxpaged.engine.errors import EngineDeadError, EngineStartError
from jaxpaged.engine.messages import (
    CommandDone,
    CoreMessage,
    EngineDead,
    EngineInfo,
    FrontMessage,
    Shutdown,
    StepOutputs,
)

log = logging.getLogger(__name__)

CORE_COMMAND = (sys.executable, "-m", "jaxpaged.engine.core_process")
LAST_WORDS_SECONDS = 0.5  # a message sent just before the end may arrive after it
STOP_SECONDS = 10.0  # until a core that does not end is killed


class CoreClient:
    """One core process and the two ZeroMQ sockets to it.

    Args:
        command: program and arguments; `--input` and `--output` with the addresses follow.
    """

    def __init__(self, command: Sequence[str] = CORE_COMMAND) -> None:
        self._command = command
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(CoreMessage)
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def launch(self, config: EngineConfig) -> None:
        """Start the process and hand it its settings; `wait_ready` tells when it is ready."""
        self._folder = tempfile.mkdtemp(prefix="jaxpaged-")
        self._context = zmq.Context()
        # Sending never waits: a plain socket needs no future for each message.
        self._sink = self._context.socket(zmq.PUSH)
        self._source = zmq.asyncio.Socket(self._context, zmq.PULL)
        addresses: list[str] = []
        sockets: dict[str, zmq.Socket] = {"input": self._sink, "output": self._source}
        for name, socket in sockets.items():
            socket.set_hwm(0)
            socket.setsockopt(zmq.LINGER, 0)
            addresses += [f"--{name}", f"ipc://{self._folder}/{name}"]
            socket.bind(addresses[-1])
        self._process = await asyncio.create_subprocess_exec(
            *self._command, *addresses, stdin=asyncio.subprocess.PIPE
        )
        self._exit = asyncio.create_task(self._wait_exit())
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(self._encoder.encode(config))
            await self._process.stdin.drain()
        except ConnectionError:
            log.debug("the engine's process ended at once; its exit status says more")
        self._process.stdin.close()

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
        """Send without waiting; nothing happens if the core is gone."""
        try:
            self._sink.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            log.debug("the engine is gone: %s is lost", type(message).__name__)

    async def news(self) -> AsyncIterator[StepOutputs | CommandDone]:
        """What each step brings and what became of commands, without end.

        Raises:
            EngineDeadError: the core failed or its process ended.
        """
        while True:
            message = await self._receive()
            if not isinstance(message, EngineInfo):
                yield message

    async def stop(self) -> None:
        """End the process, by force if it does not end itself, and close the sockets."""
        if self._process is None:
            return
        if self._process.returncode is None:
            self.send(Shutdown())
            try:
                await asyncio.wait_for(self._process.wait(), STOP_SECONDS)
            except TimeoutError:
                log.warning("the engine's process does not end: killing it")
                self._kill()
        await self._process.wait()
        self._close()

    async def kill(self) -> None:
        """End the process at once, for a start that was given up."""
        if self._process is None:
            return
        self._kill()
        await self._process.wait()
        self._close()

    def _kill(self) -> None:
        assert self._process is not None
        try:
            self._process.kill()
        except ProcessLookupError:
            log.debug("the engine's process ended by itself")

    def _close(self) -> None:
        self._exit.cancel()
        self._source.close()
        self._sink.close()
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._process = None

    async def _wait_exit(self) -> None:
        """Ends some time after the process, when its last words have arrived."""
        assert self._process is not None
        await self._process.wait()
        await asyncio.sleep(LAST_WORDS_SECONDS)

    async def _receive(self) -> StepOutputs | CommandDone | EngineInfo:
        received = asyncio.ensure_future(self._source.recv())
        if not received.done():
            await asyncio.wait({received, self._exit}, return_when=asyncio.FIRST_COMPLETED)
        if not received.done():
            received.cancel()
            assert self._process is not None
            code = self._process.returncode
            raise EngineDeadError(f"the engine's process ended unexpectedly (exit status {code})")
        message = self._decoder.decode(received.result())
        if isinstance(message, EngineDead):
            raise EngineDeadError(message.message)
        return message
