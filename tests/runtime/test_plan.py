import dataclasses
from typing import Any

import jax.numpy as jnp
import pytest

from jaxpaged.config import GIB, EngineConfig
from jaxpaged.core.request import Request
from jaxpaged.core.scheduler import Scheduler, SchedulerConfig
from jaxpaged.models import load_spec
from jaxpaged.runtime.plan import EnginePlan, make_plan, model_dtype
from jaxpaged.sampling_params import SamplingParams
from tests.engine.harness import GEMMA, LLAMA

GEMMA_270M = GEMMA | {
    "num_hidden_layers": 18, "sliding_window": 512, "max_position_embeddings": 32768,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3,
}  # fmt: skip


def plan(model: dict[str, Any], platform: str = "cpu", **settings: Any) -> EnginePlan:
    config = EngineConfig(**settings)
    made = make_plan(config, load_spec(model), jnp.dtype("float32"), platform, serving=True)
    return made.with_pages(config, 1 << 30)


def test_defaults_follow_the_platform() -> None:
    assert plan(LLAMA).max_num_batched_tokens == 512
    assert plan(LLAMA, "gpu").max_num_batched_tokens == 8192
    assert (plan(LLAMA).max_num_seqs, plan(LLAMA, "gpu").max_num_seqs) == (32, 256)
    assert plan(LLAMA).max_model_len == LLAMA["max_position_embeddings"]
    assert model_dtype(EngineConfig(), "bfloat16", "cpu") == jnp.float32
    assert model_dtype(EngineConfig(), "bfloat16", "gpu") == jnp.bfloat16
    assert model_dtype(EngineConfig(dtype="half"), "bfloat16", "cpu") == jnp.float16


def test_the_pool_is_no_larger_than_useful() -> None:
    made = plan(LLAMA, max_num_seqs=3)
    assert made.kv.num_pages == 3 * (128 // 16) + 1


def test_auto_length_is_what_fits() -> None:
    assert plan(LLAMA, max_model_len="auto", num_gpu_blocks_override=5).max_model_len == 80
    with pytest.raises(ValueError, match="estimated maximum model length is 80"):
        plan(LLAMA, num_gpu_blocks_override=5)


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e4m3", "fp8_e5m2", "int8"])
def test_pages_of_one_byte_hold_nearly_twice_the_tokens(dtype: str) -> None:
    config = EngineConfig(max_num_seqs=256, kv_cache_dtype=dtype)
    model = LLAMA | {"head_dim": 128, "max_position_embeddings": 1 << 16}
    half = jnp.dtype("bfloat16")
    one, two = (
        make_plan(c, load_spec(model), half, "gpu", serving=True).with_pages(c, 1 << 30)
        for c in (config, EngineConfig(max_num_seqs=256))
    )
    assert one.kv.num_pages >= 1.9 * two.kv.num_pages
    assert one.kv.num_pages * one.kv.page_bytes <= 1 << 30


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_model_len": 4096}, "--max-model-len 4096 .* 128"),
        ({"max_num_batched_tokens": 8, "max_num_seqs": 16}, "--max-num-seqs 16"),
        (
            {"max_num_batched_tokens": 64, "enable_chunked_prefill": False},
            "--no-enable-chunked-prefill",
        ),
    ],
)
def test_contradictions_are_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        plan(LLAMA, **settings)


def test_gemma_at_8k_holds_a_third_of_all_full_layers_at_most() -> None:
    made = plan(GEMMA_270M, max_model_len=8448, num_gpu_blocks_override=4000)
    scheduler = Scheduler(
        SchedulerConfig(
            page_size=16,
            num_pages=made.kv.num_pages,
            windows=made.windows,
            max_num_seqs=4,
            max_num_batched_tokens=made.max_num_batched_tokens,
            max_model_len=made.max_model_len,
        )
    )
    prompt = tuple(i % 97 for i in range(8192))
    scheduler.add(
        Request(
            request_id="a", prompt_token_ids=prompt, params=SamplingParams(max_tokens=99), seed=0
        )
    )
    for _ in range(8):
        step = scheduler.schedule()
        scheduler.update(step, [1 for item in step.sequences if item.samples])
    held = scheduler.pages.pool.usage * (made.kv.num_pages - 1)
    all_full = len(made.windows) * -(-8192 // 16)
    assert len(made.windows) == 6
    assert held <= 0.30 * all_full


def test_the_stage_that_can_hold_fewest_pages_decides() -> None:
    config = EngineConfig(pipeline_parallel_size=2, max_model_len=64)
    spec = load_spec(LLAMA | {"num_hidden_layers": 3})
    made = make_plan(config, spec, jnp.dtype("float32"), "cpu", serving=True)
    assert made.stages == (range(2), range(2, 3))
    page = made.kv.page_bytes // 3
    assert made.with_pages(config, 2 * page * 21, page * 31).kv.num_pages == 20 + 1
    assert made.with_pages(config, 2 * page * 31, page * 21).kv.num_pages == 20 + 1


def test_what_is_missing_is_told_in_bytes_of_a_device() -> None:
    config = EngineConfig(pipeline_parallel_size=2, max_model_len=64)
    spec = load_spec(LLAMA | {"num_hidden_layers": 3})
    made = make_plan(config, spec, jnp.dtype("float32"), "cpu", serving=True)
    pages = GIB * 3 // made.kv.page_bytes  # that take a GiB for a layer
    long = dataclasses.replace(made, max_model_len=3 * 16 * pages)
    for budgets, told in (((2, 4), "6.00 GiB .* 2.00 GiB"), ((8, 1), "3.00 GiB .* 1.00 GiB")):
        with pytest.raises(ValueError, match=told):
            long.with_pages(config, *(gib * GIB for gib in budgets))
