"""Engines whose layers' matrices lie in host memory: what holds for others holds for them."""

from __future__ import annotations

from pathlib import Path

import jax

from jaxpaged.config import EngineConfig
from jaxpaged.engine.engine_core import EngineCore
from jaxpaged.parallel.sharding import HOST
from jaxpaged.runtime.programs import Forward
from tests.engine.harness import (
    LLAMA,
    VOCAB,
    Naive,
    assert_greedy,
    request,
    run,
    write_model,
)


def test_tokens_are_those_of_weights_on_the_device(tmp_path: Path) -> None:
    """Side by side, in chunks, preempted and from the prefix cache."""
    core = EngineCore(
        EngineConfig(
            model=str(write_model(tmp_path, LLAMA, num_hidden_layers=3)), load_format="dummy",
            cpu_offload_gb=7e-5, max_num_seqs=2, max_num_batched_tokens=8, enforce_eager=True,
            num_gpu_blocks_override=4, compile_cache_dir="none", max_model_len=48,
        )
    )  # fmt: skip
    prompts = [[(7 * i + 11 * j) % VOCAB for j in range(19)] for i in range(2)]
    asked = {str(i): prompt for i, prompt in enumerate(prompts)}
    tokens = run(core, [request(name, prompt, max_tokens=26) for name, prompt in asked.items()])
    tokens |= run(core, [request("again", prompts[1], max_tokens=26)])

    (stage,) = core._runner.stages
    assert stage.model.host_layers == (0, 1, 2)  # three in turn where there is room for two
    assert stage.params["layers_2"]["mlp"]["down"]["kernel"].sharding.memory_kind == HOST
    keys = [key for key in stage.executables._compiled if isinstance(key, Forward)]
    for key in keys:  # else XLA would multiply in host memory
        program = stage.executables._program(key)
        assert str(jax.make_jaxpr(program.function)(*program.args)).count("device_put[") == 3 * 4
    assert keys
    on_device = jax.device_put(stage.params, stage.state.last_token.sharding)
    naive, stats = Naive(stage.model.clone(host_layers=()), on_device), core.stats()
    for (name, _), found in tokens.items():
        assert_greedy(naive, asked.get(name, prompts[1]), found)
    assert stats.num_preemptions > 0
    assert stats.prefix_cache_hits > 0
