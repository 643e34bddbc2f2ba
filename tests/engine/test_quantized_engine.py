"""Engines with weights in fewer bits: what holds for others holds for them."""

from __future__ import annotations

from pathlib import Path

from jaxpaged.config import EngineConfig
from jaxpaged.engine.engine_core import EngineCore
from tests.engine.harness import LLAMA, VOCAB, assert_greedy, naive_of, request, run, write_model


def test_tokens_of_weight_only_schemes_are_the_naive_loops(tmp_path: Path) -> None:
    """Side by side, in chunks, preempted and from the prefix cache."""
    core = EngineCore(
        EngineConfig(
            model=str(write_model(tmp_path, LLAMA, num_hidden_layers=1)), load_format="dummy",
            quantization="int4_per_group_weight_only", quantize_lm_head=True,
            max_num_seqs=3, max_num_batched_tokens=8, enforce_eager=True,
            num_gpu_blocks_override=7, compile_cache_dir="none", max_model_len=96,
        )
    )  # fmt: skip
    assert core.info.lm_head_dtype == "int4"
    prompts = [[(7 * i + 11 * j) % VOCAB for j in range(19)] for i in range(3)]
    asked = {str(i): prompt for i, prompt in enumerate(prompts)}
    tokens = run(core, [request(name, prompt, max_tokens=26) for name, prompt in asked.items()])
    tokens |= run(core, [request("again", prompts[2], max_tokens=26)])
    naive, stats = naive_of(core), core.stats()
    for (name, _), found in tokens.items():
        assert_greedy(naive, asked.get(name, prompts[2]), found)
    assert stats.num_preemptions > 0
    assert stats.prefix_cache_hits > 0
