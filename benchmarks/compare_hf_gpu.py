"""jaxpaged beside Hugging Face `generate` on a GPU: throughput of requests of real lengths.

    python -m benchmarks.compare_hf_gpu --model benchmarks/models/qwen2.5-7b.json

256 requests with lengths of the ShareGPT sampler, bfloat16, greedy, prefill included on both
sides; the rate counts the tokens that were asked for. transformers runs static padded batches
(sdpa), best of `--hf-batch`, in the order that favours it most, and one request at a time; both may
be measured on a part of the batches and scaled by decode steps, as the results say. Both sides
have random weights, each its own: a token takes as long whatever its weights, and bfloat16 outputs
are not compared (compare_hf does that, in float32). transformers first, in a process of its own:
one card does not hold both.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.common import evenly, markdown, model_settings, write_results
from jaxpaged import LLM, SamplingParams
from jaxpaged.planning.lengths import MAX_TOTAL, Lengths, random_prompts, sharegpt


def hugging_face(args: argparse.Namespace, lengths: Sequence[Lengths]) -> list[dict[str, Any]]:
    """Figures of `hf_static` for every batch size and for single requests."""
    pairs = json.dumps([astuple(item) for item in lengths])
    command = [sys.executable, "-m", "benchmarks.hf_static", str(args.model), pairs]
    command += ["--batch", *map(str, args.hf_batch), "1", "--most-batches", str(args.most_batches)]
    command += ["--most-steps", str(args.most_steps)]
    command += ["--device", args.hf_device, "--dtype", args.dtype, "--seed", str(args.seed)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def generate(llm: LLM, lengths: Sequence[Lengths], rng: np.random.Generator) -> float:
    """Seconds of one call with new random prompts."""
    prompts = random_prompts(lengths, llm.info.vocab_size, rng)
    params = [
        SamplingParams(temperature=0, max_tokens=item.output, ignore_eos=True, detokenize=False)
        for item in lengths
    ]
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - start


def ours(args: argparse.Namespace, lengths: Sequence[Lengths], num_single: int) -> dict[str, Any]:
    """Seconds of `LLM.generate` for all requests at once, and one by one for a part of them."""
    rng = np.random.default_rng(args.seed)
    with model_settings(args.model) as settings:
        llm = LLM(
            **settings,
            skip_tokenizer_init=True,
            dtype=args.dtype,
            max_model_len=MAX_TOTAL,
            max_num_batched_tokens=8192,
            compile_cache_dir=args.compile_cache_dir,
        )
        generate(llm, lengths, rng)
        runs = [generate(llm, lengths, rng) for _ in range(args.repeats)]
        by_output = sorted(lengths, key=lambda item: item.output)
        some = [by_output[place] for place in evenly(len(by_output), num_single)]
        single = sum(generate(llm, [item], rng) for item in some)
    steps, steps_run = (sum(item.output for item in part) for part in (lengths, some))
    return {
        "seconds": runs,
        "one_by_one": {
            "requests_run": len(some),
            "seconds_run": single,
            "seconds": single * steps / steps_run,
        },
        "attention_backend": llm.info.attention_backend,
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a config.json")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--hf-batch", type=int, nargs="+", default=[128, 64, 16])
    parser.add_argument(
        "--most-batches", type=int, default=4, help="of a size that transformers runs"
    )
    parser.add_argument(
        "--most-steps",
        type=int,
        default=MAX_TOTAL,
        help="of a batch that transformers runs; fewer flatter it",
    )
    parser.add_argument("--hf-device", default="cuda", help="torch's name of it")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--compile-cache-dir")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", help="of the file in benchmarks/results")
    args = parser.parse_args()
    lengths = sharegpt(args.requests, args.seed)
    theirs = hugging_face(args, lengths)
    own = ours(args, lengths, args.most_batches)
    tokens = sum(item.output for item in lengths)
    our_rate = tokens / median(own["seconds"])
    single_rate = tokens / own["one_by_one"]["seconds"]
    rows = [
        {
            "transformers": f"batches of {found['batch']}" if found["batch"] > 1 else "one by one",
            "measured": f"{found['batches_run']} of {found['batches']} batches, "
            f"{found['steps_run']} of {found['steps']} steps",
            "its tok/s": tokens / found["seconds"],
            "jaxpaged tok/s": our_rate,
            "times": our_rate * found["seconds"] / tokens,
        }
        for found in theirs
    ]
    print(markdown(rows))
    print(f"jaxpaged one by one: {single_rate:.0f} tok/s")
    model = args.model.stem
    path = write_results(
        args.name or f"compare_hf_gpu_{model}",
        {
            "model": model,
            "dtype": args.dtype,
            "weights": "random, drawn by each side for itself; outputs are not compared",
            "requests": args.requests,
            "prompt_tokens": sum(item.prompt for item in lengths),
            "output_tokens": tokens,
            "hugging_face": theirs,
            "jaxpaged": own,
            "speedup_over_best_batch": our_rate
            * min(found["seconds"] for found in theirs if found["batch"] > 1)
            / tokens,
            "jaxpaged one by one tok/s": single_rate,
            "rows": rows,
            "chart": {
                "x": "transformers",
                "y": ["its tok/s", "jaxpaged tok/s"],
                "label": "output tokens/s",
            },
        },
    )
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
