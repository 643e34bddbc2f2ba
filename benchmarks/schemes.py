"""Steps, throughput and memory of one shape under several formats of weights and pages.

    python -m benchmarks.schemes --model benchmarks/models/qwen2.5-7b.json \\
        --schemes auto/auto fp8_per_channel/auto fp8_per_channel/fp8

A scheme is WEIGHTS/PAGES: a value of `--quantization` (auto: none) and one of `--kv-cache-dtype`;
with /head after it the head is stored like the layers.
Each gets an engine of its own, one after the other: decode steps as `decode_latency` takes them,
then calls as `offline_throughput` makes them, on random weights, every executable compiled ahead.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.common import markdown, memory_figures, write_results
from benchmarks.decode_latency import SERVING, SERVING_SEQS, dummy_llm, step_times
from benchmarks.offline_throughput import StepCounter, measure
from jaxpaged.planning.lengths import fixed

CONTEXT, STEPS = 1024, 32
MODEL_LEN = 32768  # as a chat is served: the pool takes all that is left
REQUESTS, PROMPT, OUTPUT = 256, 512, 128


def run(args: argparse.Namespace, scheme: str) -> dict[str, Any]:
    """A scheme's row of the table."""
    weights, pages, *head = scheme.split("/")
    settings: dict[str, Any] = SERVING | {
        "max_model_len": MODEL_LEN,
        "quantization": None if weights == "auto" else weights,
        "quantize_lm_head": head == ["head"],
        "kv_cache_dtype": pages,
        "compile_cache_dir": args.compile_cache_dir,
    }
    draw = np.random.default_rng(0)
    with dummy_llm(args.model, CONTEXT, STEPS, SERVING_SEQS, **settings) as llm:
        memory = memory_figures(llm)
        steps = {}
        for size in args.batch:
            prompts = draw.integers(0, llm.info.vocab_size, (size, CONTEXT)).tolist()
            taken = step_times(llm, prompts, STEPS, args.repeats)
            short, long = map(median, taken.values())
            steps[f"B {size} ms"] = 1e3 * (long - short) / STEPS
        lengths, counter = fixed(REQUESTS, PROMPT, OUTPUT), StepCounter(llm._core)
        seconds = [
            measure(llm, lengths, draw, counter)["seconds"] for _ in range(1 + args.repeats // 2)
        ][1:]  # the first warms up
        return {
            "weights": weights,
            "pages": pages,
            "head": llm.info.lm_head_dtype,
            "weights GiB": memory["weights_gib"],
            "pool tokens": memory["pool_tokens"],
            **steps,
            f"{REQUESTS} x {PROMPT}/{OUTPUT} tok/s": REQUESTS * OUTPUT / median(seconds),
            "ready s": llm.info.startup_seconds["total"],
        }


def main() -> None:
    """Measure, print, write after each scheme."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a config.json")
    parser.add_argument("--schemes", nargs="+", required=True, metavar="WEIGHTS/PAGES[/head]")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--compile-cache-dir")
    parser.add_argument("--name", help="of the file in benchmarks/results")
    args = parser.parse_args()
    rows = []
    for scheme in args.schemes:
        rows.append(run(args, scheme))
        print(markdown(rows[-1:]), flush=True)
        found = {"model": args.model.stem, "context": CONTEXT, "rows": rows}
        path = write_results(args.name or f"schemes_{args.model.stem}", found)
    print(markdown(rows), f"wrote {path}", sep="\n")


if __name__ == "__main__":
    main()
