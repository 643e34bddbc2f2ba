"""Embeddings are what the model's own forward gives, however their prompts were computed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxpaged.config import EngineConfig
from jaxpaged.engine.engine_core import EngineCore
from jaxpaged.engine.messages import AddRequest, SequenceOutput
from tests.engine.harness import (
    LLAMA,
    VOCAB,
    Naive,
    assert_greedy,
    drain,
    naive_of,
    request,
    write_model,
)  # fmt: skip

SMALL: dict[str, Any] = {
    "load_format": "dummy", "max_num_seqs": 4, "max_num_batched_tokens": 32,
    "enforce_eager": True, "num_gpu_blocks_override": 24,
}  # fmt: skip


def prompts() -> list[list[int]]:
    """Of many lengths, the second half on a common beginning."""
    draw = random.Random(3)

    def some(count: int) -> list[int]:
        return [draw.randrange(VOCAB) for _ in range(count)]

    head = some(40)
    return [some(n) for n in (1, 2, 31, 33, 90)] + [head + some(n) for n in (1, 7, 30)] + [head]


def expected(naive: Naive, prompt: list[int], pooling: str) -> np.ndarray:
    hidden_TD = np.asarray(naive.hidden(prompt), np.float64)
    pooled = hidden_TD[-1] if pooling == "last" else hidden_TD.mean(0)
    return pooled / np.linalg.norm(pooled)


def embed(name: str, prompt: list[int]) -> AddRequest:
    return request(name, prompt, max_tokens=1, pooling=True)


def vectors(outputs: list[SequenceOutput]) -> dict[str, np.ndarray]:
    found = {}
    for output in outputs:
        if output.embedding is not None:
            assert (output.token_ids, output.finish_reason) == ([], "stop")
            assert output.request_id not in found
            found[output.request_id] = np.frombuffer(output.embedding, np.float32)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"), LLAMA)


@pytest.fixture(scope="module")
def naive(folder: Path) -> Naive:
    return naive_of(EngineCore(EngineConfig(model=str(folder), **SMALL)))


@pytest.mark.parametrize(
    ("pooling", "changes"),
    [
        ("last", {"max_num_batched_tokens": 5, "async_scheduling": False}),
        ("mean", {"enforce_eager": False}),
        ("mean", {"max_num_batched_tokens": 5, "num_gpu_blocks_override": 9}),
    ],
    ids=str,
)
def test_embeddings_beside_generation(
    folder: Path, naive: Naive, pooling: str, changes: dict[str, Any]
) -> None:
    settings = SMALL | {"pooling": pooling} | changes
    core = EngineCore(EngineConfig(model=str(folder), **settings))
    asked = prompts()
    compiled = not settings["enforce_eager"]
    assert core.info.embedding_size == 32
    for again in ("", "again-"):  # the second time, the cache has every prompt
        for i, prompt in enumerate(asked):
            core.add(embed(f"{again}{i}", prompt))
            core.add(request(f"{again}text{i}", prompt, max_tokens=8))
        if compiled:  # rows that score prompt tokens lie behind those that are embedded
            core.add(request(f"{again}scored", asked[4], max_tokens=2, prompt_logprobs=0))
        outputs = drain(core)
        found = vectors(outputs)
        assert sorted(found) == sorted(f"{again}{i}" for i in range(len(asked)))
        for i, prompt in enumerate(asked):
            want = expected(naive, prompt, pooling)
            np.testing.assert_allclose(found[f"{again}{i}"], want, atol=2e-5)
            text = [t for o in outputs if o.request_id == f"{again}text{i}" for t in o.token_ids]
            assert_greedy(naive, prompt, text)
    if compiled:
        assert core.stats().step_compilations == 0
    if "num_gpu_blocks_override" in changes:
        assert core.stats().num_preemptions > 0
    if pooling == "last":
        assert core.stats().prefix_cache_hits > 0


def test_a_preempted_mean_starts_over_and_an_aborted_one_leaves_nothing(
    folder: Path, naive: Naive
) -> None:
    settings = SMALL | {"pooling": "mean", "max_num_batched_tokens": 8}
    core = EngineCore(EngineConfig(model=str(folder), **settings))
    prompt = prompts()[4]
    core.add(embed("aborted", prompt))
    core.add(embed("preempted", prompt))
    for _ in range(3):
        core.step()
    core.abort("aborted")
    for _ in range(3):
        core.step()
    (running,) = core._scheduler._running
    assert 0 < running.num_computed < len(prompt)
    core._scheduler._preempt(running)
    found = vectors(drain(core))
    assert set(found) == {"preempted"}
    want = expected(naive, prompt, "mean")
    np.testing.assert_allclose(found["preempted"], want, atol=2e-5)
    assert core.stats().kv_cache_usage == 0
