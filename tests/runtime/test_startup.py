from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax.traverse_util import unflatten_dict

from jaxpaged.config import EngineConfig
from jaxpaged.models import load_spec
from jaxpaged.models.decoder import Decoder
from jaxpaged.runtime import weights
from jaxpaged.runtime.executable_store import ExecutableStore
from jaxpaged.runtime.plan import make_plan
from jaxpaged.runtime.programs import Forward
from jaxpaged.runtime.startup import StageStart, StartUp, check_card, start_runner
from tests.engine.harness import LLAMA, write_model

STATS = {"bytes_limit": 48 << 20, "bytes_in_use": 0}  # as a GPU would report them


def test_the_pool_is_sized_before_weights_are_there_and_alike_at_every_start(
    tmp_path: Path,
) -> None:
    config = EngineConfig(max_num_seqs=2, max_num_batched_tokens=32, gpu_memory_utilization=0.5)
    device, dtype = jax.local_devices()[0], jnp.dtype(jnp.float32)
    spec = load_spec(LLAMA)
    plan = make_plan(config, spec, dtype, device.platform, serving=True)
    model = Decoder(spec, plan.kv, dtype)
    params = unflatten_dict(weights.abstract_leaves(model), sep="/")
    whole = StageStart(model, params, [device], ExecutableStore(tmp_path, [device]))
    pages = []
    loading: Future[None] = Future()
    loading.set_result(None)
    for start in range(2):
        sized, (executables,) = StartUp(config, [whole]).size_pool(plan, [STATS], loading)
        pages.append(sized.kv.num_pages)
        known = executables.trace_seconds
        executables.compile_all(key for key in whole.keys(sized) if not isinstance(key, Forward))
        assert executables.trace_seconds == known  # the probe compiled them
        assert (known == 0) == (start == 1)
    assert pages[0] == pages[1] > 2


def test_fp8_weights_want_a_card_that_knows_them() -> None:
    with pytest.raises(ValueError, match=r"capability 8\.9 or later, and this one has 8\.0"):
        check_card(load_spec(LLAMA, "fp8_per_channel"), 8.0)
    for scheme, capability in (
        ("fp8_per_channel", 9.0),
        ("fp8_per_channel", 0),
        ("int8_per_channel_weight_only", 8.0),
        (None, 8.0),
    ):
        check_card(load_spec(LLAMA, scheme), capability)


def test_a_stored_executable_that_fails_is_compiled_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = EngineConfig(
        model=str(write_model(tmp_path / "model", LLAMA)), load_format="dummy",
        compile_cache_dir=str(tmp_path / "cache"), num_gpu_blocks_override=16,
        max_num_seqs=1, max_num_batched_tokens=32,
    )  # fmt: skip
    start_runner(config, serving=True)

    def fail(*arguments: Any) -> None:
        raise jax.errors.JaxRuntimeError("NOT_FOUND: a function")

    with monkeypatch.context() as patch:
        patch.setattr(ExecutableStore, "load", lambda self, path: fail if path.exists() else None)
        started = start_runner(config, serving=True)
    assert "compiling anew: NOT_FOUND" in caplog.text
    assert started.seconds["trace"] > 0 and started.runner.late_compilations == 0
    assert start_runner(config, serving=True).seconds["trace"] == 0
