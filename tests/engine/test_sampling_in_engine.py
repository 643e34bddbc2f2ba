"""Sampling parameters through the whole engine: what a request gets depends on it alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxpaged.config import EngineConfig
from jaxpaged.engine.engine_core import EngineCore
from jaxpaged.engine.messages import AddRequest, SequenceOutput
from tests.engine.harness import LLAMA, VOCAB, Naive, drain, naive_of, request, run, write_model

PROMPT = [5, 17, 99, 3, 3, 42]
OTHERS = [request(f"other{i}", [i + 1] * (3 * i + 1), max_tokens=9) for i in range(3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"), LLAMA)


def make_core(folder: Path, **settings: Any) -> EngineCore:
    defaults: dict[str, Any] = {
        "load_format": "dummy", "max_num_seqs": 4, "max_num_batched_tokens": 16,
        "enforce_eager": True, "num_gpu_blocks_override": 40,
    }  # fmt: skip
    return EngineCore(EngineConfig(model=str(folder), **(defaults | settings)))


@pytest.fixture(scope="module")
def core(folder: Path) -> EngineCore:
    return make_core(folder)


@pytest.fixture(scope="module")
def naive(core: EngineCore) -> Naive:
    return naive_of(core)


def outputs(core: EngineCore, *requests: AddRequest) -> dict[str, list[SequenceOutput]]:
    """News by request, of requests that arrive together."""
    for message in requests:
        core.add(message)
    found: dict[str, list[SequenceOutput]] = {}
    for news in drain(core):
        found.setdefault(news.request_id, []).append(news)
    return found


def tokens(core: EngineCore, *requests: AddRequest) -> list[int]:
    """Tokens of the first request."""
    return run(core, requests)[requests[0].request_id, 0]


def test_a_seed_decides_alone(folder: Path, core: EngineCore) -> None:
    wish = {"temperature": 1.0, "seed": 7, "max_tokens": 12}
    alone = tokens(core, request("a", PROMPT, **wish))
    crowd = tokens(core, request("b", PROMPT, **wish), *OTHERS)
    filtered_crowd = tokens(
        core, request("c", PROMPT, **wish), request("d", [9], top_k=3, temperature=0.5),
    )  # fmt: skip
    penalised_crowd = tokens(
        core, request("e", PROMPT, **wish), request("f", [9], presence_penalty=1.0, logprobs=1)
    )
    small_pool = make_core(folder, num_gpu_blocks_override=9, async_scheduling=False)
    preempted = tokens(small_pool, request("g", PROMPT, **wish), *OTHERS)
    assert alone == crowd == filtered_crowd == penalised_crowd == preempted
    assert alone != tokens(core, request("h", PROMPT, **(wish | {"seed": 8})))


def test_missing_seeds_differ_but_follow_the_engines(folder: Path) -> None:
    def draws(seed: int) -> list[list[int]]:
        core = make_core(folder, seed=seed)
        return [tokens(core, request(str(i), PROMPT, temperature=1.0)) for i in range(2)]

    first, second = draws(1)
    assert first != second
    assert [first, second] == draws(1)


def test_choices_are_independent_draws_that_share_the_prompt(core: EngineCore) -> None:
    wish = {"temperature": 1.0, "seed": 7, "max_tokens": 10}
    long_prompt = PROMPT * 7
    found = run(core, [request("n", long_prompt, n=3, **wish)])
    choices = [found["n", index] for index in range(3)]
    assert len(set(map(tuple, choices))) == 3
    assert choices[0] == tokens(core, request("one", long_prompt, **wish))


def test_logprobs_are_the_raw_ones(core: EngineCore, naive: Naive) -> None:
    asked = request(
        "a", PROMPT, temperature=0.7, seed=1, top_k=2, logprobs=4, max_tokens=6, logit_bias={3: 2.0}
    )
    token_ids = list(PROMPT)
    for news in outputs(core, asked)["a"]:
        expected = np.asarray(jax.nn.log_softmax(naive.logits(token_ids)))
        assert news.logprobs is not None
        (entry,) = news.logprobs
        assert entry.token_id == news.token_ids[0]
        assert entry.logprob == pytest.approx(expected[entry.token_id], abs=1e-4)
        assert entry.rank == 1 + (expected > expected[entry.token_id]).sum()
        best = np.argsort(-expected)[:4]
        assert entry.top_ids == best.tolist()
        np.testing.assert_allclose(entry.top_logprobs, expected[best], atol=1e-4)
        token_ids += news.token_ids


@pytest.mark.parametrize("settings", [{}, {"num_gpu_blocks_override": 9}], ids=["", "preempted"])
def test_prompt_logprobs_over_chunks(folder: Path, naive: Naive, settings: dict[str, Any]) -> None:
    core = make_core(folder, **settings)
    prompt = (PROMPT * 9)[:50]
    run(core, [request("warm", prompt)])  # a warm prefix cache must not swallow rows
    found = outputs(core, request("a", prompt, prompt_logprobs=2, max_tokens=20), *OTHERS)["a"]
    assert [news.prompt_logprobs is not None for news in found] == [True] + [False] * 19
    entries = found[0].prompt_logprobs
    assert entries is not None and entries[0] is None and len(entries) == len(prompt)
    for position in (1, 15, 16, 17, 33, 49):
        entry = entries[position]
        assert entry is not None
        expected = np.asarray(jax.nn.log_softmax(naive.logits(prompt[:position])))
        assert entry.token_id == prompt[position]
        assert entry.logprob == pytest.approx(expected[prompt[position]], abs=1e-4)
        assert entry.top_ids == np.argsort(-expected)[:2].tolist()


def penalised_greedy(
    naive: Naive, count: int, repetition: float, presence: float, frequency: float
) -> list[int]:
    token_ids, made = list(PROMPT), []
    for _ in range(count):
        logits = np.array(naive.logits(token_ids))
        for token_id in set(token_ids):
            seen = logits[token_id]
            logits[token_id] = seen / repetition if seen > 0 else seen * repetition
        for token_id in set(made):
            logits[token_id] -= presence + frequency * made.count(token_id)
        made.append(int(logits.argmax()))
        token_ids.append(made[-1])
    return made


@pytest.mark.parametrize("overlap", [True, False])
def test_penalties_count_every_token_so_far(folder: Path, naive: Naive, overlap: bool) -> None:
    core = make_core(folder, async_scheduling=overlap, num_gpu_blocks_override=9)
    wish = {"repetition_penalty": 1.2, "presence_penalty": 0.05, "frequency_penalty": 0.02}
    found = tokens(core, request("a", PROMPT, max_tokens=20, **wish), *OTHERS)
    assert found == penalised_greedy(naive, 20, 1.2, 0.05, 0.02)


def test_masks(core: EngineCore, naive: Naive) -> None:
    free, _ = naive.greedy(PROMPT, 8)
    allowed = sorted({(token + 1) % VOCAB for token in free})
    only = tokens(core, request("a", PROMPT, allowed_token_ids=allowed, max_tokens=8))
    assert set(only) <= set(allowed)

    without = tokens(core, request("b", PROMPT, bad_word_ids=[[free[0]]], max_tokens=8))
    assert free[0] not in without

    pair = free[2:4]
    for message in (
        request("c", PROMPT, bad_word_ids=[pair], max_tokens=8),
        request("d", PROMPT, bad_word_ids=[pair, [1, 2, 3]], max_tokens=8, temperature=0.0),
    ):
        split = tokens(core, message, *OTHERS)
        assert split[:3] == free[:3] and split[3] != free[3]

    biased = tokens(core, request("e", PROMPT, logit_bias={77: 100.0}, max_tokens=3))
    assert biased == [77, 77, 77]


def test_min_tokens_holds_eos_back(core: EngineCore, naive: Naive) -> None:
    free, _ = naive.greedy(PROMPT, 8)
    eos, at = free[2], free.index(free[2])
    news = outputs(core, request("a", PROMPT, eos_token_ids=[eos], max_tokens=30))["a"]
    assert [n.token_ids[0] for n in news] == free[: at + 1]
    assert (news[-1].finish_reason, news[-1].stop_reason) == ("stop", None)

    late = outputs(core, request("b", PROMPT, eos_token_ids=[eos], min_tokens=9, max_tokens=10))[
        "b"
    ]
    made = [n.token_ids[0] for n in late]
    assert len(made) >= 9 and eos not in made[:9]

    stopped = outputs(core, request("c", PROMPT, stop_token_ids=[eos], max_tokens=30))["c"]
    assert (stopped[-1].finish_reason, stopped[-1].stop_reason) == ("stop", eos)


def test_bans_never_cancel_an_allow_list(core: EngineCore) -> None:
    eos_only = request("a", PROMPT, allowed_token_ids=[9], min_tokens=3, stop_token_ids=[9])
    assert tokens(core, eos_only)[:3] == [9, 9, 9]
    same = request("b", PROMPT, allowed_token_ids=[9, 9], bad_word_ids=[[9], []], max_tokens=2)
    assert tokens(core, same) == [9, 9]


@pytest.mark.parametrize(
    "wish",
    [
        {"top_k": 2**31 - 1},
        {"top_p": 1e-38, "min_p": 1.0},
        {"repetition_penalty": 1e-38},
        {"repetition_penalty": 1e38, "temperature": 1e-30},
        {"logit_bias": {7: 1e38, 8: -1e38}, "frequency_penalty": -2.0},
        {"seed": -(2**63), "priority": 2**63 - 1},
    ],
    ids=str,
)
def test_extreme_values_are_survived(core: EngineCore, wish: dict[str, Any]) -> None:
    made = tokens(core, request("a", PROMPT, **({"temperature": 1.0, "max_tokens": 4} | wish)))
    assert len(made) == 4 and all(0 <= token < VOCAB for token in made)
    if "top_p" in wish:
        assert made == tokens(core, request("b", PROMPT, max_tokens=4))


def test_aborted_prompt_logprobs_leave_nothing(core: EngineCore) -> None:
    prompt = (PROMPT * 9)[:50]
    core.add(request("a", prompt, prompt_logprobs=1))
    core.step()
    core.step()
    core.abort("a")
    drain(core)
    again = outputs(core, request("a", prompt, prompt_logprobs=1))["a"]
    assert again[0].prompt_logprobs is not None and len(again[0].prompt_logprobs) == 50
    assert core._prompt_logprobs == {} and core._admitted_at == {}


def test_abort_and_stop_string_in_mid_flight(core: EngineCore) -> None:
    core.add(request("a", PROMPT, max_tokens=60))
    core.add(request("b", PROMPT, max_tokens=60, n=2))
    for _ in range(5):
        core.step()
    core.abort("b")
    core.finish("a", 0, 2)
    left = drain(core)
    assert {(n.request_id, n.finish_reason) for n in left} == {("b", "abort")}
    assert core.stats().kv_cache_usage == 0 and core.stats().num_running == 0


def test_only_requests_that_were_never_admitted_are_in_the_queue(folder: Path) -> None:
    core = make_core(folder, max_num_seqs=2)
    core.add(request("a", PROMPT, max_tokens=4, n=4))
    while core.stats().num_running < 2:
        core.step()
    assert core.stats().num_waiting == 2 and core.stats().num_queued_requests == 0
    core.add(request("b", PROMPT, max_tokens=1))
    assert core.stats().num_queued_requests == 1
    drain(core)


def test_a_full_queue_answers_503(folder: Path) -> None:
    core = make_core(folder, max_num_queued_reqs=2)
    found = outputs(core, *(request(str(i), PROMPT, max_tokens=2) for i in range(4)))
    codes = {key: news[-1].error_code for key, news in found.items() if news[-1].error}
    assert codes == {"2": 503, "3": 503}
