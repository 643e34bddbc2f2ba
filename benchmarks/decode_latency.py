"""Decode step time by batch size, of a whole engine call, on random weights.

    python -m benchmarks.decode_latency --model benchmarks/models/qwen3-0.6b.json

A step is (T(1 + K) - T(1)) / K, where T(n) is the time of an `LLM.generate` call that makes n
tokens for each of B prompts: scheduler, batch building and sampling are in it. Prompts are cached,
so that T(1) is short. Each T is a median.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.common import markdown, model_settings, seconds_since_start, write_results
from benchmarks.engine_flags import add_engine_flags, engine_settings, memory_figures
from jaxpaged import LLM, SamplingParams

SERVING_SEQS = 256
SERVING = {"max_model_len": 2048, "max_num_batched_tokens": 8192, "enforce_eager": False}


@contextmanager
def dummy_llm(
    model: Path,
    context: int,
    steps: int,
    max_num_seqs: int,
    dtype: str = "auto",
    **more: Any,
) -> Iterator[LLM]:
    """An engine of random weights with the sizes of a config.json, for prompts of `context`.

    Unless `more` says otherwise, it compiles what its runs need when they first need it, so warm
    it up with the same runs.
    """
    limits: dict[str, Any] = {
        "max_model_len": context + 2 * steps,
        "max_num_batched_tokens": max(2048, max_num_seqs),
        "enforce_eager": True,
    }
    with (
        model_settings(model) as settings,
        LLM(
            **settings,
            skip_tokenizer_init=True,
            dtype=dtype,
            max_num_seqs=max_num_seqs,
            **(limits | more),
        ) as llm,
    ):
        yield llm


def seconds(llm: LLM, prompts: list[list[int]], count: int) -> float:
    """Wall time of one call that makes `count` tokens a prompt."""
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - start


def step_times(
    llm: LLM, prompts: list[list[int]], steps: int, repeats: int
) -> dict[int, list[float]]:
    """Times of calls that make 1 token a prompt and 1 + `steps`, taken in turns."""
    taken: dict[int, list[float]] = {1: [], 1 + steps: []}
    for count in taken:
        seconds(llm, prompts, count)  # compiles, fills the prefix cache
    for _ in range(repeats):
        for count, found in taken.items():
            found.append(seconds(llm, prompts, count))
    return taken


def step_ms(taken: dict[int, list[float]]) -> float:
    """Milliseconds of a step, from what `step_times` found."""
    (few, short), (many, long) = ((count, median(found)) for count, found in taken.items())
    return 1e3 * (long - short) / (many - few)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a config.json")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each prompt")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--steps", type=int, default=32, help="K")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--dtype", default="auto")
    add_engine_flags(parser)
    parser.add_argument(
        "--serving",
        action="store_true",
        help="an engine as it serves 2048 tokens a sequence: 256 sequences, 8192 tokens a step, "
        "all compiled ahead; also tells how long it took to start",
    )
    parser.add_argument("--compile-cache-dir")
    parser.add_argument("--name", help="of the file in benchmarks/results")
    args = parser.parse_args()
    settings = engine_settings(args)
    more: dict[str, Any] = {"compile_cache_dir": args.compile_cache_dir, **settings}
    if args.serving:
        more |= SERVING
    largest = SERVING_SEQS if args.serving else max(args.batch)
    with dummy_llm(args.model, args.context, args.steps, largest, args.dtype, **more) as llm:
        ready = seconds_since_start()
        print(f"ready in {ready:.1f} s: {llm.info.startup_seconds}", flush=True)
        draw = np.random.default_rng(0)
        runs: list[dict[str, Any]] = []
        rows: list[dict[str, Any]] = []
        for size in args.batch:
            prompts = draw.integers(0, llm.info.vocab_size, (size, args.context)).tolist()
            taken = step_times(llm, prompts, args.steps, args.repeats)
            taken_ms = step_ms(taken)
            runs.append({"batch": size, "seconds": taken})
            rows.append({"batch": size, "step ms": taken_ms})
            print(f"batch {size:4d}, context {args.context}: {taken_ms:7.3f} ms a step")
        memory = memory_figures(llm)
        print(memory)
        write_results(
            args.name or f"decode_latency_{args.model.stem}",
            {
                "model": args.model.stem,
                "dtype": llm.info.dtype,
                "lm_head_dtype": llm.info.lm_head_dtype,
                "attention_backend": llm.info.attention_backend,
                **settings,
                **memory,
                "context": args.context,
                "ready_seconds": ready if args.serving else None,
                "startup_seconds": llm.info.startup_seconds,
                "runs": runs,
                "rows": rows,
                "chart": {"x": "batch", "y": ["step ms"], "label": "ms a step"},
            },
        )
        print(markdown(rows))


if __name__ == "__main__":
    main()
