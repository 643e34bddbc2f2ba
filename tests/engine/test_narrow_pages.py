"""Whole engines on KV pages of one byte."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jaxpaged.config import EngineConfig
from jaxpaged.engine.engine_core import EngineCore
from tests.engine.harness import GEMMA, LLAMA, assert_greedy, naive_of, request, run, write_model

# Fewer layers, of all kinds: they compile sooner.
SMALL_LLAMA = LLAMA | {"num_hidden_layers": 1}
SMALL_GEMMA = GEMMA | {"num_hidden_layers": 2, "layer_types": GEMMA["layer_types"][1:3]}


@pytest.mark.parametrize(("model", "dtype"), [(SMALL_LLAMA, "int8"), (SMALL_GEMMA, "fp8")])
def test_tokens_are_the_same_alone_together_in_chunks_and_from_the_cache(
    tmp_path: Path, model: dict, dtype: str
) -> None:
    """A slot is written once and its scale with it: nobody's pages depend on who is there."""
    config = EngineConfig(
        model=str(write_model(tmp_path, model)),
        load_format="dummy",
        skip_tokenizer_init=True,
        kv_cache_dtype=dtype,
        max_num_seqs=4,
        max_num_batched_tokens=16,  # longer prompts come in chunks
        num_gpu_blocks_override=160,
        enforce_eager=True,
    )
    core = EngineCore(config)
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 128, 40).tolist()
    prompts = [shared, [*shared, 3, 4], rng.integers(0, 128, 7).tolist()]
    naive = naive_of(core)
    together = run(core, [request(str(i), p, max_tokens=5) for i, p in enumerate(prompts)])
    ties = 0
    for i, prompt in enumerate(prompts):
        alone = run(core, [request("alone", prompt, max_tokens=5)])["alone", 0]  # cached by now
        assert alone == together[str(i), 0]
        ties += assert_greedy(naive, prompt, alone)
    assert ties == 0
