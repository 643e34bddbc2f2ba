"""From settings to a runner that is ready: load, size the pool, compile, warm up."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict

from jaxpaged import model_files
from jaxpaged.config import EngineConfig
from jaxpaged.layers.attention import E4M3_CAPABILITY, AttentionCase, attention_backend
from jaxpaged.models import load_spec
from jaxpaged.models.decoder import Decoder, Params
from jaxpaged.models.spec import ModelSpec
from jaxpaged.models.spread import spread_spec
from jaxpaged.parallel.hosts import Group
from jaxpaged.parallel.mesh import model_mesh, stage_devices
from jaxpaged.parallel.peers import reach_each_other
from jaxpaged.runtime import weights
from jaxpaged.runtime.command_stream import CommandSender
from jaxpaged.runtime.compilation import Executables, cache_folder, compile_together
from jaxpaged.runtime.executable_store import ExecutableStore
from jaxpaged.runtime.memory import (
    page_budget,
    report_outside_pool,
    resident_bytes,
    scarcest_memory,
)
from jaxpaged.runtime.model_runner import ModelRunner
from jaxpaged.runtime.offload import offload
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
from jaxpaged.runtime.stage import Stage

log = logging.getLogger(__name__)

PROBE_PAGES = 64  # pool size while the temporaries of the largest step are measured


@dataclass(frozen=True)
class Started:
    """A runner that is ready, and what start-up settled and took."""

    runner: ModelRunner
    backend: str  # attention backend in use
    platform: str
    dtype: str
    lm_head_dtype: str
    seconds: dict[str, float]


def start_runner(config: EngineConfig, *, serving: bool, group: Group | None = None) -> Started:
    """Load the model that `config` names and make it ready to run.

    Args:
        group: the hosts that run the model together, each of which calls this; None: this one.

    Raises:
        ValueError, OSError: one line that says what to change.
    """
    cache = _common_cache(config, group)
    devices_of = stage_devices(config.tensor_parallel_size, config.pipeline_parallel_size)
    here = [[each for each in own if each in jax.local_devices()] for own in devices_of]
    device, devices = here[0][0], [each for own in here for each in own]
    path = model_files.resolve_model(config.model, config.revision, config.download_dir)
    stored = load_spec(model_files.read_config(path), config.quantization, config.quantize_lm_head)
    spec = spread_spec(stored, config.tensor_parallel_size)
    _report_spread(spec, config.tensor_parallel_size)
    capability = float(getattr(device, "compute_capability", 0))
    check_card(spec, capability)
    dtype = model_dtype(config, spec.dtype, device.platform)
    plan = make_plan(config, spec, dtype, device.platform, serving)
    backend = attention_backend(
        config.attention_backend,
        AttentionCase(
            platform=device.platform,
            compute_capability=capability,
            dtype=dtype,
            kv_dtype=plan.kv.dtype,
            queries_per_kv_head=spec.queries_per_kv_head,
            head_dim=spec.head_dim,
            page_size=plan.kv.page_size,
        ),
    )
    parts = [None] if len(plan.stages) == 1 else plan.stages
    stores = backend != "xla" and not config.disable_custom_all_reduce
    models = [
        Decoder(
            spec,
            plan.kv,
            dtype,
            backend,
            model_mesh(own),
            part,
            stores_to_peers=stores and len(own) > 1 and reach_each_other(own),
        )
        for own, part in zip(devices_of, parts, strict=True)
    ]
    if config.cpu_offload_gb:
        models = [
            offload(model, config.cpu_offload_gb, own[0])
            for model, own in zip(models, here, strict=True)
        ]
    least_of_hosts = None if group is None else group.minimum
    start = StartUp(
        config,
        [
            StageStart(
                model,
                unflatten_dict(weights.abstract_leaves(model, own[0]), sep="/"),
                own,
                None if cache is None else ExecutableStore(cache, every, least_of_hosts),
            )
            for model, own, every in zip(models, here, devices_of, strict=True)
        ],
        group,
    )
    _report_stages(plan)

    # While the weights are loaded, stored executables are, too, and others are traced. Compiling
    # waits for the weights: XLA tries kernels out in memory that it takes beside them, and would
    # leave holes.
    for each in devices:
        jax.device_put(0, each).block_until_ready()  # its allocator exists from here on
    stats = [scarcest_memory(own) if device.platform == "gpu" else None for own in here]
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(_load_weights, path, config, start.stages)
        plan, executables = start.size_pool(plan, stats, loading)
        keys = {own: stage.keys(plan) for own, stage in zip(executables, start.stages, strict=True)}
        if not config.enforce_eager:
            compile_together(keys, after=loading)
        params, weight_seconds = loading.result()
    begin = time.perf_counter()
    runner = start.runner(plan, params, executables)
    # A follower is warmed up by its leader.
    if not config.enforce_eager and (group is None or group.leads):
        # A CPU has nothing to load: one small step tells that everything runs.
        on_cpu = device.platform == "cpu"
        first = (
            smallest_keys(plan.buckets) if on_cpu else list(dict.fromkeys(chain(*keys.values())))
        )
        if not _warm_up(runner, first):
            del runner  # its pages, before there are others
            compile_together(keys)
            runner = start.runner(plan, params, executables)
            runner.warm_up(first)
    seconds = {
        "weights": weight_seconds,
        "trace": sum(own.trace_seconds for own in executables),
        "compile": sum(own.compile_seconds for own in executables),
        "warmup": time.perf_counter() - begin,
    }
    if device.platform == "gpu":
        for each in devices:
            report_outside_pool(each)
    name = jnp.dtype(dtype).name
    head = name if spec.head is None else spec.head.scheme.storage
    return Started(runner, backend, device.platform, name, head, seconds)


def _common_cache(config: EngineConfig, group: Group | None) -> Path | None:
    """Where executables are kept; None: nowhere, because this host or another one has no place.

    Hosts ask each other what they found in theirs: all have one, or none has.
    """
    cache = cache_folder(config.compile_cache_dir)
    if group is not None and group.minimum(int(cache is not None)) == 0 and cache is not None:
        log.warning("another host has no compilation cache: this start compiles anew here, too")
        return None
    return cache


def check_card(spec: ModelSpec, compute_capability: float) -> None:
    """Compiling a conversion of e4m3 for a card without that instruction would end the process.

    Args:
        compute_capability: 0 where there is none.

    Raises:
        ValueError: one line.
    """
    stored = {scheme.storage for scheme in spec.schemes}
    if "float8_e4m3fn" in stored and 0 < compute_capability < E4M3_CAPABILITY:
        raise ValueError(
            f"weights in fp8 need a GPU of compute capability {E4M3_CAPABILITY} or later, and "
            f"this one has {compute_capability}: ordinary weights with --quantization "
            "int8_per_channel_weight_only would run"
        )


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


def _report_stages(plan: EnginePlan) -> None:
    if len(plan.stages) > 1:
        layers = ", ".join(f"{part.start} to {part.stop - 1}" for part in plan.stages)
        log.info("the layers are dealt out to %d stages: %s", len(plan.stages), layers)


def _warm_up(runner: ModelRunner, keys: Sequence[Key]) -> bool:
    """Run executables once; False: one failed, and those that were stored are to be made anew."""
    try:
        runner.warm_up(keys)
    except jax.errors.JaxRuntimeError as error:
        forgotten = any([stage.executables.forget_loaded() for stage in runner.stages])
        if not forgotten or runner.stages[0].followers is not None:
            raise  # followers go on without a way back; the next start compiles for all
        log.warning("a stored executable does not run, compiling anew: %s", error)
        return False
    return True


def _load_weights(
    path: Path, config: EngineConfig, stages: Sequence[StageStart]
) -> tuple[list[Params], float]:
    """The parameters of each stage on its devices, and the seconds that it took."""
    begin = time.perf_counter()
    scales = config.kv_cache_scales
    params = [
        weights.load_params(
            path,
            stage.model,
            device=stage.devices[0],
            load_format=config.load_format,
            seed=config.seed,
            kv_scales=None if scales is None else Path(scales),
        )
        for stage in stages
    ]
    jax.block_until_ready(params)
    return params, time.perf_counter() - begin


@dataclass(frozen=True)
class StageStart:
    """What compiling a stage needs to know before anything is loaded."""

    model: Decoder
    params: Params  # abstract
    devices: Sequence[jax.Device]
    store: ExecutableStore | None

    def executables(self, plan: EnginePlan, max_logprobs: int) -> Executables[Key]:
        programs = make_programs(self.model, plan, self.params, max_logprobs, self.devices[0])
        return Executables(programs, self.store)

    def keys(self, plan: EnginePlan) -> list[Key]:
        return all_keys(self.model, plan.buckets, plan.shapes.input_sizes(plan.buckets))

    def first_keys(self, plan: EnginePlan, *, eager: bool) -> list[Key]:
        """The largest step, and beside it, where there is time, all that knows no pool."""
        others = [] if eager else self.keys(plan)
        largest = largest_keys(self.model, plan.buckets)
        return [*largest, *(key for key in others if not isinstance(key, Forward))]


@dataclass(frozen=True)
class StartUp:
    """An engine in the making: one stage, or those of a pipeline."""

    config: EngineConfig
    stages: Sequence[StageStart]
    group: Group | None = None  # hosts that are all sized alike

    def size_pool(
        self, plan: EnginePlan, stats: Sequence[dict[str, int] | None], loading: Future[Any]
    ) -> tuple[EnginePlan, list[Executables[Key]]]:
        """Give the pool what memory is left beside weights and the largest step.

        Args:
            stats: of each stage's scarcest device; None: it does not tell.

        Returns:
            The plan with its pages, and the executables of each stage: some may be compiled.
        """
        config = self.config
        max_logprobs = config.max_logprobs
        # The temporaries do not depend on the pool, so a small one will do to measure them.
        small = replace(plan, kv=replace(plan.kv, num_pages=PROBE_PAGES))
        probes = [stage.executables(small, max_logprobs) for stage in self.stages]
        measured = config.kv_cache_memory_bytes is None and config.num_gpu_blocks_override is None
        measured = measured and None not in stats
        if measured:
            wanted = {
                probe: stage.first_keys(plan, eager=config.enforce_eager)
                for probe, stage in zip(probes, self.stages, strict=True)
            }
            compile_together(wanted, after=loading)
        budgets = [
            self._page_budget(plan, stage, probe if measured else None, stage_stats)
            for stage, probe, stage_stats in zip(self.stages, probes, stats, strict=True)
        ]
        if self.group is not None:
            budgets = [self.group.minimum(budget) for budget in budgets]
        plan = plan.with_pages(config, *budgets)
        executables = [stage.executables(plan, max_logprobs) for stage in self.stages]
        for own, probe in zip(executables, probes, strict=True):
            own.adopt(probe)
        return plan, executables

    def _page_budget(
        self,
        plan: EnginePlan,
        stage: StageStart,
        probe: Executables[Key] | None,
        stats: dict[str, int] | None,
    ) -> int:
        """Bytes for pages on a device of a stage, beside what `probe` measures."""
        temporary = resident = 0
        if probe is not None:
            largest = largest_keys(stage.model, plan.buckets)
            temporary = max(probe.temporary_bytes(key) for key in largest)
            states = abstract_states(stage.model, plan, stage.devices[0])
            resident = resident_bytes((stage.params, states))
        return page_budget(
            kv_cache_memory_bytes=self.config.kv_cache_memory_bytes,
            gpu_memory_utilization=self.config.gpu_memory_utilization,
            stats=stats,
            resident_bytes=resident,
            step_temporary_bytes=temporary,
            step_input_bytes=4 * plan.shapes.input_sizes(plan.buckets)[-1],
        )

    def runner(
        self, plan: EnginePlan, params: Sequence[Params], executables: Sequence[Executables[Key]]
    ) -> ModelRunner:
        """A runner of stages that have computed nothing."""
        followers = None
        if self.group is not None and self.group.leads:
            followers = CommandSender(self.group, self.stages[0].keys(plan))
        stages = [
            Stage(stage.model, own_params, plan, own, stage.devices[0], followers)
            for stage, own_params, own in zip(self.stages, params, executables, strict=True)
        ]
        return ModelRunner(stages, plan)
