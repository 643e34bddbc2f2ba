"""Tells a prediction: as text for people, as JSON for programs."""

from __future__ import annotations

import math
import shlex
from typing import Any

from jaxpaged.config import GIB, EngineConfig
from jaxpaged.planning.options import PlanOptions
from jaxpaged.planning.predict import Prediction, Served


def flags(model: str, config: EngineConfig, found: Prediction) -> list[str]:
    """The command that serves the model as planned, on as many GPUs as it takes; of several hosts
    that of the first.
    """
    command = ["jaxpaged", "serve", model]
    for flag, count in zip(("-tp", "-pp", "-dp"), found.parallel, strict=True):
        command += [flag, str(count)] if count > 1 else []
    if found.num_hosts > 1:
        command += ["--num-hosts", str(found.num_hosts), "--host-id", "0"]
        command += ["--distributed-coordinator", "HOST0:9100"]
    if config.max_model_len is not None:
        command += ["--max-model-len", str(found.plan.max_model_len)]
    command += ["--max-num-seqs", str(found.advised_seqs)]
    command += ["--max-num-batched-tokens", str(found.plan.max_num_batched_tokens)]
    for name, value, default in (
        ("--gpu-memory-utilization", config.gpu_memory_utilization, 0.92),
        ("--cpu-offload-gb", config.cpu_offload_gb, 0.0),
        ("--dtype", config.dtype, "auto"),
        ("--quantization", config.quantization, None),
        ("--kv-cache-dtype", config.kv_cache_dtype, "auto"),
        ("--block-size", config.block_size, 16),
        ("--num-gpu-blocks-override", config.num_gpu_blocks_override, None),
        ("--long-prefill-token-threshold", config.long_prefill_token_threshold, 0),
        ("--revision", config.revision, None),
        ("--download-dir", config.download_dir, None),
    ):
        command += [name, str(value)] if value != default else []
    for name, value, default in (
        ("quantize-lm-head", config.quantize_lm_head, False),
        ("enable-prefix-caching", config.enable_prefix_caching, True),
        ("enable-chunked-prefill", config.enable_chunked_prefill, True),
    ):
        command += [f"--{name}" if value else f"--no-{name}"] if value != default else []
    return command


def as_json(
    model: str, config: EngineConfig, options: PlanOptions, found: Prediction
) -> dict[str, Any]:
    """All figures; sizes in bytes, times in the unit that their names tell."""
    plan, taken = found.plan, found.memory
    pool = None
    if found.fits:
        num_pages = plan.kv.num_pages - 1
        pool = {
            "pages": num_pages,
            "tokens": num_pages * plan.kv.page_size // len(plan.kv.groups),
            "page_bytes": max(plan.kv.part(layers).page_bytes for layers in plan.stages),
            "concurrency_at_full_length": concurrency(config, found),
        }
    smallest = found.smallest
    tp, pp, dp = options.parallel
    return {
        "model": model,
        "gpu": found.gpu.name,
        "gpus": found.num_gpus,
        "gpus_used": tp * pp * dp,
        "tp": tp,
        "pp": pp,
        "dp": dp,
        "calibrated_on": found.calibration.gpu,
        "fits": found.fits,
        "problem": found.problem,
        "smallest": smallest and {"tp": smallest.tp, "pp": smallest.pp, "gpus": smallest.gpus},
        "bytes_per_gpu": {
            "limit": taken.limit,
            "weights": taken.weights,
            "state": taken.state,
            "temporaries": taken.temporaries,
            "margin": taken.margin,
            "left_for_pages": taken.left,
        },
        "max_model_len": plan.max_model_len,
        "pool": pool,
        "trace": {
            "lengths": options.trace,
            "rate": "inf" if math.isinf(options.rate) else options.rate,
            "requests": options.requests,
            "shared_prefix": options.shared_prefix,
        },
        "predicted": None if found.served is None else _served(found.served),
        "command": shlex.join(flags(model, config, found)) if found.can_run else None,
        "notes": notes(found),
    }


def concurrency(config: EngineConfig, found: Prediction) -> float:
    """Sequences of the greatest length that the pool holds."""
    plan = found.plan
    return (plan.kv.num_pages - 1) / plan.needs(config).pages(plan.max_model_len)


def _served(served: Served) -> dict[str, Any]:
    latencies = {
        f"{name.lower()}_ms": {f"p{p}": value for p, value in values.items()}
        for name, values in served.latency_ms.items()
    }
    return {
        "seconds": served.seconds,
        "output_tokens_per_second": served.output_tokens_per_second,
        "total_tokens_per_second": served.total_tokens_per_second,
        **latencies,
        "steps": served.steps,
        "mean_batch": served.mean_batch,
        "preemptions": served.preemptions,
        "prefix_cache_hits": served.prefix_cache_hits,
        "bound": next(iter(served.shares)),
        "time_shares": served.shares,
    }


def as_text(model: str, config: EngineConfig, options: PlanOptions, found: Prediction) -> str:
    """A page for people."""
    gpu, taken, plan = found.gpu, found.memory, found.plan
    tp, pp, dp = options.parallel
    used = tp * pp * dp
    lines = [
        f"on {used} x {gpu.name}: tensor parallel {tp}, pipeline {pp}, replicas {dp}",
        f"{'fits' if found.fits else 'does not fit'}, in GiB on each GPU:",
        *(
            f"  {name:<36}{size / GIB:8.2f}"
            for name, size in (
                (f"limit ({config.gpu_memory_utilization:g} of the card)", taken.limit),
                ("weights", taken.weights),
                ("state, inputs", taken.state),
                ("temporaries of the largest step", taken.temporaries),
                ("margin", taken.margin),
                ("left for KV pages", taken.left),
            )
        ),
    ]
    if used < found.num_gpus:
        lines.insert(1, f"{found.num_gpus - used} of {found.num_gpus} GPUs are not used")
    if not found.fits:
        lines += _misfit(found)
    if found.served is not None:
        num_pages = plan.kv.num_pages - 1
        tokens = num_pages * plan.kv.page_size // len(plan.kv.groups)
        lines += [
            f"pool: {num_pages:,} pages, {tokens:,} tokens, {concurrency(config, found):.1f} "
            f"sequences of {plan.max_model_len:,} tokens at once",
            "",
            *_told(options, found.served),
        ]
    lines.append("")
    if found.can_run:
        lines.append(f"to run it: {shlex.join(flags(model, config, found))}")
    return "\n".join([*lines, *notes(found)])


def _misfit(found: Prediction) -> list[str]:
    why, smallest = f"why not: {found.problem}", found.smallest
    if smallest is None:
        return [why, f"nor does it on any number of {found.gpu.name} that was tried"]
    return [
        why,
        f"smallest that fits: {smallest.gpus} x {found.gpu.name}, -tp {smallest.tp} "
        f"-pp {smallest.pp}" + (f" --num-hosts {found.num_hosts}" * (found.num_hosts > 1)),
    ]


def _told(options: PlanOptions, served: Served) -> list[str]:
    rate = "at once" if math.isinf(options.rate) else f"at {options.rate:g} a second"
    shares = ", ".join(f"{name} {share:.0%}" for name, share in served.shares.items())
    return [
        f"{options.requests} requests, {options.trace}, {rate}: {served.seconds:.2f} s",
        f"  tokens a second: {served.output_tokens_per_second:,.0f} put out, "
        f"{served.total_tokens_per_second:,.0f} with prompts",
        *(
            f"  {name}, ms: " + ", ".join(f"p{p} {value:,.1f}" for p, value in values.items())
            for name, values in served.latency_ms.items()
        ),
        f"  {served.steps:,} steps of {served.mean_batch:.1f} sequences, "
        f"{served.preemptions} preemptions, {served.prefix_cache_hits:,} tokens from the prefix "
        f"cache",
        f"  bound by {next(iter(served.shares))}: {shares}",
    ]


def notes(found: Prediction) -> list[str]:
    """What to know of the command and the figures, a line each."""
    lines = []
    if found.can_run and found.num_hosts > 1:
        lines += [
            "HOST0 is the first host's address; each other host runs the same with its own "
            "--host-id",
            "collectives between hosts were not measured: they are reckoned as those within one, "
            "so the engine will be slower than told",
        ]
    if found.can_run and found.parallel[1] > 1:
        lines.append(
            "stages are taken to overlap: those of an 8B model were measured not to, and of a 32B "
            "model to (docs/planning.md)"
        )
    return [*lines, _source(found)]


def _source(found: Prediction) -> str:
    if found.calibration.gpu == found.gpu.name:
        return f"calibrated with runs on {found.gpu.name}; how well: docs/planning.md"
    return (
        f"not calibrated: {found.gpu.name} was not measured, the shares of its peaks that are "
        f"reached are those of {found.calibration.gpu}"
    )
