"""Hugging Face's side of compare_hf_gpu: `generate` on static padded batches. Prints JSON.

A process of its own, so that it gives the whole card back: `python -m benchmarks.hf_static CONFIG
LENGTHS`, where LENGTHS is a JSON list of [prompt, output] tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from benchmarks.common import evenly

WARM_UP_TOKENS = 4


class StaticBatches:
    """A model of a config.json with random weights, and the time that batches of it take."""

    def __init__(self, config: str, device: str, dtype: torch.dtype, seed: int) -> None:
        torch.manual_seed(seed)
        self._device = torch.device(device)
        with self._device:
            self._model = AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(config), dtype=dtype, attn_implementation="sdpa"
            ).eval()
        self._model.generation_config.eos_token_id = None  # nothing stops or avoids a token
        self._vocab = self._model.get_input_embeddings().num_embeddings
        self._rng = np.random.default_rng(seed)

    @torch.inference_mode()
    def seconds(self, prompt_lengths: Sequence[int], count: int) -> float:
        """One `generate` call: prompts padded on the left to the longest, `count` tokens each."""
        shape = len(prompt_lengths), max(prompt_lengths)
        ids = torch.from_numpy(self._rng.integers(0, self._vocab, shape)).to(self._device)
        mask = torch.zeros(shape, dtype=torch.long)
        for row, length in enumerate(prompt_lengths):
            mask[row, -length:] = 1
        mask = mask.to(self._device)
        settings = GenerationConfig(do_sample=False, max_new_tokens=count, pad_token_id=0)
        start = time.perf_counter()
        output = self._model.generate(ids, attention_mask=mask, generation_config=settings)
        assert output.cpu().shape[1] == shape[1] + count  # the copy waits for the device
        return time.perf_counter() - start

    def measure(
        self,
        lengths: Sequence[tuple[int, int]],
        size: int,
        most_batches: int,
        most_steps: int,
    ) -> dict[str, float]:
        """Seconds for all requests in batches of `size`, the requests sorted by output length.

        Each batch runs until its longest output is there, so sorting by the outputs, which nobody
        knows beforehand, is the order that favours it most. At most `most_batches` evenly spread
        batches are run, of each at most `most_steps` decode steps; the seconds are scaled by the
        steps of all. Later steps take longer, so that a batch cut short flatters transformers.
        """
        by_output = sorted(lengths, key=lambda item: item[1])
        batches = [by_output[at : at + size] for at in range(0, len(by_output), size)]
        steps = [batch[-1][1] for batch in batches]
        run = evenly(len(batches), most_batches)
        self.seconds([prompt for prompt, _ in batches[run[0]]], WARM_UP_TOKENS)
        counts = {at: min(steps[at], most_steps) for at in run}
        seconds = sum(
            self.seconds([prompt for prompt, _ in batches[at]], count)
            for at, count in counts.items()
        )
        return {
            "batch": size,
            "batches": len(batches),
            "batches_run": len(run),
            "seconds_run": seconds,
            "steps": sum(steps),
            "steps_run": sum(counts.values()),
            "seconds": seconds * sum(steps) / sum(counts.values()),
        }


def main() -> None:
    """Measure every batch size, print JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("lengths")
    parser.add_argument("--batch", type=int, nargs="+", required=True)
    parser.add_argument("--most-batches", type=int, required=True)
    parser.add_argument("--most-steps", type=int, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    lengths = json.loads(args.lengths)
    model = StaticBatches(args.config, args.device, getattr(torch, args.dtype), args.seed)
    figures = []
    for size in args.batch:
        figures.append(model.measure(lengths, size, args.most_batches, args.most_steps))
        print(figures[-1], file=sys.stderr, flush=True)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
