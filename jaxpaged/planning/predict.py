"""From a model and GPUs to what they would do: whether it fits, and how a trace would be served."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from jaxpaged.config import GIB, EngineConfig
from jaxpaged.models.spec import ModelSpec
from jaxpaged.planning.cost_model import CostModel
from jaxpaged.planning.footprint import Layout, Memory, memory
from jaxpaged.planning.hardware import GPU, Calibration, parse_gpus
from jaxpaged.planning.lengths import Lengths, fixed, poisson_arrivals, sharegpt
from jaxpaged.planning.options import PlanOptions
from jaxpaged.planning.simulate import Replica, make_trace, simulate
from jaxpaged.runtime.plan import EnginePlan
from jaxpaged.runtime.startup import check_card

PERCENTILES = (50, 90, 99)
MOST_GPUS = 64  # in the search for a number that fits


@dataclass(frozen=True)
class Smallest:
    """The fewest GPUs on which a model fits."""

    tp: int
    pp: int

    @property
    def gpus(self) -> int:
        return self.tp * self.pp


@dataclass(frozen=True)
class Served:
    """How the trace was served."""

    seconds: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    latency_ms: dict[str, dict[int, float]]  # TTFT, ITL, TPOT and E2E by percentile
    steps: int
    preemptions: int
    prefix_cache_hits: int  # tokens
    mean_batch: float  # sequences a step
    shares: dict[str, float]  # of the GPUs' time, by what bounds it; the largest first


@dataclass(frozen=True)
class Prediction:
    """What is to be expected of a model on some GPUs."""

    gpu: GPU
    num_gpus: int
    parallel: tuple[int, int, int]  # tp, pp, dp: as asked, or the fewest GPUs that fit
    calibration: Calibration
    memory: Memory
    plan: EnginePlan  # with its pages, if it fits
    problem: str | None  # why it does not fit
    smallest: Smallest | None  # looked for if it does not
    served: Served | None  # if it fits
    advised_seqs: int  # for --max-num-seqs

    @property
    def num_hosts(self) -> int:
        """Hosts that run one model together: as asked, or of the fewest GPUs that fit."""
        return num_hosts(self.gpu, self.parallel[0])

    @property
    def fits(self) -> bool:
        return self.problem is None

    @property
    def can_run(self) -> bool:
        """Whether there is a layout to run, asked for or not."""
        return self.fits or self.smallest is not None


def num_hosts(gpu: GPU, tp: int) -> int:
    """Hosts that run one model together, if each is full of such GPUs."""
    return -(-tp // gpu.per_host)


def predict(spec: ModelSpec, config: EngineConfig, options: PlanOptions) -> Prediction:
    """Lay the model out, size its pool, and serve the trace.

    Raises:
        ValueError: settings that contradict the model, the GPUs or each other; one line.
    """
    gpu, count = parse_gpus(options.gpus)
    tp, pp, dp = options.parallel
    if tp * pp * dp > count:
        raise ValueError(
            f"--tp {tp} x --pp {pp} x --dp {dp} needs {tp * pp * dp} GPUs, --gpus {options.gpus} "
            f"has {count}"
        )
    check_hosts(gpu, tp, pp, dp)
    check_card(spec, gpu.compute_capability)
    if options.calibration is None:
        calibration = Calibration.of(gpu)
    else:
        calibration = Calibration.load(Path(options.calibration))
    layout = Layout.of(spec, config, tp, pp)
    taken, plan, problem = fit(gpu, config, layout)
    smallest = served = None
    parallel = options.parallel
    advised = plan.max_num_seqs
    if problem is not None:
        smallest = next(fitting(gpu, config, spec), None)
        if smallest is not None:
            most = min(gpu.per_host, count) // smallest.gpus  # that share a host
            replicas = max(1, min(dp, most))
            parallel = smallest.tp, smallest.pp, replicas
    else:
        lengths = trace_lengths(options)
        longest = max(item.prompt + item.output for item in lengths)
        if longest > plan.max_model_len:
            raise ValueError(
                f"the longest request of --trace {options.trace} has {longest} tokens, more than "
                f"--max-model-len {plan.max_model_len}"
            )
        arrivals = poisson_arrivals(len(lengths), options.rate, options.seed)
        trace = make_trace(lengths, arrivals, plan.vocab, options.shared_prefix, options.seed)
        cost = CostModel(gpu, calibration, layout, plan.kv.dtype.itemsize)
        limits = dataclasses.replace(plan.scheduler_config(config), num_stages=layout.pp)
        served = summary(simulate(limits, plan, cost, trace, dp), lengths)
        if served.preemptions:
            room = (plan.kv.num_pages - 1) * plan.kv.page_size
            advised = max(1, min(advised, int(room // longest)))
    return Prediction(
        gpu, count, parallel, calibration, taken, plan, problem, smallest, served, advised
    )  # fmt: skip


def check_hosts(gpu: GPU, tp: int, pp: int, dp: int) -> None:
    """Whether `jaxpaged serve` can spread a model so over hosts that are full of such GPUs.

    Raises:
        ValueError: it can't; one line.
    """
    most, hosts = gpu.per_host, num_hosts(gpu, tp)
    if pp > 1 and tp * pp > most:
        raise ValueError(
            f"--tp {tp} x --pp {pp} needs {tp * pp} GPUs of one host, which has {most} {gpu.name}: "
            f"--pp stays within a host; --tp {tp * pp} alone runs on several, with --num-hosts"
        )
    if dp > 1 and hosts > 1:
        raise ValueError(
            f"--dp {dp} goes with one host, and --tp {tp} needs {hosts} of {most} {gpu.name} each: "
            "--num-hosts runs one engine; plan it without --dp"
        )
    if dp > 1 and tp * pp * dp > most:
        raise ValueError(
            f"--dp {dp} needs {tp * pp * dp} GPUs of one host, which has {most} {gpu.name}: at "
            f"most --dp {most // (tp * pp)} there; Ray Serve runs replicas on several hosts "
            "(docs/parallelism.md)"
        )
    if tp % hosts:
        raise ValueError(
            f"--tp {tp} needs {hosts} hosts of {most} {gpu.name}, and --num-hosts {hosts} as many "
            f"GPUs of each: a multiple of {hosts}"
        )


def fit(gpu: GPU, config: EngineConfig, layout: Layout) -> tuple[Memory, EnginePlan, str | None]:
    """Where the scarcest GPU's memory goes, the plan with its pages, what is wrong if none fit.

    Raises:
        ValueError: settings that contradict the model or each other.
    """
    plan = layout.plan(config)
    stages = memory(gpu, config, layout, plan)
    taken = min(stages, key=lambda stage: stage.left)
    if taken.left <= 0:
        problem = (
            f"{-taken.left / GIB:.2f} GiB too much before the first page: more of --tp or --pp, "
            f"--quantization, --cpu-offload-gb, a higher --gpu-memory-utilization or a lower "
            f"--max-num-batched-tokens would help"
        )
        return taken, plan, problem
    try:
        return taken, plan.with_pages(config, *(stage.left for stage in stages)), None
    except ValueError as error:
        return taken, plan, str(error)


def fitting(gpu: GPU, config: EngineConfig, spec: ModelSpec) -> Iterator[Smallest]:
    """Layouts that fit and can be run, those of fewest GPUs first, and of these the one with fewest
    stages.
    """
    layouts = []
    for tp in (1 << n for n in range(MOST_GPUS.bit_length())):
        try:
            layouts.append(Layout.of(spec, config, tp, 1))
        except ValueError:
            continue  # it does not divide so
    many = [
        dataclasses.replace(layout, pp=pp)
        for layout in layouts
        for pp in range(1, max(1, min(len(spec.layers), gpu.per_host // layout.tp)) + 1)
    ]
    for layout in sorted(many, key=lambda layout: (layout.tp * layout.pp, layout.pp)):
        try:
            problem = fit(gpu, config, layout)[2]
        except ValueError:
            continue  # a stage's layers hold less than is to be offloaded
        if problem is None:
            yield Smallest(layout.tp, layout.pp)


def trace_lengths(options: PlanOptions) -> list[Lengths]:
    """Lengths of all requests."""
    if options.fixed_lengths is None:
        return sharegpt(options.requests, options.seed)
    return fixed(options.requests, *options.fixed_lengths)


def summary(replicas: list[Replica], lengths: list[Lengths]) -> Served:
    """Figures of all replicas together."""
    records = [record for replica in replicas for record in replica.records.values()]
    end = max(record.tokens[-1] for record in records)
    seconds = end - min(record.arrived for record in records)
    outputs = sum(len(record.tokens) for record in records)
    kinds = {kind for replica in replicas for kind in replica.spent}
    spent = {kind: sum(replica.spent[kind] for replica in replicas) for kind in kinds}
    steps = sum(replica.num_steps for replica in replicas)
    latencies = {
        "TTFT": [record.tokens[0] - record.arrived for record in records],
        "ITL": [b - a for record in records for a, b in pairwise(record.tokens)] or [0.0],
        "TPOT": [mean_gap(record.tokens) for record in records],
        "E2E": [record.tokens[-1] - record.arrived for record in records],
    }
    return Served(
        seconds=seconds,
        output_tokens_per_second=outputs / seconds,
        total_tokens_per_second=(outputs + sum(item.prompt for item in lengths)) / seconds,
        latency_ms={
            name: dict(
                zip(PERCENTILES, (1e3 * np.percentile(values, PERCENTILES)).tolist(), strict=True)
            )
            for name, values in latencies.items()
        },
        steps=steps,
        preemptions=sum(replica.scheduler.num_preemptions for replica in replicas),
        prefix_cache_hits=sum(replica.scheduler.prefix_cache_hits for replica in replicas),
        mean_batch=sum(replica.num_sequences for replica in replicas) / steps,
        shares={
            kind: spent[kind] / sum(spent.values())
            for kind in sorted(spent, key=lambda kind: (-spent[kind], kind))
        },
    )


def mean_gap(tokens: list[float]) -> float:
    """Seconds from a token to the next, on average."""
    return (tokens[-1] - tokens[0]) / max(len(tokens) - 1, 1)
