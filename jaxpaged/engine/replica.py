"""One engine as a front end knows it: how it stands, what it is asked, when it is dead."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import msgspec

from jaxpaged.config import EngineConfig
from jaxpaged.engine.core_client import CoreClient, FrontEnd
from jaxpaged.engine.errors import BadRequestError, EngineDeadError
from jaxpaged.engine.messages import (
    AddRequest,
    AskPool,
    Command,
    CommandDone,
    EngineInfo,
    EngineStats,
    FrontMessage,
    PoolSnapshot,
    SequenceOutput,
)
from jaxpaged.engine.metrics import Metrics, MetricsRegistry
from jaxpaged.engine.pool_watch import PoolWatch

PROFILES = ("start_profile", "stop_profile")  # commands that may take as long as they like
TIMEOUT_PARTS = 10  # how often an engine is looked after while it has time to answer


class Replica:
    """One of the engines that serve the same model.

    Args:
        number: which.
        core: the sockets to its process.
        info: what it settled on.
        metrics: its series.
        records_steps: whether this front end counts its steps; of several, one does.
    """

    def __init__(
        self, number: int, core: CoreClient, info: EngineInfo, metrics: Metrics, records_steps: bool
    ) -> None:
        self.number, self.info, self.metrics = number, info, metrics
        self.stats = EngineStats()
        self.dead: EngineDeadError | None = None
        self._core, self._records_steps = core, records_steps
        self._pool_watch = PoolWatch(self.send)
        self._commands: dict[int, asyncio.Future[CommandDone]] = {}  # by number, unanswered
        self._profiling = 0  # of these, such as begin or write a profile
        # Lengths of prompts that `stats` may not count: sent since it came, or while that step was
        # computed, since a core reads between steps.
        self._sent: list[int] = []
        self._sent_before: list[int] = []
        self._silent: int | None = None  # parts of its time since a message; None: answered
        self._record()

    def send(self, message: FrontMessage) -> None:
        """Send without waiting; nothing happens if it is dead."""
        if self.dead is None:
            self._core.send(message)
            self._silent = self._silent or 0
            if isinstance(message, AddRequest):
                self._sent.append(len(message.prompt_token_ids))

    def overflow(self, config: EngineConfig, prompt_len: int) -> tuple[int, int]:
        """Requests and prompt tokens that its queue would have too many of with this prompt."""
        unread = [*self._sent_before, *self._sent, prompt_len]
        return (
            _beyond(self.stats.num_queued_requests + len(unread), config.max_num_queued_reqs),
            _beyond(self.stats.num_queued_tokens + sum(unread), config.max_num_queued_tokens),
        )

    async def news(self) -> AsyncIterator[list[SequenceOutput]]:
        """What each step brings, without end.

        Raises:
            EngineDeadError: it failed or its process ended.
        """
        async for message in self._core.news():
            self._silent = None
            if isinstance(message, CommandDone):
                waiting = self._commands.get(message.number)
                if waiting is not None and not waiting.done():
                    waiting.set_result(message)
                continue
            self.stats = message.stats
            idle = not (self.stats.num_running or self.stats.num_waiting)
            self._sent_before, self._sent = [] if idle else self._sent, []
            self._record()
            self._pool_watch.take(message.pool)
            yield message.outputs

    async def watch(self, timeout: float) -> None:
        """Kill its process once it leaves a message unanswered for `timeout` seconds (0: never).

        A core answers whatever it is sent with its state, a step later at most; one that nothing is
        sent to is asked. Only time in which this process runs counts, and none in which it is to
        begin or write a profile.
        """
        while timeout and self.dead is None:
            await asyncio.sleep(timeout / TIMEOUT_PARTS)
            if self._silent is None:
                self.send(AskPool())
            elif self._silent == TIMEOUT_PARTS:
                self._core.kill(
                    f"engine {self.number} did not answer for {timeout:g} s and was killed "
                    "(--engine-timeout)"
                )
                return
            elif not self._profiling:
                self._silent += 1

    async def command(self, command: Command) -> str | None:
        """Have it do something beside requests.

        Raises:
            BadRequestError: it cannot be done now; in the core's words.
            EngineDeadError: it died, before or meanwhile.
        """
        if self.dead is not None:
            raise self.dead
        answer = asyncio.get_running_loop().create_future()
        slow = command.name in PROFILES
        self._commands[command.number] = answer
        self._profiling += slow
        self.send(command)
        try:
            done: CommandDone = await answer
        finally:
            self._profiling -= slow
            del self._commands[command.number]
        if done.error is not None:
            raise BadRequestError(done.error)
        return done.result

    async def pool(self) -> PoolSnapshot | None:
        """A picture of its page pool, some tenths of a second old."""
        return await self._pool_watch.look()

    def die(self, error: EngineDeadError) -> None:
        """It will never answer again."""
        self.dead = error
        self.stats = msgspec.structs.replace(
            self.stats,
            num_running=0,
            num_waiting=0,
            num_queued_requests=0,
            num_queued_tokens=0,
            kv_cache_usage=0.0,
            iteration_tokens=0,
            device_step_seconds=0.0,
        )
        self._record()
        for waiting in self._commands.values():
            if not waiting.done():
                waiting.set_exception(error)

    def close(self) -> None:
        """Close the sockets."""
        self._core.close()

    def _record(self) -> None:
        if self._records_steps:
            self.metrics.step(self.stats, alive=self.dead is None)


async def connect(front_end: FrontEnd, registry: MetricsRegistry) -> list[Replica]:
    """All engines, once they are ready.

    Raises:
        EngineStartError: one could not start.
    """
    cores = [CoreClient(front_end, number) for number in range(front_end.num_engines)]
    starting = [asyncio.create_task(core.wait_ready()) for core in cores]
    try:
        infos = await asyncio.gather(*starting)  # the first failure is told at once
    except BaseException:
        for waiting in starting:
            waiting.cancel()
        await asyncio.gather(*starting, return_exceptions=True)
        for core in cores:
            core.close()
        raise
    return [
        Replica(number, core, info, Metrics(registry, info, number), front_end.index == 0)
        for number, (core, info) in enumerate(zip(cores, infos, strict=True))
    ]


def least_full(replicas: Sequence[Replica], config: EngineConfig, prompt_len: int) -> list[int]:
    """Numbers of those whose queues have room for a prompt, or else lack the least."""
    over = {replica.number: replica.overflow(config, prompt_len) for replica in replicas}
    least = min(over.values())
    return [number for number, beyond in over.items() if beyond == least]


def living_pages(replicas: Sequence[Replica]) -> int:
    """Pages of those that live."""
    return sum(replica.info.num_pages for replica in replicas if replica.dead is None)


def together(replicas: Sequence[Replica]) -> EngineStats:
    """The state of all engines as if they were one; what belongs to one step is left out."""
    stats = [replica.stats for replica in replicas]
    pages = living_pages(replicas)
    held = sum(r.stats.kv_cache_usage * r.info.num_pages for r in replicas)
    return EngineStats(
        num_running=sum(one.num_running for one in stats),
        num_waiting=sum(one.num_waiting for one in stats),
        num_queued_requests=sum(one.num_queued_requests for one in stats),
        num_queued_tokens=sum(one.num_queued_tokens for one in stats),
        kv_cache_usage=held / pages if pages else 0.0,
        num_preemptions=sum(one.num_preemptions for one in stats),
        prefix_cache_queries=sum(one.prefix_cache_queries for one in stats),
        prefix_cache_hits=sum(one.prefix_cache_hits for one in stats),
        prefix_cache_epoch=sum(one.prefix_cache_epoch for one in stats),
        step_compilations=sum(one.step_compilations for one in stats),
    )


def _beyond(count: int, limit: int | None) -> int:
    return 0 if limit is None else max(0, count - limit)
