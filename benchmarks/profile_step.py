"""What one decode step is made of: kernels, their busy time, and the device's idle time.

    python -m benchmarks.profile_step --model benchmarks/models/qwen3-0.6b.json --batch 1 64

Traces `LLM.generate` calls on random weights (as `decode_latency` times them) with JAX's profiler
and reads the trace of the device: kernels a step by name, and the time in which none ran. On a GPU
the trace slows steps down a little; `decode_latency` tells how long they take without it.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks.common import write_results
from benchmarks.decode_latency import dummy_llm, seconds
from benchmarks.engine_flags import add_engine_flags, engine_settings
from jaxpaged import LLM

SHOWN = 24  # kernels listed, those with the most time first


class Kernel(NamedTuple):
    """One execution of a kernel on the device."""

    name: str
    start_ns: float
    end_ns: float


def device_kernels(trace: Path) -> Iterator[Kernel]:
    """Everything that ran on the first GPU's streams, copies included."""
    (file,) = trace.rglob("*.xplane.pb")
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        if plane.name.startswith("/device:GPU:0"):
            for line in plane.lines:
                if line.name.startswith("Stream"):
                    for event in line.events:
                        yield Kernel(event.name, event.start_ns, event.end_ns)


def trace_step(llm: LLM, prompts: list[list[int]], steps: int, layers: int) -> dict[str, Any]:
    """Trace 1 + `steps` tokens a prompt and take the first one's kernels off."""
    kernels: list[list[Kernel]] = []
    for count in (1, 1 + steps):
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                seconds(llm, prompts, count)
            kernels.append(sorted(device_kernels(Path(folder)), key=lambda k: k.start_ns))
    first, all_steps = kernels
    names: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for sign, part in ((-1, first), (1, all_steps)):
        for kernel in part:
            entry = names[kind(kernel.name)]
            entry[0] += sign / steps
            entry[1] += sign * (kernel.end_ns - kernel.start_ns) / 1e3 / steps
    number = (len(all_steps) - len(first)) / steps
    busy_us = sum(us for _, us in names.values())
    decode = all_steps[len(first) :]
    span_us = (decode[-1].end_ns - decode[0].start_ns) / 1e3 / steps
    return {
        "kernels": round(number, 1),
        "kernels_per_layer": round(number / layers, 1),
        "busy_us": round(busy_us, 1),
        "busy_us_per_layer": round(busy_us / layers, 1),
        "span_us": round(span_us, 1),
        "by_name": [
            {"name": name, "count": round(times, 1), "us": round(us, 1)}
            for name, (times, us) in sorted(names.items(), key=lambda item: -item[1][1])[:SHOWN]
        ],
    }


def kind(name: str) -> str:
    """A kernel's name without the number that XLA gave this instance of it."""
    return re.sub(r"([._]\d+)+$", "", name)[:80]


def main() -> None:
    """Trace, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a config.json")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each prompt")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--dtype", default="auto")
    add_engine_flags(parser)
    parser.add_argument("--name", help="of the file in benchmarks/results")
    args = parser.parse_args()
    settings = engine_settings(args)
    if args.name is None and settings != engine_settings(parser.parse_args(["--model", "x"])):
        parser.error(
            "an engine of other settings wants a --name: the planner is fitted to the rest"
        )
    largest = max(args.batch)
    with dummy_llm(args.model, args.context, args.steps, largest, args.dtype, **settings) as llm:
        layers = json.loads(args.model.read_text())["num_hidden_layers"]
        draw = np.random.default_rng(0)
        traced, rows = [], []
        for size in args.batch:
            prompts = draw.integers(0, llm.info.vocab_size, (size, args.context)).tolist()
            for count in (1, 1 + args.steps, 1 + args.steps):
                seconds(llm, prompts, count)  # compiles, fills the prefix cache
            step = {"batch": size, **trace_step(llm, prompts, args.steps, layers)}
            traced.append(step)
            rows.append({key: value for key, value in step.items() if key != "by_name"})
            print(
                f"batch {size}: {step['kernels']} kernels, {step['kernels_per_layer']} a layer, "
                f"busy {step['busy_us']} of {step['span_us']} us"
            )
            for entry in step["by_name"]:
                print(f"  {entry['count']:7.1f} x {entry['name']:60} {entry['us']:9.1f} us")
        write_results(
            args.name or f"profile_step_{args.model.stem}",
            {
                "model": args.model.stem,
                "attention_backend": llm.info.attention_backend,
                **settings,
                "context": args.context,
                "steps": traced,
                "rows": rows,
            },
        )


if __name__ == "__main__":
    main()
