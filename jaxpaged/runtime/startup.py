"""From settings to a runner that is ready: load, size the pool, compile, warm up."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from jaxpaged import model_files
from jaxpaged.config import EngineConfig
from jaxpaged.layers.attention import attention_backend
from jaxpaged.models import load_spec
from jaxpaged.models.decoder import Decoder, Params
from jaxpaged.runtime import weights
from jaxpaged.runtime.compilation import enable_compile_cache
from jaxpaged.runtime.memory import page_budget, report_outside_pool
from jaxpaged.runtime.model_runner import ModelRunner
from jaxpaged.runtime.plan import EnginePlan, make_plan, model_dtype
from jaxpaged.runtime.programs import all_keys, largest_keys, smallest_keys

log = logging.getLogger(__name__)

PROBE_PAGES = 64  # pool size while the temporaries of the largest step are measured


@dataclass(frozen=True)
class Started:
    """A runner that is ready, and what start-up settled and took."""

    runner: ModelRunner
    backend: str  # attention backend in use
    platform: str
    dtype: str
    seconds: dict[str, float]


def start_runner(config: EngineConfig, *, serving: bool) -> Started:
    """Load the model that `config` names and make it ready to run.

    Raises:
        ValueError, OSError: one line that says what to change.
    """
    seconds: dict[str, float] = {}
    enable_compile_cache(config.compile_cache_dir)
    device = jax.local_devices()[0]

    start = time.perf_counter()
    path = model_files.resolve_model(config.model, config.revision, config.download_dir)
    spec = load_spec(model_files.read_config(path))
    dtype = model_dtype(config, spec.dtype, device.platform)
    backend = attention_backend(config.attention_backend, device.platform)
    plan = make_plan(config, spec, dtype, device, serving)
    model = Decoder(spec, plan.kv, dtype, backend)
    params = weights.load_params(path, model, load_format=config.load_format, seed=config.seed)
    jax.block_until_ready(params)
    seconds["weights"] = time.perf_counter() - start

    plan = _size_pool(config, plan, model, params, device)
    runner = _runner(config, plan, model, params)
    if not config.enforce_eager:
        runner.compile_all()
    seconds["trace"] = runner.executables.trace_seconds
    seconds["compile"] = runner.executables.compile_seconds

    start = time.perf_counter()
    if not config.enforce_eager:
        keys = all_keys(plan.buckets, plan.shapes.input_sizes(plan.buckets))
        # A CPU has nothing to load: one small step tells that everything runs.
        runner.warm_up(smallest_keys(plan.buckets) if device.platform == "cpu" else keys)
    seconds["warmup"] = time.perf_counter() - start
    if device.platform == "gpu":
        report_outside_pool(device)
    return Started(runner, backend, device.platform, jnp.dtype(dtype).name, seconds)


def _runner(config: EngineConfig, plan: EnginePlan, model: Decoder, params: Params) -> ModelRunner:
    return ModelRunner(model, params, plan, config.max_logprobs)


def _size_pool(
    config: EngineConfig, plan: EnginePlan, model: Decoder, params: Params, device: jax.Device
) -> EnginePlan:
    """Give the pool what memory is left beside weights and the largest step."""
    temporary = step_input = 0
    measured = config.kv_cache_memory_bytes is None and config.num_gpu_blocks_override is None
    if device.platform == "gpu" and measured:
        # The temporaries do not depend on the pool, so a small one will do. The probe's own state
        # (token counts, tables) still counts as in use below: the runner needs as much again.
        probe_plan = replace(plan, kv=replace(plan.kv, num_pages=PROBE_PAGES))
        probe = _runner(config, probe_plan, model, params)
        largest = largest_keys(plan.buckets)
        probe.executables.compile_all(largest)
        temporary = max(probe.executables.temporary_bytes(key) for key in largest)
        step_input = 4 * plan.shapes.input_sizes(plan.buckets)[-1]
    budget = page_budget(
        kv_cache_memory_bytes=config.kv_cache_memory_bytes,
        gpu_memory_utilization=config.gpu_memory_utilization,
        device=device,
        step_temporary_bytes=temporary,
        step_input_bytes=step_input,
    )
    return plan.with_pages(config, budget)
