"""AsyncLLM with two fake cores: who gets a request, who hears of its end, and who dies."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import zmq
from fake_server import FAKE_CORE

from jaxpaged.config import EngineConfig
from jaxpaged.engine import load_log
from jaxpaged.engine.async_llm import AsyncLLM
from jaxpaged.engine.core_client import FrontEnd
from jaxpaged.engine.core_fleet import CoreFleet
from jaxpaged.engine.errors import (
    BadRequestError,
    EngineDeadError,
    EngineStartError,
    RequestFailedError,
)
from jaxpaged.engine.llm import LLM
from jaxpaged.engine.messages import Command, EngineDead
from jaxpaged.engine.metrics import MetricsRegistry
from jaxpaged.engine.replica import connect
from jaxpaged.page_keys import page_keys
from jaxpaged.sampling_params import SamplingParams

ENDLESS = SamplingParams(ignore_eos=True, max_tokens=200)
TWO_ENGINES = EngineConfig(skip_tokenizer_init=True, data_parallel_size=2)
FEW = SamplingParams(ignore_eos=True, max_tokens=3)


def with_engines(work: Callable[[AsyncLLM], Awaitable[None]], *core: str, **settings) -> None:
    async def run() -> None:
        config = EngineConfig(skip_tokenizer_init=True, data_parallel_size=2, **settings)
        engine = AsyncLLM(config, core_command=(*FAKE_CORE, *core), log_stats=True)
        await engine.start()
        try:
            await work(engine)
        finally:
            await engine.shutdown()

    asyncio.run(asyncio.wait_for(run(), 60))


def with_front_ends(work: Callable[..., Awaitable[None]], *configs: EngineConfig) -> None:
    """Engines behind several front ends, each with settings of its own."""

    async def run() -> None:
        fleet = CoreFleet(configs[0], (*FAKE_CORE, "--step-seconds", "0.01"), len(configs))
        started = zip(configs, await fleet.launch(), strict=True)
        engines = [AsyncLLM(config, front_end=front_end) for config, front_end in started]
        try:
            await asyncio.gather(*(engine.start() for engine in engines))
            await work(*engines)
        finally:
            for engine in engines:
                await engine.shutdown()
            await fleet.stop()

    asyncio.run(asyncio.wait_for(run(), 30))


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not true():
            await asyncio.sleep(0.01)


def running(engine: AsyncLLM) -> list[int]:
    return [replica.stats.num_running for replica in engine.replicas]


def series(engine: AsyncLLM, name: str, number: int) -> float:
    found = re.search(
        rf'^\w+:{name}{{engine="{number}".*}} (\S+)$', engine.metrics.text().decode(), re.M
    )
    assert found is not None, engine.metrics.text().decode()
    return float(found[1])


def test_an_engine_that_cannot_start_is_told_of_before_the_others_are_ready(tmp_path: Path):
    async def run() -> None:
        front_end = FrontEnd(str(tmp_path), 0, 1, 2)
        with zmq.Context() as context, context.socket(zmq.PUSH) as second:
            second.connect(front_end.from_core(1))
            second.send(msgspec.msgpack.encode(EngineDead("no-room")))
            with pytest.raises(EngineStartError, match="no-room"):
                async with asyncio.timeout(5):
                    await connect(front_end, MetricsRegistry("demo", "jaxpaged"))

    asyncio.run(run())


def test_load_spreads_prefixes_gather_and_aborts_arrive():
    async def work(engine: AsyncLLM) -> None:
        streams = [engine.generate([5 + at], ENDLESS, str(at)) for at in range(4)]
        for stream in streams:
            await anext(stream)
        await until(lambda: running(engine) == [2, 2])
        assert engine.stats.num_running == 4
        assert engine.metrics.totals().first_tokens == 4
        await streams[0].aclose()
        await streams[2].aclose()
        await until(lambda: running(engine) == [0, 2])
        for stream in streams:
            await stream.aclose()
        await until(lambda: running(engine) == [0, 0])

        long = list(range(5, 105))
        for at in range(4):
            stream = engine.generate([*long, at], SamplingParams(max_tokens=3, n=2), "long")
            async for _ in stream:
                pass
        prompts = [series(engine, "prompt_tokens_total", number) for number in (0, 1)]
        assert sorted(prompts) == [2, 2 + 4 * 101], "whoever computed the prefix got the rest"
        assert series(engine, "num_requests_running", 1) == 0

    with_engines(work, "--step-seconds", "0.02")


@pytest.mark.parametrize("limit", [{"max_num_queued_reqs": 1}, {"max_num_queued_tokens": 300}])
def test_a_full_queue_sends_requests_to_an_engine_with_room(limit: dict[str, int]):
    long = list(range(5, 205))

    async def work(engine: AsyncLLM) -> None:
        async for _ in engine.generate(long, SamplingParams(max_tokens=1), "warm"):
            pass
        some = SamplingParams(ignore_eos=True, max_tokens=50)
        streams = [engine.generate([*long, at], some, str(at)) for at in range(5)]
        first = [asyncio.create_task(anext(stream)) for stream in streams[:2]]
        await until(lambda: running(engine) == [1, 1])
        first += [asyncio.create_task(anext(stream)) for stream in streams[2:4]]
        await until(lambda: [replica.stats.num_waiting for replica in engine.replicas] == [1, 1])
        with pytest.raises(RequestFailedError, match="full"):
            await anext(streams[4])
        await streams[0].aclose()
        await streams[1].aclose()
        assert len(await asyncio.gather(*first)) == 4

    with_engines(work, "--step-seconds", "0.05", max_num_seqs=1, **limit)


def test_a_dead_engine_takes_its_own_requests_along_and_no_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(load_log, "STATS_SECONDS", 0.2)
    caplog.set_level("INFO", load_log.__name__)

    async def work(engine: AsyncLLM) -> None:
        async def collect(first: int, most: int = 20) -> int:
            count, params = 0, SamplingParams(ignore_eos=True, max_tokens=most)
            async for output in engine.generate([first], params, str(first)):
                count += len(output.outputs[0].token_ids)
            return count

        waiting = [asyncio.create_task(collect(5 + at, 120)) for at in range(4)]
        await until(lambda: running(engine) == [2, 2])
        os.kill(engine._fleet.pids[1], signal.SIGKILL)
        results = await asyncio.gather(*waiting, return_exceptions=True)
        died = [result for result in results if isinstance(result, EngineDeadError)]
        assert [result for result in results if result not in died] == [120, 120]
        assert len(died) == 2 and "engine 1's process" in str(died[0]) and "-9" in str(died[0])
        assert engine.dead is None and engine.replicas[1].dead is not None
        assert [series(engine, "engine_up", number) for number in (0, 1)] == [1, 0]
        assert series(engine, "num_requests_running", 1) == 0
        assert "of 128 used" in caplog.text
        caplog.clear()
        assert await asyncio.gather(*(collect(5) for _ in range(3))) == [20] * 3
        await until(lambda: "of 64 used" in caplog.text)
        assert "of 128" not in caplog.text
        await engine.command("reset_prefix_cache")
        replica, picture = await engine.pool()
        assert replica.number == 0 and picture is not None
        os.kill(engine._fleet.pids[0], signal.SIGKILL)
        await asyncio.wait_for(engine.wait_dead(), 5)
        for work in (collect(5), engine.command("reset_prefix_cache"), engine.pool()):
            with pytest.raises(EngineDeadError):
                await work

    with_engines(work, "--step-seconds", "0.02")


def test_all_routers_forget_what_one_front_end_resets():
    long = list(range(5, 105))

    async def work(*engines: AsyncLLM) -> None:
        for engine in engines:
            async for _ in engine.generate(long, FEW, "long"):
                pass
        assert [missing(engine) for engine in engines] == [100 % 16] * 2
        await engines[0].command("reset_prefix_cache")
        for engine in engines:
            await until(lambda engine=engine: missing(engine) == 100)

    def missing(engine: AsyncLLM) -> int:
        """Tokens of the prompt that its engine would compute, as far as is known."""
        holds = max((0, 1), key=lambda at: len(engine._router._held[at]))
        return 100 - 16 * engine._router._num_held(holds, page_keys(long, 16))

    with_front_ends(work, TWO_ENGINES, TWO_ENGINES)


def test_an_engine_that_hangs_is_killed_and_everybody_hears_why():
    async def work(watching: AsyncLLM, other: AsyncLLM) -> None:
        hung, pids = [engine.replicas[1] for engine in (watching, other)], other._front_end.pids
        stream = other.generate([5], ENDLESS, "x")  # this front end's first turn is engine 1's
        await anext(stream)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        command, quick = (
            asyncio.create_task(replica.command(Command(number, name)))
            for number, (replica, name) in enumerate(
                zip(watching.replicas, ("start_profile", "reset_prefix_cache"), strict=True)
            )
        )
        began = time.monotonic()
        with pytest.raises(EngineDeadError, match=r"^engine 1 did not answer for 2 s"):
            async for _ in stream:
                pass
        assert time.monotonic() - began > 2
        await until(lambda: None not in [replica.dead for replica in hung])
        assert str(hung[0].dead) == str(hung[1].dead)
        with pytest.raises(EngineDeadError):
            await quick
        await asyncio.sleep(0.5)
        os.kill(pids[0], signal.SIGCONT)
        await command
        assert len(watching.living) == len(other.living) == 1, "a profile may take its time"

    watching, other = (replace(TWO_ENGINES, engine_timeout=timeout) for timeout in (2.0, 0.0))
    with_front_ends(work, watching, other)


def test_commands_go_to_all():
    async def work(engine: AsyncLLM) -> None:
        await engine.command("start_profile", ["a", "b"])
        for replica in engine.replicas:  # each runs one already
            with pytest.raises(BadRequestError, match="already"):
                await replica.command(Command(1000 + replica.number, "start_profile", "c"))

    with_engines(work)


def test_engines_that_cannot_start_say_why_once():
    async def run() -> None:
        config = EngineConfig(skip_tokenizer_init=True, data_parallel_size=2)
        engine = AsyncLLM(config, core_command=(*FAKE_CORE, "--refuse", "no-room"))
        with pytest.raises(EngineStartError, match="^no-room$"):
            await engine.start()

    asyncio.run(asyncio.wait_for(run(), 30))


def test_an_llm_is_one_engine():
    with pytest.raises(ValueError, match="data_parallel_size 2 needs `jaxpaged serve`"):
        LLM(data_parallel_size=2)
