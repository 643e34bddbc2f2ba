"""Tokens a second of one `LLM.generate` call with many requests.

    python -m benchmarks.offline_throughput --model benchmarks/models/qwen3-0.6b.json

The time of a call is all of it: queuing, prefill, decoding, outputs; no tokenizer. A whole call
goes before as a warm-up. Every call has new random prompts, so that the prefix cache finds none.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.common import markdown, model_settings, seconds_since_start, write_results
from benchmarks.engine_flags import add_engine_flags, engine_settings, memory_figures
from jaxpaged import LLM, SamplingParams
from jaxpaged.planning.lengths import MAX_TOTAL, Lengths, fixed, random_prompts, sharegpt


class StepCounter:
    """Stands before an engine's `step` and counts the calls."""

    def __init__(self, core: Any) -> None:
        self.steps, self._step = 0, core.step
        core.step = self._count

    def _count(self) -> Any:
        self.steps += 1
        return self._step()


def measure(
    llm: LLM, lengths: list[Lengths], rng: np.random.Generator, counter: StepCounter
) -> dict[str, float]:
    """One call; its seconds, steps, preemptions and prefix-cache hits (tokens)."""
    prompts = random_prompts(lengths, llm.info.vocab_size, rng)
    params = [
        SamplingParams(temperature=0, max_tokens=item.output, ignore_eos=True, detokenize=False)
        for item in lengths
    ]
    stats, steps = llm._core.stats(), counter.steps
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    made = sum(len(output.outputs[0].token_ids) for output in outputs)
    assert made == sum(item.output for item in lengths)
    after = llm._core.stats()
    return {
        "seconds": seconds,
        "steps": counter.steps - steps,
        "preemptions": after.num_preemptions - stats.num_preemptions,
        "prefix_cache_hits": after.prefix_cache_hits - stats.prefix_cache_hits,
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", type=Path, help="a config.json (random weights) or a checkpoint folder"
    )
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--lengths", choices=("fixed", "sharegpt"), default="fixed")
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="auto")
    add_engine_flags(parser)
    parser.add_argument("--max-model-len", type=int, help="default: what the lengths need")
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--max-num-batched-tokens", type=int)
    parser.add_argument("--compile-cache-dir")
    parser.add_argument("--eager", action="store_true", help="compile in the warm-up, as needed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", help="of the file in benchmarks/results")
    args = parser.parse_args()
    if args.lengths == "fixed":
        lengths, longest = (
            fixed(args.requests, args.input_len, args.output_len),
            args.input_len + args.output_len,
        )
        label = f"{args.requests} x {args.input_len}/{args.output_len}"
    else:
        lengths, longest = sharegpt(args.requests, args.seed), MAX_TOTAL
        label = f"{args.requests} x sharegpt"
    rng = np.random.default_rng(args.seed)
    with model_settings(args.model) as settings:
        llm = LLM(
            **settings,
            **engine_settings(args),
            skip_tokenizer_init=True,
            dtype=args.dtype,
            max_model_len=args.max_model_len or longest,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            compile_cache_dir=args.compile_cache_dir,
            enforce_eager=args.eager,
        )
        ready = seconds_since_start()
        counter = StepCounter(llm._core)
        warm_up = measure(llm, lengths, rng, counter)
        print(f"ready in {ready:.1f} s, warm-up {warm_up['seconds']:.2f} s", flush=True)
        runs = [measure(llm, lengths, rng, counter) for _ in range(args.repeats)]
    seconds = median(run["seconds"] for run in runs)
    prompt_tokens = sum(item.prompt for item in lengths)
    output_tokens = sum(item.output for item in lengths)
    row = {
        "requests": label,
        "output tok/s": output_tokens / seconds,
        "total tok/s": (prompt_tokens + output_tokens) / seconds,
        "requests/s": len(lengths) / seconds,
        "seconds": seconds,
        "steps": median(run["steps"] for run in runs),
        "preemptions": sum(run["preemptions"] for run in runs),
        "prefix-cache hits": sum(run["prefix_cache_hits"] for run in runs),
    }
    print(markdown([row]))
    model = "demo" if args.model is None else args.model.stem
    path = write_results(
        args.name or f"offline_throughput_{model}_{args.lengths}",
        {
            "model": model,
            "dtype": llm.info.dtype,
            "lm_head_dtype": llm.info.lm_head_dtype,
            "attention_backend": llm.info.attention_backend,
            **engine_settings(args),
            **memory_figures(llm),
            "prompt_tokens": prompt_tokens,
            "output_tokens": output_tokens,
            "ready_seconds": ready,
            "startup_seconds": llm.info.startup_seconds,
            "runs": runs,
            "rows": [row],
        },
    )
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
