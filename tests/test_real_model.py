"""A real checkpoint, Gemma 3 270M, gives Hugging Face's tokens however its requests are run.

`pytest -m real_model --real-model MODEL`; docs/development.md says how to make MODEL.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxpaged.engine.llm import LLM
from jaxpaged.model_files import resolve_model
from jaxpaged.outputs import RequestOutput
from jaxpaged.runtime.checkpoint import convert
from jaxpaged.sampling_params import SamplingParams

FIXTURES = Path(__file__).parent / "fixtures"
GOLDEN = json.loads((FIXTURES / "gemma3_270m_golden.json").read_text())
CASES: list[dict[str, Any]] = GOLDEN["cases"]
PROMPTS = [{"prompt_token_ids": case["prompt_ids"]} for case in CASES]
GREEDY = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, logprobs=5)


def batch(llm: LLM) -> list[RequestOutput]:
    return llm.generate(PROMPTS, GREEDY, use_tqdm=False)


def alone(llm: LLM) -> list[RequestOutput]:
    return [llm.generate(prompt, GREEDY, use_tqdm=False)[0] for prompt in PROMPTS]


def warm_cache(llm: LLM) -> list[RequestOutput]:
    """Every prompt again, and its answer's first half as part of the prompt."""
    first = batch(llm)
    again = batch(llm)
    longest = max(range(len(CASES)), key=lambda i: len(CASES[i]["prompt_ids"]))
    assert again[longest].num_cached_tokens >= len(CASES[longest]["prompt_ids"]) - 16
    assert [o.outputs[0].token_ids for o in again] == [o.outputs[0].token_ids for o in first]
    return again


def preempted(llm: LLM) -> list[RequestOutput]:
    """The longest prompt first: the others start in what it leaves, and outgrow it."""
    outputs = llm.generate(PROMPTS[::-1], GREEDY, use_tqdm=False)[::-1]
    assert llm._core.stats().num_preemptions > 0
    return outputs


SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 8,
    "max_model_len": 2048,
    "enforce_eager": True,
}
# Room for the longest request and little beside it.
SMALL_POOL = {"max_num_batched_tokens": 64, "max_model_len": 1408, "num_gpu_blocks_override": 300}
WAYS: dict[str, tuple[Callable[[LLM], list[RequestOutput]], dict[str, Any]]] = {
    "alone": (alone, {}),
    "batch": (batch, {}),
    "chunked": (batch, {"max_num_batched_tokens": 64, "enable_prefix_caching": False}),
    "warm cache": (warm_cache, {}),
    "preempted": (preempted, SMALL_POOL),
    "synchronous": (batch, {"async_scheduling": False}),
}


@pytest.fixture(scope="module")
def folder(real_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model in bfloat16, as transformers had it: a GGUF file's blocks are rounded to it."""
    if real_model.suffix != ".gguf":
        return real_model
    out = tmp_path_factory.mktemp("real") / "model"
    convert(resolve_model(real_model), out)
    return out


@pytest.mark.real_model
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("way", WAYS)
def test_golden_tokens(folder: Path, way: str) -> None:
    run, settings = WAYS[way]
    with LLM(str(folder), **(SETTINGS | settings)) as llm:
        outputs = run(llm)
    for case, output in zip(CASES, outputs, strict=True):
        choice = output.outputs[0]
        assert choice.token_ids == case["output_ids"], case["name"]
        assert choice.logprobs is not None
        for position, top5 in enumerate(case["top5_logprobs"]):
            found = choice.logprobs[position]
            for token_id, logprob in top5:
                assert found[token_id].logprob == pytest.approx(logprob, abs=1e-3), case["name"]


@pytest.mark.real_model
@pytest.mark.timeout(1200)
def test_tokens_of_the_blocks_themselves(real_model: Path) -> None:
    """In float32 nothing is rounded between a GGUF file's blocks and the products."""
    if real_model.suffix != ".gguf":
        pytest.skip("needs a GGUF file")
    expected = json.loads((FIXTURES / "gemma3_270m_gguf_golden.json").read_text())["output_ids"]
    with LLM(str(real_model), **SETTINGS) as llm:
        outputs = batch(llm)
    found = {case["name"]: o.outputs[0].token_ids for case, o in zip(CASES, outputs, strict=True)}
    assert found == expected
