"""AsyncLLM against a fake core: a child process that speaks the same protocol."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from fake_core import CRASH, MAX_MODEL_LEN
from fake_server import FAKE_CORE, ROOT

from jaxpaged.config import EngineConfig
from jaxpaged.engine import load_log
from jaxpaged.engine.async_llm import AsyncLLM
from jaxpaged.engine.errors import (
    BadRequestError,
    EngineDeadError,
    EngineStartError,
    RequestFailedError,
)
from jaxpaged.engine.messages import SequenceOutput
from jaxpaged.outputs import RequestOutput
from jaxpaged.sampling_params import SamplingParams

ENDLESS = SamplingParams(ignore_eos=True, max_tokens=200)


@asynccontextmanager
async def started(folder: Path | None, *core: str, **settings: object) -> AsyncIterator[AsyncLLM]:
    """An engine with its tokenizer from `folder`; None: without one."""
    config = EngineConfig(
        model=str(folder) if folder else None, skip_tokenizer_init=folder is None, **settings
    )
    engine = AsyncLLM(config, core_command=(*FAKE_CORE, *core), log_stats=True)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.shutdown()


def with_engine(
    work: Callable[[AsyncLLM], Awaitable[None]], *core: str, folder: Path | None = None, **settings
) -> None:
    async def run() -> None:
        async with started(folder, *core, **settings) as engine:
            await work(engine)

    asyncio.run(asyncio.wait_for(run(), 60))


async def collect(
    engine: AsyncLLM, prompt: object, params: SamplingParams, name: str = "r", **options: object
) -> list[RequestOutput]:
    return [output async for output in engine.generate(prompt, params, name, **options)]


async def until(true: Callable[[], bool], seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not true():
            await asyncio.sleep(0.01)


def success(engine: AsyncLLM, reason: str) -> float:
    needle = f'finished_reason="{reason}"'
    lines = engine.metrics.text().decode().splitlines()
    return next(float(line.split()[-1]) for line in lines if needle in line)


def test_start_text_stream_and_whole(tokenizer_folder: Path):
    async def work(engine: AsyncLLM) -> None:
        assert engine.info.max_model_len == MAX_MODEL_LEN
        params = SamplingParams(max_tokens=12)
        pieces = await collect(engine, "the quick 😀", params)
        text = "".join(output.outputs[0].text for output in pieces)
        assert text.startswith("the quick 😀")
        whole = await collect(engine, {"prompt": "the quick 😀"}, params, delta=False)
        assert len(whole) == 1
        assert (whole[0].outputs[0].text, whole[0].prompt) == (text, "the quick 😀")
        assert engine.num_requests == 0
        assert success(engine, "length") == 2

    with_engine(work, folder=tokenizer_folder)


def test_a_stop_string_ends_it_in_the_core_too(tokenizer_folder: Path):
    async def work(engine: AsyncLLM) -> None:
        params = SamplingParams(ignore_eos=True, max_tokens=200, stop=["ick b"])
        output = (await collect(engine, "the quick brown fox", params, delta=False))[0]
        assert output.outputs[0].text == "the qu"
        assert output.outputs[0].stop_reason == "ick b"
        await until(lambda: engine.stats.num_running == 0, 2)  # its 200 tokens would take 6 s
        assert success(engine, "stop") == 1

    with_engine(work, "--step-seconds", "0.03", folder=tokenizer_folder)


def test_many_at_once():
    async def work(engine: AsyncLLM) -> None:
        async def one(place: int) -> None:
            params = SamplingParams(max_tokens=20, n=1 + place % 3)
            output = (await collect(engine, [place + 5, 6], params, str(place), delta=False))[0]
            for choice in output.outputs:
                first = [place + 5, 6][choice.index % 2]
                assert choice.token_ids[0] == first
                assert len(choice.token_ids) == 20

        await asyncio.gather(*(one(place) for place in range(60)))

    with_engine(work, max_num_seqs=16)


def test_leaving_aborts_running_and_queued():
    async def work(engine: AsyncLLM) -> None:
        streams = [engine.generate([5, 6], ENDLESS, str(place)) for place in range(3)]
        await anext(streams[0])
        queued = asyncio.create_task(anext(streams[2]))
        await anext(streams[1])
        await until(lambda: engine.stats.num_running == 2 and engine.stats.num_waiting == 1)
        await streams[0].aclose()
        queued.cancel()
        await until(lambda: engine.stats.num_running == 1 and engine.stats.num_waiting == 0)
        assert success(engine, "abort") == 2
        await streams[1].aclose()
        await until(lambda: engine.stats.num_running == 0)
        assert engine.num_requests == 0
        assert engine.metrics.text()

    with_engine(work, "--step-seconds", "0.01", max_num_seqs=2)


def test_abort_all_tells_those_who_wait():
    async def work(engine: AsyncLLM) -> None:
        running = asyncio.create_task(collect(engine, [5], ENDLESS, "a"))
        queued = asyncio.create_task(collect(engine, [5], ENDLESS, "b", delta=False))
        await until(lambda: engine.stats.num_running == 1 and engine.stats.num_waiting == 1)
        engine.abort_all()
        for outputs in (await running, await queued):
            assert outputs[-1].finished
            assert outputs[-1].outputs[0].finish_reason == "abort"
        assert success(engine, "abort") == 2

    with_engine(work, "--step-seconds", "0.01", max_num_seqs=1)


def test_bad_requests_never_reach_the_core():
    async def work(engine: AsyncLLM) -> None:
        with pytest.raises(BadRequestError, match="maximum context length"):
            await collect(engine, [5], SamplingParams(max_tokens=9999))

    with_engine(work)


def test_requests_of_one_id_do_not_mix():
    async def work(engine: AsyncLLM) -> None:
        for first in (5, 7, 9):  # each is given up while tokens of it are under way
            stream = engine.generate([first], ENDLESS, "same")
            assert (await anext(stream)).outputs[0].token_ids == [first]
            await stream.aclose()
        streams = [engine.generate([token_id], ENDLESS, "same") for token_id in (11, 13)]
        for _ in range(20):
            for token_id, stream in zip((11, 13), streams, strict=True):
                output = await anext(stream)
                assert (output.request_id, output.outputs[0].token_ids) == ("same", [token_id])
        for stream in streams:
            await stream.aclose()

    with_engine(work)


def test_output_that_cannot_be_read_fails_its_request_alone(monkeypatch: pytest.MonkeyPatch):
    async def work(engine: AsyncLLM) -> None:
        process = engine._outputs.process

        def broken(news: SequenceOutput) -> object:
            if news.request_id.startswith("bad-"):
                raise KeyError("no such token")
            return process(news)

        monkeypatch.setattr(engine._outputs, "process", broken)
        few = SamplingParams(ignore_eos=True, max_tokens=5)
        bad, good = await asyncio.gather(
            collect(engine, [1, 2, 3], few, "bad"),
            collect(engine, [1, 2, 3], few, "good"),
            return_exceptions=True,
        )
        assert isinstance(bad, RequestFailedError) and bad.code == 500
        assert isinstance(good, list) and good[-1].finished
        assert engine.dead is None and engine.num_requests == 0

    with_engine(work)


def test_a_full_queue():
    async def work(engine: AsyncLLM) -> None:
        streams = [engine.generate([5], ENDLESS, str(place)) for place in range(3)]
        await anext(streams[0])
        queued = asyncio.create_task(anext(streams[1]))
        await until(lambda: engine.stats.num_waiting == 1)
        with pytest.raises(RequestFailedError, match="full") as error:
            await anext(streams[2])
        assert error.value.code == 503
        assert success(engine, "error") == 1
        queued.cancel()
        await streams[0].aclose()

    with_engine(work, "--step-seconds", "0.01", max_num_seqs=1, max_num_queued_reqs=1)


@pytest.mark.parametrize("how", ["killed", "crashed"])
def test_the_cores_death_ends_every_request(how: str):
    async def work(engine: AsyncLLM) -> None:
        waiting = [asyncio.create_task(collect(engine, [5], ENDLESS, str(i))) for i in range(3)]
        await until(lambda: engine.stats.num_running == 3)
        if how == "killed":
            os.kill(engine._fleet.pids[0], signal.SIGKILL)
        else:
            waiting.append(asyncio.create_task(collect(engine, [CRASH], ENDLESS, "crash")))
        results = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 5)
        assert all(isinstance(result, EngineDeadError) for result in results)
        said = str(results[0])
        assert ("boom" if how == "crashed" else "-9") in said
        await asyncio.wait_for(engine.wait_dead(), 1)
        with pytest.raises(EngineDeadError):
            await collect(engine, [5], ENDLESS, "late")
        assert success(engine, "error") == len(waiting)

    with_engine(work, "--step-seconds", "0.01")


def test_a_core_that_refuses_to_start_says_why():
    async def run() -> None:
        with pytest.raises(EngineStartError, match="^no-room$"):
            async with started(None, "--refuse", "no-room"):
                pass

    asyncio.run(asyncio.wait_for(run(), 30))


def test_a_core_that_ends_without_a_word():
    async def run() -> None:
        engine = AsyncLLM(EngineConfig(skip_tokenizer_init=True), core_command=("false",))
        with pytest.raises(EngineStartError, match="exit status 1"):
            await engine.start()

    asyncio.run(asyncio.wait_for(run(), 30))


def test_a_start_that_is_given_up_leaves_no_process():
    async def run() -> None:
        command = (sys.executable, "-c", "import time; time.sleep(60)")
        engine = AsyncLLM(EngineConfig(skip_tokenizer_init=True), core_command=command)
        starting = asyncio.create_task(engine.start())
        await until(lambda: engine._fleet.pids)
        (pid,) = engine._fleet.pids
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    asyncio.run(asyncio.wait_for(run(), 30))


def test_shutdown_is_quick_and_cleans_up():
    async def run() -> None:
        async with started(None) as engine:
            (pid,), folder = engine._fleet.pids, Path(engine._fleet._folder)
            began = time.monotonic()
        assert time.monotonic() - began < 5
        assert not folder.exists()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    asyncio.run(asyncio.wait_for(run(), 30))


def test_nothing_here_imports_jax():
    code = (
        "import sys, jaxpaged.server.app, jaxpaged.server.run, jaxpaged.engine.async_llm; "
        "print([m for m in ('jax', 'flax', 'torch') if m in sys.modules])"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_load_is_logged_while_there_is_any(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(load_log, "STATS_SECONDS", 0.1)
    caplog.set_level("INFO", load_log.__name__)

    async def work(engine: AsyncLLM) -> None:
        await collect(engine, [5, 6], SamplingParams(max_tokens=30, ignore_eos=True))
        await asyncio.sleep(0.5)

    with_engine(work, "--step-seconds", "0.01")
    told = [record.message for record in caplog.records if "generation" in record.message]
    assert told and told[0].startswith("running 1, waiting 0, pages ")
    assert len(told) <= 5  # idle seconds are silent
