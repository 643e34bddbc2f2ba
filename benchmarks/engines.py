"""Steps, throughput and memory of one shape under several settings of the engine.

    python -m benchmarks.engines --model benchmarks/models/qwen2.5-7b.json \\
        --engine="" --engine="-q fp8_per_channel --kv-cache-dtype fp8" --engine="-tp 2"

Each `--engine` names flags of `jaxpaged serve` and gets an engine of its own, one after the other:
decode steps as `decode_latency` takes them, then calls as `offline_throughput` makes them. Weights
are random, every executable is compiled ahead.
"""

from __future__ import annotations

import argparse
import gc
import shlex
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.common import markdown, write_results
from benchmarks.decode_latency import SERVING, SERVING_SEQS, dummy_llm, step_times
from benchmarks.engine_flags import add_engine_flags, engine_settings, memory_figures
from benchmarks.offline_throughput import StepCounter, measure
from jaxpaged.planning.lengths import fixed

CONTEXT, STEPS = 1024, 32
MODEL_LEN = 32768  # as a chat is served: the pool takes all that is left
REQUESTS, PROMPT, OUTPUT = 256, 512, 128


def run(args: argparse.Namespace, flags: str) -> dict[str, Any]:
    """All figures of an engine."""
    parser = argparse.ArgumentParser(prog="--engine")
    add_engine_flags(parser)
    settings = engine_settings(parser.parse_args(shlex.split(flags)))
    limits = SERVING | {"max_model_len": MODEL_LEN, "compile_cache_dir": args.compile_cache_dir}
    draw = np.random.default_rng(0)
    with dummy_llm(args.model, CONTEXT, STEPS, SERVING_SEQS, **limits, **settings) as llm:
        found = {
            "flags": flags,
            "dtype": llm.info.dtype,
            "lm_head_dtype": llm.info.lm_head_dtype,
            **settings,
            **memory_figures(llm),
            "ready_seconds": llm.info.startup_seconds["total"],
            "startup_seconds": llm.info.startup_seconds,
        }
        steps = []
        for size in args.batch:
            prompts = draw.integers(0, llm.info.vocab_size, (size, CONTEXT)).tolist()
            taken = step_times(llm, prompts, STEPS, args.repeats)
            short, long = map(median, taken.values())
            steps.append({"batch": size, "step ms": 1e3 * (long - short) / STEPS, "seconds": taken})
        calls = []
        if args.calls:
            lengths, counter = fixed(REQUESTS, PROMPT, OUTPUT), StepCounter(llm._core)
            calls = [measure(llm, lengths, draw, counter) for _ in range(1 + args.calls)]
    return found | {"steps": steps, "calls": calls[1:]}  # the first call warms up


def row(found: dict[str, Any]) -> dict[str, Any]:
    """Its line of the table."""
    steps = {f"B {step['batch']}, ms": step["step ms"] for step in found["steps"]}
    seconds = [call["seconds"] for call in found["calls"]]
    rate: dict[str, float] = {}
    if seconds:
        rate[f"{REQUESTS} x {PROMPT}/{OUTPUT}, tok/s"] = REQUESTS * OUTPUT / median(seconds)
    return {
        "engine": found["flags"] or "bfloat16",
        "head": found["lm_head_dtype"],
        "weights, GiB": found["weights_gib"],
        "pool, tokens": found["pool_tokens"],
        **steps,
        **rate,
        "ready, s": found["ready_seconds"],
    }


def main() -> None:
    """Measure, print, write after each engine."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a config.json")
    parser.add_argument("--engine", action="append", required=True, metavar="FLAGS")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--repeats", type=int, default=5, help="of each step's time")
    parser.add_argument("--calls", type=int, default=2, help="of 256 requests; 0: none")
    parser.add_argument("--compile-cache-dir")
    parser.add_argument("--name", help="of the file in benchmarks/results")
    args = parser.parse_args()
    found = []
    for flags in args.engine:
        found.append(run(args, flags))
        gc.collect()  # the engine and what counted its steps hold each other
        rows = [row(each) for each in found]
        print(markdown(rows[-1:]), flush=True)
        path = write_results(
            args.name or f"engines_{args.model.stem}",
            {"model": args.model.stem, "context": CONTEXT, "engines": found, "rows": rows},
        )
    print(markdown(rows), f"wrote {path}", sep="\n")


if __name__ == "__main__":
    main()
