"""Measured settings, and what `jaxpaged plan` expects of them: for `calibrate` and `plan_accuracy`.

A result file is understood if it is one of `decode_latency`, `offline_throughput`, `engines` or
`serving` on a card that the planner knows. Settings that a file does not spell out stand in its
command.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import RESULTS
from benchmarks.engines import CONTEXT, MODEL_LEN, OUTPUT, PROMPT, REQUESTS, STEPS
from jaxpaged.config import EngineConfig
from jaxpaged.models import load_spec
from jaxpaged.planning.cost_model import CostModel
from jaxpaged.planning.footprint import Layout
from jaxpaged.planning.hardware import GPUS, Calibration
from jaxpaged.planning.lengths import MAX_TOTAL, Lengths, fixed, poisson_arrivals, sharegpt
from jaxpaged.planning.predict import fit, summary
from jaxpaged.planning.simulate import Replica, make_trace, simulate

MODELS = Path(__file__).parent / "models"
PARALLEL = {
    "tp": ("tensor_parallel_size", "-tp"),
    "pp": ("pipeline_parallel_size", "-pp"),
    "dp": ("data_parallel_size", "-dp"),
}
# Settings that a result file names.
STORED = ("quantization", "quantize_lm_head", "kv_cache_dtype", "cpu_offload_gb")
SERVING = ("output tok/s", "TTFT p50", "TPOT p50", "E2E p50")  # figures to compare


@dataclass(frozen=True)
class Setting:
    """One measured run of an engine, and how to plan it."""

    file: str
    what: str
    gpu: str
    model: str
    dtype: str
    stored: dict[str, Any]
    tp: int
    pp: int
    dp: int
    limits: dict[str, Any]  # of the engine
    lengths: list[Lengths]
    measured: dict[str, float]
    fastest: float | None = None  # seconds of the repeats that nothing disturbed, if known
    rate: float = float("inf")
    seed: int = 0

    @property
    def name(self) -> str:
        return f"{self.file}: {self.what}"

    @property
    def is_decode(self) -> bool:
        return "step ms" in self.measured

    @cached_property
    def config(self) -> EngineConfig:
        return EngineConfig(dtype=self.dtype, **self.stored, **self.limits)

    @cached_property
    def layout(self) -> Layout:
        spec = load_spec(
            json.loads((MODELS / f"{self.model}.json").read_text()),
            self.config.quantization,
            self.config.quantize_lm_head,
        )
        return Layout.of(spec, self.config, self.tp, self.pp)

    def cost_model(self, calibration: Calibration) -> CostModel:
        """Its prices."""
        itemsize = self.layout.plan(self.config).kv.dtype.itemsize
        return CostModel(GPUS[self.gpu], calibration, self.layout, itemsize)

    def plan(self, cost: CostModel) -> dict[str, float]:
        """What is expected of the figures that were measured.

        Raises:
            ValueError: the model does not fit, though it ran.
        """
        _, plan, problem = fit(GPUS[self.gpu], self.config, self.layout)
        if problem is not None:
            raise ValueError(f"{self.name}: {problem}")
        limits = plan.scheduler_config(self.config)
        if self.is_decode:
            return {"step ms": decode_step_ms(Replica(limits, plan, cost), self.lengths)}
        arrivals = poisson_arrivals(len(self.lengths), self.rate, self.seed)
        trace = make_trace(self.lengths, arrivals, plan.vocab)
        served = summary(simulate(limits, plan, cost, trace, self.dp), self.lengths)
        figures = {"output tok/s": served.output_tokens_per_second}
        for name, values in served.latency_ms.items():
            figures |= {f"{name} p{p}": value for p, value in values.items()}
        return {name: figures[name] for name in self.measured}


def decode_step_ms(replica: Replica, lengths: list[Lengths]) -> float:
    """(T(1 + K) - T(1)) / K of prompts that are in the prefix cache, as `decode_latency` does."""
    seconds = []
    most = lengths[0].output
    for number, outputs in enumerate((1, 1, most)):  # the first fills the cache
        begin = replica.now
        short = [Lengths(item.prompt, outputs) for item in lengths]
        for arrival in make_trace(short, [begin] * len(short), vocab=1 << 15):
            again = dataclasses.replace(
                arrival.request, request_id=f"{number} {arrival.request.request_id}"
            )
            replica.add(dataclasses.replace(arrival, request=again))
        replica.run()
        seconds.append(replica.now - begin)
    return 1e3 * (seconds[2] - seconds[1]) / (most - 1)


def measured_settings(folder: Path = RESULTS) -> Iterator[Setting]:
    """Every setting of every result file that is understood, but for those of code that is gone,
    which docs still name.
    """
    for path in sorted(folder.glob("*.json")):
        if path.stem.endswith("_earlier"):
            continue
        read = next((read for kind, read in READERS.items() if path.stem.startswith(kind)), None)
        content = json.loads(path.read_text())
        card = (content.get("card") or "").removeprefix("NVIDIA ").split(" ")[0]
        if read is None or card not in GPUS or not (MODELS / f"{content['model']}.json").exists():
            continue
        flags = shlex.split(content["command"])
        known = {
            "file": path.stem,
            "gpu": card,
            "model": content["model"],
            "dtype": content.get("dtype", "auto"),
            "stored": stored(content),
            **parallel(content, flags),
        }
        for setting in read(content, flags):
            yield Setting(**(known | setting))


def parallel(content: dict[str, Any], flags: list[str]) -> dict[str, int]:
    """How many devices share the work: by a file, or by the flags of its command."""
    return {
        name: int(content.get(field) or value(flags, flag, value(flags, f"--{field}", 1)))
        for name, (field, flag) in PARALLEL.items()
    }


def stored(content: dict[str, Any]) -> dict[str, Any]:
    """How weights and pages are stored, by a file."""
    return {name: content[name] for name in STORED if name in content}


def value(flags: list[str], flag: str, default: Any) -> Any:
    """What stands after a flag where it is named last, of the default's type."""
    flag = flag.replace("_", "-")
    if flag not in flags:
        return default
    return type(default)(flags[len(flags) - flags[::-1].index(flag)])


def engine_limits(flags: list[str], longest: int, tokens: int) -> dict[str, Any]:
    """Limits that a command named, or those that stand for them."""
    return {
        "max_model_len": value(flags, "--max-model-len", longest),
        "max_num_seqs": value(flags, "--max-num-seqs", 256),
        "max_num_batched_tokens": value(flags, "--max-num-batched-tokens", tokens),
    }


def lengths_of(flags: list[str], requests: int, default: tuple[int, int], seed: int) -> Any:
    """The requests of a command of `offline_throughput` or `serving`, and the longest."""
    if value(flags, "--lengths", "fixed") == "sharegpt":
        return sharegpt(requests, seed), MAX_TOTAL
    prompt = value(flags, "--input-len", default[0])
    output = value(flags, "--output-len", default[1])
    return fixed(requests, prompt, output), prompt + output


def _decode(content: dict[str, Any], flags: list[str]) -> Iterator[dict[str, Any]]:
    steps, context = value(flags, "--steps", 32), content["context"]
    batches = [row["batch"] for row in content["rows"]]
    if "--serving" in flags:
        limits = engine_limits([], 2048, 8192)
    else:
        most = max(batches)
        limits = engine_limits([], context + 2 * steps, max(2048, most)) | {"max_num_seqs": most}
    for row, run in zip(content["rows"], content["runs"], strict=True):
        if "seconds" in run:
            short, long = (min(taken) for taken in run["seconds"].values())
            fastest = long - short
        else:
            fastest = 1e-3 * steps * min(run["step_ms"])
        yield {
            "fastest": fastest,
            "what": f"decode step, B {row['batch']}, context {context}",
            "limits": limits,
            "lengths": fixed(row["batch"], context, 1 + steps),
            "measured": {"step ms": row["step ms"]},
        }


def _offline(content: dict[str, Any], flags: list[str]) -> Iterator[dict[str, Any]]:
    row, seed = content["rows"][0], value(flags, "--seed", 0)
    lengths, longest = lengths_of(flags, value(flags, "--requests", 256), (512, 128), seed)
    yield {
        "what": f"offline, {row['requests']}",
        "limits": engine_limits(flags, longest, 16384),
        "lengths": lengths,
        "measured": {"output tok/s": row["output tok/s"]},
        "fastest": min(run["seconds"] for run in content["runs"]),
        "seed": seed,
    }


def _engines(content: dict[str, Any], flags: list[str]) -> Iterator[dict[str, Any]]:
    for engine in content["engines"]:
        known = {"stored": stored(engine), "dtype": engine["dtype"], **parallel(engine, [])}
        known["limits"] = engine_limits([], MODEL_LEN, 8192)
        name = f" {engine['flags']}" if engine["flags"] else ""
        for step in engine["steps"]:
            short, long = (min(taken) for taken in step["seconds"].values())
            yield known | {
                "what": f"decode step{name}, B {step['batch']}, context {CONTEXT}",
                "lengths": fixed(step["batch"], CONTEXT, 1 + STEPS),
                "measured": {"step ms": step["step ms"]},
                "fastest": long - short,
            }
        if engine["calls"]:
            seconds = [call["seconds"] for call in engine["calls"]]
            yield known | {
                "what": f"offline{name}, {REQUESTS} x {PROMPT}/{OUTPUT}",
                "lengths": fixed(REQUESTS, PROMPT, OUTPUT),
                "measured": {"output tok/s": REQUESTS * OUTPUT / median(seconds)},
                "fastest": min(seconds),
            }


def _serving(content: dict[str, Any], flags: list[str]) -> Iterator[dict[str, Any]]:
    for place, row in enumerate(content["rows"]):
        seed = value(flags, "--seed", 0) + place
        lengths, longest = lengths_of(flags, row["requests"], (128, 64), seed)
        yield {
            "what": f"serving {content['lengths']}, {row['rate']} requests a second",
            "limits": engine_limits(flags, longest, 8192),
            "lengths": lengths,
            "measured": {name: row[name] for name in SERVING},
            "rate": float(row["rate"]),
            "seed": seed,
        }


READERS: dict[str, Callable[[dict[str, Any], list[str]], Iterator[dict[str, Any]]]] = {
    "decode_latency": _decode,
    "offline_throughput": _offline,
    "engines": _engines,
    "serving": _serving,
}
