"""jaxpaged beside Hugging Face transformers: same weights, prompts, lengths, dtype and cores.

    python -m benchmarks.compare_hf [--model DIR]

Greedy generation in float32, both sides in one process, in turns. First the outputs are compared
token by token, then every figure is the median of `--repeats` runs after a warm-up. Prefix
caching is off: a repeated prompt must cost what a new one does. Writes a table, JSON and a chart.
Exits with 1 if the outputs differ where the model was not undecided.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from benchmarks.common import RESULTS, pin_threads, write_results
from jaxpaged import LLM, SamplingParams

RANDOM_MODEL = Path(__file__).parent / "models" / "llama-55m.json"
NUM_PROMPTS, SHORTEST, LONGEST, NEW_TOKENS = 16, 16, 256, 64
LATENCY_PROMPT = 128
UNDECIDED = 1e-3  # logits of the two likeliest tokens closer than this: either is right
TARGETS = {"one by one": 3.0, "padded batch": 1.2, "first token": 1.0, "per token": 1.0}

TokenIds = list[int]


class HuggingFace:
    """The yardstick: `generate` of transformers on torch."""

    def __init__(self, folder: Path, threads: int) -> None:
        torch.set_num_threads(threads)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        # `generate` would take it from here, and `min_new_tokens` then forbids it: neither side
        # may stop or avoid a token.
        self._model.generation_config.eos_token_id = None
        self.num_parameters = self._model.num_parameters()
        self.vocab = self._model.get_input_embeddings().num_embeddings

    @torch.inference_mode()
    def padded(self, prompts: Sequence[TokenIds], count: int) -> list[TokenIds]:
        """All prompts as one batch, the shorter ones padded on the left."""
        width = max(map(len, prompts))
        padding = [width - len(prompt) for prompt in prompts]
        ids = [[0] * pad + prompt for pad, prompt in zip(padding, prompts, strict=True)]
        mask = [[0] * pad + [1] * (width - pad) for pad in padding]
        settings = GenerationConfig(do_sample=False, max_new_tokens=count, pad_token_id=0)
        output = self._model.generate(
            torch.tensor(ids), attention_mask=torch.tensor(mask), generation_config=settings
        )
        return output[:, width:].tolist()

    def one_by_one(self, prompts: Sequence[TokenIds], count: int) -> list[TokenIds]:
        """One `generate` call a prompt: what a plain script does."""
        return [self.padded([prompt], count)[0] for prompt in prompts]

    @torch.inference_mode()
    def gap(self, token_ids: TokenIds) -> float:
        """By how much the likeliest next token's logit leads the second's."""
        first, second = self._model(torch.tensor([token_ids])).logits[0, -1].topk(2).values
        return float(first - second)


class Jaxpaged:
    """The same through `jaxpaged.LLM`."""

    def __init__(self, folder: Path) -> None:
        self._llm = LLM(
            model=str(folder),
            dtype="float32",
            max_num_seqs=NUM_PROMPTS,
            max_model_len=LONGEST + NEW_TOKENS,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
        )

    def batch(self, prompts: Sequence[TokenIds], count: int) -> list[TokenIds]:
        """All prompts in one call: continuous batching, no padding."""
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        results = self._llm.generate(list(prompts), params)
        return [list(result.outputs[0].token_ids) for result in results]


def make_random_model(folder: Path, seed: int) -> None:
    """Save the model of `RANDOM_MODEL` with random weights as a Hugging Face folder."""
    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(RANDOM_MODEL)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def make_prompts(vocab: int, seed: int) -> list[TokenIds]:
    """Random ids, 16 lengths from 16 to 256 in equal ratios, in a shuffled order."""
    rng = np.random.default_rng(seed)
    lengths = rng.permutation(np.geomspace(SHORTEST, LONGEST, NUM_PROMPTS).round().astype(int))
    return [rng.integers(3, vocab, length).tolist() for length in lengths]


def time_in_turns(measures: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Seconds of every run. The sides alternate, so that a slow minute hits both.

    Every measure has run before: what it warms up must not be timed.
    """
    seconds: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(repeats):
        for name, measure in measures.items():
            start = time.perf_counter()
            measure()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def differences(
    prompts: list[TokenIds], ours: list[TokenIds], theirs: list[TokenIds], hf: HuggingFace
) -> list[dict[str, Any]]:
    """The first differing token of each prompt, with the gap that Hugging Face saw there."""
    found = []
    for index, (prompt, a, b) in enumerate(zip(prompts, ours, theirs, strict=True)):
        if a != b:
            assert len(a) == len(b) == NEW_TOKENS
            place = next(i for i in range(NEW_TOKENS) if a[i] != b[i])
            gap = hf.gap(prompt + b[:place])
            found.append({"prompt": index, "token": place, "logit_gap": gap})
    return found


def run(folder: Path, threads: int, repeats: int, seed: int) -> dict[str, Any]:
    """Compare outputs, then measure both sides; returns the figures, JSON-ready."""
    hf = HuggingFace(folder, threads)
    ours = Jaxpaged(folder)
    prompts = make_prompts(hf.vocab, seed)
    reference = hf.one_by_one(prompts, NEW_TOKENS)
    differing = differences(prompts, ours.batch(prompts, NEW_TOKENS), reference, hf)
    hf.padded(prompts, NEW_TOKENS)

    throughput = time_in_turns(
        {
            "hf one by one": lambda: hf.one_by_one(prompts, NEW_TOKENS),
            "hf padded batch": lambda: hf.padded(prompts, NEW_TOKENS),
            "jaxpaged": lambda: ours.batch(prompts, NEW_TOKENS),
        },
        repeats,
    )
    single = [np.random.default_rng(seed).integers(3, hf.vocab, LATENCY_PROMPT).tolist()]
    ours.batch(single, 1)
    latency = time_in_turns(
        {
            "hf first token": lambda: hf.padded(single, 1),
            "jaxpaged first token": lambda: ours.batch(single, 1),
            "hf 64 tokens": lambda: hf.padded(single, NEW_TOKENS),
            "jaxpaged 64 tokens": lambda: ours.batch(single, NEW_TOKENS),
        },
        2 * repeats + 1,
    )
    return {
        "setting": {
            "parameters": hf.num_parameters,
            "dtype": "float32",
            "threads": threads,
            "prompt_lengths": [len(prompt) for prompt in prompts],
            "new_tokens": NEW_TOKENS,
            "latency_prompt_length": LATENCY_PROMPT,
            "repeats": repeats,
        },
        "equal_outputs": f"{NUM_PROMPTS - len(differing)} of {NUM_PROMPTS}",
        "differences": differing,
        "seconds": throughput | latency,
        "medians": _medians(throughput | latency),
    }


def _medians(seconds: dict[str, list[float]]) -> dict[str, float]:
    middle = {name: median(runs) for name, runs in seconds.items()}
    tokens = NUM_PROMPTS * NEW_TOKENS
    figures = {
        f"{name} tokens/s": tokens / middle[name]
        for name in ("hf one by one", "hf padded batch", "jaxpaged")
    }
    for side in ("hf", "jaxpaged"):
        first, all_tokens = middle[f"{side} first token"], middle[f"{side} 64 tokens"]
        figures[f"{side} first token ms"] = 1e3 * first
        figures[f"{side} per token ms"] = 1e3 * (all_tokens - first) / (NEW_TOKENS - 1)
    return figures


def speedups(medians: dict[str, float]) -> dict[str, float]:
    """How many times faster jaxpaged is, by the name of the target."""
    ours = medians["jaxpaged tokens/s"]
    return {
        "one by one": ours / medians["hf one by one tokens/s"],
        "padded batch": ours / medians["hf padded batch tokens/s"],
        "first token": medians["hf first token ms"] / medians["jaxpaged first token ms"],
        "per token": medians["hf per token ms"] / medians["jaxpaged per token ms"],
    }


def table(figures: dict[str, Any]) -> str:
    """The figures for a terminal."""
    medians, ratio = figures["medians"], speedups(figures["medians"])
    rows = [
        ("16 prompts, HF one by one", "hf one by one tokens/s", "jaxpaged tokens/s", "one by one"),
        ("16 prompts, HF padded", "hf padded batch tokens/s", "jaxpaged tokens/s", "padded batch"),
        ("1 prompt, first token", "hf first token ms", "jaxpaged first token ms", "first token"),
        ("1 prompt, per token", "hf per token ms", "jaxpaged per token ms", "per token"),
    ]
    lines = [f"{'':26} {'transformers':>16} {'jaxpaged':>16} {'faster':>8} {'target':>7}"]
    for title, theirs, ours, name in rows:
        unit = theirs.rsplit(" ", 1)[1]
        hf, us = f"{medians[theirs]:.1f} {unit}", f"{medians[ours]:.1f} {unit}"
        lines.append(f"{title:26} {hf:>16} {us:>16} {ratio[name]:7.2f}x {TARGETS[name]:6.1f}x")
    return "\n".join([*lines, f"equal outputs: {figures['equal_outputs']}"])


def draw(figures: dict[str, Any], path: Path) -> None:
    """A chart: throughput on the left, latency of a single request on the right."""
    medians = figures["medians"]
    chart = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = chart.subplots(1, 2)
    names = ["hf one by one", "hf padded batch", "jaxpaged"]
    left.margins(y=0.12)
    right.margins(y=0.12)
    bars = left.bar(names, [medians[f"{n} tokens/s"] for n in names], color=["C7", "C7", "C0"])
    left.bar_label(bars, fmt="%.0f")
    left.set_title(f"{NUM_PROMPTS} prompts x {NEW_TOKENS} tokens: output tokens/s")
    for offset, side, colour in ((-0.2, "hf", "C7"), (0.2, "jaxpaged", "C0")):
        heights = [medians[f"{side} first token ms"], medians[f"{side} per token ms"]]
        bars = right.bar([offset, 1 + offset], heights, 0.4, label=side, color=colour)
        right.bar_label(bars, fmt="%.1f")
    right.set_xticks([0, 1], [f"first token (prompt of {LATENCY_PROMPT})", "each further token"])
    right.set_title("one request: ms, lower is better")
    right.legend()
    millions = figures["setting"]["parameters"] / 1e6
    threads = figures["setting"]["threads"]
    chart.suptitle(f"jaxpaged and transformers, {millions:.0f}M float32, {threads} CPU cores")
    chart.savefig(path, dpi=120)


def main() -> int:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a Hugging Face folder (default: random Llama)")
    parser.add_argument("--threads", type=int, help="CPU cores for both sides (default: all)")
    parser.add_argument("--repeats", type=int, default=5, help="runs behind each median")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the prompts")
    parser.add_argument("--name", default="compare_hf", help="of the files in benchmarks/results")
    args = parser.parse_args()

    threads = pin_threads(args.threads)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.model or Path(temporary)
        if args.model is None:
            make_random_model(folder, args.seed)
        figures = run(folder, threads, args.repeats, args.seed)
    print(table(figures))
    for difference in figures["differences"]:
        print("differs:", difference)
    print("written:", write_results(args.name, figures))
    draw(figures, RESULTS / f"{args.name}.png")
    return any(found["logit_gap"] > UNDECIDED for found in figures["differences"])


if __name__ == "__main__":
    sys.exit(main())
