"""The engine cores' processes as their parent sees them: start them, watch them, end them."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
import zmq

from jaxpaged.config import EngineConfig
from jaxpaged.engine.core_client import FrontEnd
from jaxpaged.engine.messages import EngineDead, Shutdown

log = logging.getLogger(__name__)

CORE_COMMAND = (sys.executable, "-m", "jaxpaged.engine.core_process")
LAST_WORDS_SECONDS = 0.5  # a message sent just before the end may arrive after it
STOP_SECONDS = 10.0  # until cores that do not end are killed
LAST_SECONDS = 30.0  # until those that do not even end then are left behind
DEVICES = "CUDA_VISIBLE_DEVICES"


class CoreFleet:
    """One process for each engine, and the folder with the sockets that lead to them.

    Args:
        config: settings of each core; data_parallel_size says how many there are.
        command: program and arguments; the addresses and the core's number follow.
        num_front_ends: processes that send requests.
    """

    def __init__(
        self, config: EngineConfig, command: Sequence[str] = CORE_COMMAND, num_front_ends: int = 1
    ) -> None:
        self._config, self._command, self._num_front_ends = config, command, num_front_ends
        self._processes: list[asyncio.subprocess.Process] = []
        self._watching: list[asyncio.Task[None]] = []
        self._sockets: list[zmq.Socket] = []  # open for as long as what they sent may arrive

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    async def launch(self) -> list[FrontEnd]:
        """Start the processes and hand them their settings; what each front end is to know.

        Raises:
            ValueError: there are too few devices.
        """
        config, count = self._config, self._config.data_parallel_size
        given = os.environ.get(DEVICES)
        devices = split_devices(given, _num_cards(), count, config.num_devices)
        self._folder = tempfile.mkdtemp(prefix="jaxpaged-")
        self._context = zmq.Context()
        self._front_ends = [
            FrontEnd(self._folder, index, self._num_front_ends, count)
            for index in range(self._num_front_ends)
        ]
        settings = msgspec.msgpack.encode(config)
        for engine, visible in enumerate(devices):
            process = await asyncio.create_subprocess_exec(
                *self._command,
                *("--replica", str(engine), "--input", self._front_ends[0].to_core(engine)),
                *("--output", *(front_end.from_core(engine) for front_end in self._front_ends)),
                stdin=asyncio.subprocess.PIPE,
                env=None if visible is None else {**os.environ, DEVICES: visible},
            )
            self._processes.append(process)
            self._watching.append(asyncio.create_task(self._watch(engine, process)))
        for process in self._processes:
            assert process.stdin is not None
            try:
                process.stdin.write(settings)
                await process.stdin.drain()
            except ConnectionError:
                log.debug("the engine's process ended at once; its exit status says more")
            process.stdin.close()
        pids = tuple(self.pids)
        return [dataclasses.replace(front_end, pids=pids) for front_end in self._front_ends]

    async def stop(self) -> None:
        """End the processes, by force if they do not end themselves, and remove the folder."""
        if not self._processes:
            return
        for engine in range(len(self._processes)):
            self._send(self._front_ends[0].to_core(engine), Shutdown())
        ending = [asyncio.create_task(process.wait()) for process in self._processes]
        _, late = await asyncio.wait(ending, timeout=STOP_SECONDS)
        if late:
            log.warning("%d of the engine's processes do not end: killing them", len(late))
        await self.kill()

    async def kill(self) -> None:
        """End the processes at once, for a start that was given up."""
        if not self._processes:
            return
        for watching in self._watching:
            watching.cancel()
        for process in self._processes:
            if process.returncode is None:
                process.kill()
        ending = [asyncio.create_task(process.wait()) for process in self._processes]
        _, stuck = await asyncio.wait(ending, timeout=LAST_SECONDS)
        if stuck:  # in a call of the GPU's driver, say, that never returns
            log.error("%d of the engine's processes do not even end when killed", len(stuck))
        self._processes.clear()
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _watch(self, engine: int, process: asyncio.subprocess.Process) -> None:
        """Tell the front ends of a death, some time after the core's own last words."""
        code = await process.wait()
        await asyncio.sleep(LAST_WORDS_SECONDS)
        which = (
            "the engine's process" if len(self._processes) == 1 else f"engine {engine}'s process"
        )
        dead = EngineDead(f"{which} ended unexpectedly (exit status {code})")
        for front_end in self._front_ends:
            self._send(front_end.from_core(engine), dead)

    def _send(self, address: str, message: EngineDead | Shutdown) -> None:
        """Without waiting; it is lost if nobody listens before `kill`."""
        socket = self._context.socket(zmq.PUSH)
        self._sockets.append(socket)
        socket.connect(address)
        socket.send(msgspec.msgpack.encode(message))


def split_devices(
    given: str | None, num_cards: int, num_engines: int, num_devices: int
) -> list[str | None]:
    """The CUDA_VISIBLE_DEVICES of each engine; None: as it is, since one has all, or no cards.

    Args:
        given: the CUDA_VISIBLE_DEVICES of this process; None: not set.
        num_cards: cards of this machine.
        num_devices: of each engine.

    Raises:
        ValueError: there are too few cards, or `given` names one twice or one that is not there.
    """
    if num_engines == 1 or not num_cards:
        return [None] * num_engines
    cards = [str(card) for card in range(num_cards)]
    if given is not None:
        cards = _named_cards(given, num_cards)
    if len(cards) < num_engines * num_devices:
        where = "this machine has" if given is None else f"{DEVICES} names"
        raise ValueError(
            f"data_parallel_size {num_engines} with {num_devices} devices each needs "
            f"{num_engines * num_devices} GPUs, and {where} {len(cards)}"
        )
    starts = range(0, num_engines * num_devices, num_devices)
    return [",".join(cards[start : start + num_devices]) for start in starts]


def _named_cards(given: str, num_cards: int) -> list[str]:
    """Cards that CUDA_VISIBLE_DEVICES names. For CUDA, too, it ends at what names none, say -1."""
    cards: list[str] = []
    for card in map(str.strip, given.split(",")):
        if not re.fullmatch(r"[0-9]+|(GPU|MIG)-.+", card):
            break
        if card.isdigit() and int(card) >= num_cards:
            raise ValueError(
                f"{DEVICES}={given} names card {card}, and this machine has {num_cards}: "
                f"0 to {num_cards - 1}"
            )
        if card in cards:
            raise ValueError(
                f"{DEVICES}={given} names card {card} twice: each engine needs its own"
            )
        cards.append(card)
    return cards


def _num_cards() -> int:
    """NVIDIA's GPUs that this process may open, and JAX use."""
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return 0
    return len(list(Path("/dev").glob("nvidia[0-9]*")))
