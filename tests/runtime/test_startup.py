from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict

from jaxpaged.config import EngineConfig
from jaxpaged.models import load_spec
from jaxpaged.models.decoder import Decoder
from jaxpaged.runtime import weights
from jaxpaged.runtime.executable_store import ExecutableStore
from jaxpaged.runtime.plan import make_plan
from jaxpaged.runtime.programs import Forward, all_keys
from jaxpaged.runtime.startup import StartUp
from tests.engine.harness import LLAMA

STATS = {"bytes_limit": 8 << 20, "bytes_in_use": 0}  # as a GPU would report them


def test_the_pool_is_sized_before_weights_are_there_and_alike_at_every_start(
    tmp_path: Path,
) -> None:
    config = EngineConfig(max_num_seqs=2, max_num_batched_tokens=32, gpu_memory_utilization=0.5)
    device, dtype = jax.local_devices()[0], jnp.dtype(jnp.float32)
    spec = load_spec(LLAMA)
    plan = make_plan(config, spec, dtype, device, serving=True)
    model = Decoder(spec, plan.kv, dtype)
    params = unflatten_dict(weights.abstract_leaves(model), sep="/")
    pages = []
    for start in range(2):
        started = StartUp(config, model, params, device, ExecutableStore(tmp_path, [device]))
        sized, executables = started.size_pool(plan, STATS)
        pages.append(sized.kv.num_pages)
        keys = all_keys(sized.buckets, sized.shapes.input_sizes(sized.buckets))
        known = executables.trace_seconds
        executables.compile_all(key for key in keys if not isinstance(key, Forward))
        assert executables.trace_seconds == known  # the probe compiled them
        assert (known == 0) == (start == 1)
    assert pages[0] == pages[1] > 2
