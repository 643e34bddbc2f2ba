"""From settings to a runner that is ready: load, size the pool, compile, warm up."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict

from jaxpaged import model_files
from jaxpaged.config import EngineConfig
from jaxpaged.layers.attention import AttentionCase, attention_backend
from jaxpaged.models import load_spec
from jaxpaged.models.decoder import Decoder, Params
from jaxpaged.models.spec import ModelSpec
from jaxpaged.models.spread import spread_spec
from jaxpaged.parallel.hosts import Group
from jaxpaged.parallel.mesh import model_mesh
from jaxpaged.runtime import weights
from jaxpaged.runtime.command_stream import CommandSender
from jaxpaged.runtime.compilation import Executables, cache_folder
from jaxpaged.runtime.executable_store import ExecutableStore
from jaxpaged.runtime.memory import (
    page_budget,
    report_outside_pool,
    resident_bytes,
    scarcest_memory,
)
from jaxpaged.runtime.model_runner import ModelRunner
from jaxpaged.runtime.plan import EnginePlan, make_plan, model_dtype
from jaxpaged.runtime.programs import (
    Forward,
    Key,
    abstract_states,
    all_keys,
    largest_keys,
    make_programs,
    smallest_keys,
)

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


def start_runner(config: EngineConfig, *, serving: bool, group: Group | None = None) -> Started:
    """Load the model that `config` names and make it ready to run.

    Args:
        group: the hosts that run the model together, each of which calls this; None: this one.

    Raises:
        ValueError, OSError: one line that says what to change.
    """
    cache = cache_folder(config.compile_cache_dir)
    mesh = model_mesh(config.tensor_parallel_size)
    devices = jax.local_devices()[: config.tensor_parallel_size // jax.process_count()]
    device = devices[0]
    path = model_files.resolve_model(config.model, config.revision, config.download_dir)
    spec = spread_spec(load_spec(model_files.read_config(path)), config.tensor_parallel_size)
    _report_spread(spec, config.tensor_parallel_size)
    dtype = model_dtype(config, spec.dtype, device.platform)
    plan = make_plan(config, spec, dtype, device, serving)
    backend = attention_backend(
        config.attention_backend,
        AttentionCase(
            platform=device.platform,
            compute_capability=float(getattr(device, "compute_capability", 0)),
            dtype=dtype,
            kv_dtype=plan.kv.dtype,
            queries_per_kv_head=spec.queries_per_kv_head,
            head_dim=spec.head_dim,
            page_size=plan.kv.page_size,
        ),
    )
    model = Decoder(spec, plan.kv, dtype, backend, mesh)
    start = StartUp(
        config,
        model,
        unflatten_dict(weights.abstract_leaves(model), sep="/"),
        device,
        None if cache is None or group is not None else ExecutableStore(cache, devices),
        group,
    )

    # Stored executables are loaded while the weights are. What has to be compiled waits for them:
    # XLA tries kernels out in memory that it takes beside them, and would leave holes.
    for each in devices:
        jax.device_put(0, each).block_until_ready()  # its allocator exists from here on
    stats = scarcest_memory(devices) if device.platform == "gpu" else None
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(_load_weights, path, config, model)
        plan, executables = start.size_pool(plan, stats, loading)
        keys = all_keys(plan.buckets, plan.shapes.input_sizes(plan.buckets))
        if not config.enforce_eager:
            executables.compile_all(keys, after=loading)
        params, weight_seconds = loading.result()
    begin = time.perf_counter()
    followers = None
    if group is not None and group.leads:
        followers = CommandSender(group, keys)
    runner = ModelRunner(model, params, plan, executables, followers)
    follows = group is not None and followers is None  # its leader warms it up
    if not config.enforce_eager and not follows:
        # A CPU has nothing to load: one small step tells that everything runs.
        first = smallest_keys(plan.buckets) if device.platform == "cpu" else keys
        if not _warm_up(runner, first):
            del runner  # its pages, before there are others
            executables.compile_all(keys)
            runner = ModelRunner(model, params, plan, executables, followers)
            runner.warm_up(first)
    seconds = {
        "weights": weight_seconds,
        "trace": executables.trace_seconds,
        "compile": executables.compile_seconds,
        "warmup": time.perf_counter() - begin,
    }
    if device.platform == "gpu":
        for each in devices:
            report_outside_pool(each)
    return Started(runner, backend, device.platform, jnp.dtype(dtype).name, seconds)


def _report_spread(spec: ModelSpec, num_devices: int) -> None:
    if num_devices > 1:
        log.info("the model is split over %d devices", num_devices)
    if spec.kv_copies > 1:
        log.info(
            "%d KV heads do not divide by %d devices: each is kept %d times",
            spec.stored.num_kv_heads,
            num_devices,
            spec.kv_copies,
        )


def _warm_up(runner: ModelRunner, keys: Sequence[Key]) -> bool:
    """Run executables once; False: one failed, and those that were stored are to be made anew."""
    try:
        runner.warm_up(keys)
    except jax.errors.JaxRuntimeError as error:
        if not runner.executables.forget_loaded():
            raise
        log.warning("a stored executable does not run, compiling anew: %s", error)
        return False
    return True


def _load_weights(path: Path, config: EngineConfig, model: Decoder) -> tuple[Params, float]:
    """The parameters on the device, and the seconds that it took."""
    begin = time.perf_counter()
    params = weights.load_params(path, model, load_format=config.load_format, seed=config.seed)
    jax.block_until_ready(params)
    return params, time.perf_counter() - begin


@dataclass(frozen=True)
class StartUp:
    """What compiling needs to know before anything is loaded."""

    config: EngineConfig
    model: Decoder
    params: Params  # abstract
    device: jax.Device
    store: ExecutableStore | None
    group: Group | None = None  # hosts that size their pools alike

    def executables(self, plan: EnginePlan) -> Executables[Key]:
        programs = make_programs(
            self.model, plan, self.params, self.config.max_logprobs, self.device
        )
        return Executables(programs, self.store)

    def size_pool(
        self, plan: EnginePlan, stats: dict[str, int] | None, loading: Future[Any]
    ) -> tuple[EnginePlan, Executables[Key]]:
        """Give the pool what memory is left beside weights and the largest step.

        Returns:
            The plan with its pages, and its executables: some may be compiled already.
        """
        config, probe = self.config, None
        temporary = step_input = resident = 0
        measured = config.kv_cache_memory_bytes is None and config.num_gpu_blocks_override is None
        if stats and measured:
            # The temporaries do not depend on the pool, so a small one will do. Beside its largest
            # step there is time to compile all that knows no pool.
            probe = self.executables(replace(plan, kv=replace(plan.kv, num_pages=PROBE_PAGES)))
            input_sizes = plan.shapes.input_sizes(plan.buckets)
            largest = largest_keys(plan.buckets)
            others = [] if config.enforce_eager else all_keys(plan.buckets, input_sizes)
            first = [*largest, *(key for key in others if not isinstance(key, Forward))]
            probe.compile_all(first, after=loading)
            temporary = max(probe.temporary_bytes(key) for key in largest)
            step_input = 4 * input_sizes[-1]
            states = abstract_states(self.model, plan, self.device)
            resident = resident_bytes((self.params, states))
        budget = page_budget(
            kv_cache_memory_bytes=config.kv_cache_memory_bytes,
            gpu_memory_utilization=config.gpu_memory_utilization,
            stats=stats,
            resident_bytes=resident,
            step_temporary_bytes=temporary,
            step_input_bytes=step_input,
        )
        if self.group is not None:
            budget = self.group.minimum(budget)
        plan = plan.with_pages(config, budget)
        executables = self.executables(plan)
        if probe is not None:
            executables.adopt(probe)
        return plan, executables
