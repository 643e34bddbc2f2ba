"""Scheduling is the engine's own, and the clock is one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest

from benchmarks.host_step import HostRunner
from jaxpaged.config import EngineConfig
from jaxpaged.engine import engine_core
from jaxpaged.engine.engine_core import EngineCore
from jaxpaged.models import ModelSpec, load_spec
from jaxpaged.planning.cost_model import CostModel, Seconds, Work
from jaxpaged.planning.footprint import Layout
from jaxpaged.planning.hardware import GPUS, Calibration
from jaxpaged.planning.lengths import Lengths, fixed, poisson_arrivals, sharegpt
from jaxpaged.planning.options import PlanOptions
from jaxpaged.planning.predict import predict
from jaxpaged.planning.simulate import Arrival, Replica, make_trace, simulate
from jaxpaged.runtime.startup import Started
from tests.engine.harness import GEMMA, LLAMA, VOCAB, request, run, write_model

WINDOWS = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
LENGTHS = [Lengths(p, o) for p, o in ((50, 9), (3, 30), (40, 40), (17, 1), (70, 20), (33, 25))]


class Metronome(CostModel):
    """Every step takes a second and the host nothing."""

    def __init__(self, windows: Sequence[int | None], host: float = 0.0, stages: int = 1) -> None:
        self.windows, self._host, self._stages = tuple(windows), host, stages

    @property
    def num_stages(self) -> int:
        return self._stages

    def host_seconds(self, num_seqs: int) -> float:
        return self._host

    def seconds(self, work: Work) -> list[Seconds]:
        return [{"weights": 1.0 / self._stages}] * self._stages


@pytest.fixture(scope="module")
def cores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, EngineCore]:
    """Engines on this machine's CPU, with few pages."""
    folder = tmp_path_factory.mktemp("models")
    common: dict[str, Any] = {
        "load_format": "dummy", "max_num_seqs": 2, "max_num_batched_tokens": 32,
        "max_model_len": 100, "enforce_eager": True,
    }  # fmt: skip
    models = {"llama": (LLAMA, 10), "windows": (GEMMA | WINDOWS, 19)}
    return {
        name: EngineCore(
            EngineConfig(
                model=str(write_model(folder / name, model)),
                num_gpu_blocks_override=pages,
                **common,
            )
        )
        for name, (model, pages) in models.items()
    }


def steps_of(core: EngineCore, trace: Sequence[Arrival]) -> list[int]:
    """Tokens of each step in which an engine serves the trace, all of it at once."""
    with mock.patch.object(core._runner, "forward", wraps=core._runner.forward) as forward:
        run(
            core,
            [
                request(
                    arrival.request.request_id,
                    arrival.request.prompt_token_ids,
                    max_tokens=arrival.request.params.max_tokens,
                    ignore_eos=True,
                )
                for arrival in trace
            ],
        )
    return [call.args[0].num_tokens for call in forward.call_args_list]


@pytest.mark.parametrize("name", ["llama", "windows"])
@pytest.mark.parametrize("shared_prefix", [0, 32])
def test_steps_preemptions_and_hits_are_those_of_a_real_engine(
    cores: dict[str, EngineCore], name: str, shared_prefix: int
) -> None:
    core = cores[name]
    core._scheduler.reset_prefix_cache()
    plan, before = core._runner.plan, core.stats()
    trace = make_trace(LENGTHS, [0.0] * len(LENGTHS), VOCAB, shared_prefix, seed=3)
    works = steps_of(core, trace)
    after = core.stats()

    config = core._scheduler.config
    (replica,) = simulate(config, plan, Metronome(plan.windows), trace)
    replica.scheduler.check_integrity()
    assert replica.num_steps == len(works) == replica.now
    assert replica.num_tokens == sum(works)
    preemptions = after.num_preemptions - before.num_preemptions
    assert replica.scheduler.num_preemptions == preemptions
    assert preemptions > 0 or shared_prefix or name == "windows"
    hits = after.prefix_cache_hits - before.prefix_cache_hits
    assert replica.scheduler.prefix_cache_hits == hits
    assert (hits > 0) == (shared_prefix > 0)


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("pages", [14, 60])
def test_a_pipeline_is_scheduled_as_its_engine_does_it(stages: int, pages: int) -> None:
    """The engine's core over a runner that computes nothing."""
    config = EngineConfig(
        max_num_seqs=6, max_num_batched_tokens=32, max_model_len=100,
        num_gpu_blocks_override=pages, pipeline_parallel_size=stages,
    )  # fmt: skip
    layout = Layout.of(load_spec(LLAMA | {"num_hidden_layers": 4}), config, 1, stages)
    plan = layout.plan(config).with_pages(config, *[0] * stages)
    runner: Any = HostRunner(plan)
    started = Started(runner, "none", "gpu", "float32", "float32", {})
    with mock.patch.object(engine_core, "start_runner", lambda *_, **__: started):
        core = EngineCore(config)
    trace = make_trace(LENGTHS, [0.0] * len(LENGTHS), VOCAB, seed=3)
    found = steps_of(core, trace)

    cost = Metronome(plan.windows, stages=stages)
    (engine,) = simulate(plan.scheduler_config(config), plan, cost, trace)
    assert engine.num_steps == len(found) and engine.num_tokens == sum(found)
    assert engine.scheduler.num_preemptions == core.stats().num_preemptions
    assert (engine.scheduler.num_preemptions > 0) == (pages == 14)
    assert engine.now <= engine.num_steps  # a step's stages overlap with others'
    assert stages == 1 or engine.now < engine.num_steps


def replica(core: EngineCore, cost: CostModel) -> Replica:
    return Replica(core._scheduler.config, core._runner.plan, cost)


def arrivals(*seconds: float, prompt: int = 10, output: int = 4) -> list[Arrival]:
    return make_trace(fixed(len(seconds), prompt, output), seconds, VOCAB)


def test_tokens_come_a_step_apart(cores: dict[str, EngineCore]) -> None:
    core = cores["llama"]
    engine = replica(core, Metronome((None,)))
    engine.add(arrivals(5.0)[0])
    engine.run()
    assert engine.records["0"].tokens == [6.0, 7.0, 8.0, 9.0]
    assert engine.records["0"].arrived == 5.0


def test_the_host_works_while_the_gpu_does(cores: dict[str, EngineCore]) -> None:
    core = cores["llama"]
    quick, slow = (replica(core, Metronome((None,), host)) for host in (0.5, 1.5))
    for engine in (quick, slow):
        engine.add(arrivals(0.0)[0])
        engine.run()
    assert quick.records["0"].tokens == [1.5, 2.5, 3.5, 4.5] and quick.spent["host"] == 0
    # A step's token is taken once the next step has been prepared.
    assert slow.records["0"].tokens == [3.0, 4.5, 6.0, 7.0] and slow.spent["host"] > 0


def test_a_stage_waits_for_the_one_before(cores: dict[str, EngineCore]) -> None:
    engine = replica(cores["llama"], Metronome((None,), stages=2))
    for arrival in arrivals(0.0, prompt=60, output=2):
        engine.add(arrival)
    engine.run()
    # Chunks of 32 and 28 tokens overlap; the second token waits for the first.
    assert engine.records["0"].tokens == [1.5, 2.5]
    assert engine.spent["pipeline"] == pytest.approx(0.5 + 0.5)


def test_a_request_waits_for_the_step_that_runs(cores: dict[str, EngineCore]) -> None:
    core = cores["llama"]
    config, plan = core._scheduler.config, core._runner.plan
    (engine,) = simulate(config, plan, Metronome((None,)), arrivals(0.0, 1.5, 30.0))
    first = [record.tokens[0] for record in engine.records.values()]
    assert first[0] == 1.0 and 2.0 < first[1] <= 4.0 and first[2] == 31.0


def test_replicas_share_the_requests(cores: dict[str, EngineCore]) -> None:
    core = cores["llama"]
    config, plan = core._scheduler.config, core._runner.plan
    trace = arrivals(*[0.0] * 12)
    one, two = (simulate(config, plan, Metronome((None,)), trace, n) for n in (1, 2))
    assert [len(each.records) for each in two] == [6, 6]
    assert max(each.now for each in two) < one[0].now


@pytest.mark.parametrize("figure", ["bandwidth", "flops_16", "link"])
def test_a_better_card_serves_no_slower(
    layouts: dict[tuple[int, int], Layout], h200: Calibration, figure: str
) -> None:
    config = EngineConfig(max_model_len=2048, num_gpu_blocks_override=200)
    layout = layouts[2, 1]
    plan = layout.plan(config).with_pages(config, 0)
    trace = make_trace(sharegpt(24, 0), [0.0] * 24, plan.vocab)
    ends = []
    for factor in (1, 1.5, 4):
        gpu = GPUS["H200"]
        better = dataclasses.replace(gpu, **{figure: factor * getattr(gpu, figure)})
        cost = CostModel(better, h200, layout, 2)
        (engine,) = simulate(plan.scheduler_config(config), plan, cost, trace)
        ends.append(engine.now)
        assert engine.scheduler.num_preemptions > 0
    assert ends == sorted(ends, reverse=True)


def test_more_load_more_latency(spec_7b: ModelSpec) -> None:
    config = EngineConfig(max_model_len=2048)
    slow, fast = (
        predict(spec_7b, config, PlanOptions(rate=rate, requests=64, trace="fixed:512,32")).served
        for rate in (2.0, 200.0)
    )
    assert slow is not None and fast is not None
    assert slow.output_tokens_per_second < fast.output_tokens_per_second
    for name in ("TTFT", "ITL", "E2E"):
        assert slow.latency_ms[name][50] <= fast.latency_ms[name][50]
    assert slow.mean_batch < fast.mean_batch
    assert sum(fast.shares.values()) == pytest.approx(1)


def test_arrivals_have_their_rate() -> None:
    seconds = poisson_arrivals(2000, 5.0, seed=1)
    assert seconds[0] == 0 and seconds == sorted(seconds)
    assert 2000 / seconds[-1] == pytest.approx(5, rel=0.1)
    assert poisson_arrivals(3, float("inf"), seed=1) == [0, 0, 0]


def test_prompts_share_what_they_are_told_to() -> None:
    trace = make_trace([Lengths(10, 1), Lengths(3, 1), Lengths(8, 1)], [0, 0, 0], 1000, 5)
    first, short, third = (arrival.request.prompt_token_ids for arrival in trace)
    assert [len(first), len(short), len(third)] == [10, 3, 8]
    assert first[:5] == third[:5] and first[:3] == short and first[5:8] != third[5:8]
