"""Batching, chunking, caching, preemption and overlap change no token of a greedy run."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxpaged.config import EngineConfig
from jaxpaged.engine.engine_core import EngineCore
from tests.engine.harness import (
    GEMMA,
    LLAMA,
    VOCAB,
    Naive,
    assert_greedy,
    naive_of,
    request,
    run,
    write_model,
)  # fmt: skip

SMALL: dict[str, Any] = {
    "load_format": "dummy", "max_num_seqs": 4, "max_num_batched_tokens": 32,
    "enforce_eager": True, "num_gpu_blocks_override": 24,
}  # fmt: skip
MODELS = {"llama": LLAMA, "gemma": GEMMA}


def prompts(count: int, longest: int = 60, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(VOCAB) for _ in range(draw.randint(1, longest))] for _ in range(count)]


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp(request.param), MODELS[request.param])


@pytest.fixture(scope="module")
def naive(folder: Path) -> Naive:
    return naive_of(EngineCore(EngineConfig(model=str(folder), **SMALL)))


WAYS: list[dict[str, Any]] = [
    {},
    {"enable_prefix_caching": False},
    {"max_num_batched_tokens": 4},
    {"async_scheduling": False},
    {"long_prefill_token_threshold": 7},
    {"enable_chunked_prefill": False, "max_num_batched_tokens": 128},
    {"max_num_seqs": 1},
    {"block_size": 32, "num_gpu_blocks_override": 16},
]


@pytest.mark.parametrize(
    ("folder", "changes"),
    [("llama", way) for way in WAYS] + [("gemma", way) for way in WAYS[:3]],
    indirect=["folder"],
    ids=str,
    scope="module",
)
def test_greedy_tokens_are_the_naive_loops(
    folder: Path, naive: Naive, changes: dict[str, Any]
) -> None:
    core = EngineCore(EngineConfig(model=str(folder), **(SMALL | changes)))
    asked = prompts(7)
    tokens = run(core, [request(str(i), p, max_tokens=12) for i, p in enumerate(asked)])
    ties = sum(assert_greedy(naive, p, tokens[str(i), 0]) for i, p in enumerate(asked))
    assert ties <= 1
    assert all(len(found) == 12 for found in tokens.values())
    assert core.stats().kv_cache_usage == 0


def shared_prefix_prompts() -> list[list[int]]:
    """Prompts of many lengths, half of them on two common beginnings."""
    heads = prompts(2, longest=48, seed=7)
    tails = prompts(8, longest=40, seed=8)
    return [heads[i % 2][:48] + tail for i, tail in enumerate(tails)] + prompts(6, seed=9)


arrivals = st.fixed_dictionaries(
    {
        "step": st.integers(0, 12),
        "prompt": st.integers(0, 13),
        "max_tokens": st.integers(1, 16),
        "priority": st.integers(-1, 1),
        "n": st.sampled_from([1, 1, 1, 2, 3]),
        "abort": st.none() | st.integers(1, 10),  # steps after arrival
    }
)


@pytest.fixture(scope="module")
def cores(folder: Path) -> dict[tuple[str, bool], EngineCore]:
    """By policy and overlap; pools so small that requests are preempted all the time."""
    groups = 3 if "gemma" in str(folder) else 1
    return {
        (policy, overlap): EngineCore(
            EngineConfig(
                model=str(folder), scheduling_policy=policy, async_scheduling=overlap,
                **(SMALL | {"enforce_eager": False, "num_gpu_blocks_override": 9 * groups}),
            )
        )
        for policy, overlap in [("fcfs", True), ("priority", True), ("fcfs", False)]
    }  # fmt: skip


@pytest.fixture(scope="module")
def expected(naive: Naive) -> list[tuple[list[int], list[float]]]:
    return [naive.greedy(prompt, 16) for prompt in shared_prefix_prompts()]


@pytest.mark.parametrize("folder", MODELS, indirect=True, scope="module")
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(load=st.lists(arrivals, min_size=1, max_size=8), data=st.data())
def test_random_load(
    cores: dict[tuple[str, bool], EngineCore],
    expected: list[tuple[list[int], list[float]]],
    load: list[dict[str, Any]],
    data: st.DataObject,
) -> None:
    policy, overlap = data.draw(st.sampled_from(sorted(cores)))
    core = cores[policy, overlap]
    asked = shared_prefix_prompts()
    tokens: dict[tuple[int, int], list[int]] = {}
    reasons: dict[tuple[int, int], str] = {}
    order: list[int] = []
    step = 0
    while core.has_work or step <= max(item["step"] for item in load):
        for i, item in enumerate(load):
            if item["step"] == step:
                core.add(
                    request(
                        str(i), asked[item["prompt"]], max_tokens=item["max_tokens"],
                        priority=item["priority"], n=item["n"],
                    )
                )  # fmt: skip
            if item["abort"] is not None and item["step"] + item["abort"] == step:
                core.abort(str(i))
        running_before = {s.request.request_id for s in core._scheduler._running}
        for output in core.step():
            key = int(output.request_id), output.index
            assert key not in reasons, "news of a choice that had ended"
            tokens.setdefault(key, []).extend(output.token_ids)
            if output.finish_reason is not None:
                reasons[key] = output.finish_reason
        for sequence in core._scheduler._running:
            arrival = sequence.request.arrival
            if sequence.request.request_id not in running_before and arrival not in order:
                order.append(arrival)
        core._scheduler.check_integrity()
        step += 1
        assert step < 2000, "the engine does not come to an end"

    assert core.stats().kv_cache_usage == 0
    assert core.stats().step_compilations == 0
    if policy == "fcfs":
        assert order == sorted(order), "a request overtook an earlier one"
    for i, item in enumerate(load):
        for index in range(item["n"]):
            if reasons.get((i, index)) == "abort":
                continue
            assert reasons[i, index] == "length"
            want, leads = expected[item["prompt"]]
            got = tokens[i, index]
            assert len(got) == item["max_tokens"]
            first_tie = next((k for k, lead in enumerate(leads) if lead < 1e-4), len(leads))
            assert got[:first_tie] == want[: min(first_tie, len(got))]
