"""Requests as they come: lengths of real conversations, drawn without their data, and arrivals.

The quantile functions of ShareGPT, filtered as serving benchmarks do it (prompts of 4 to 1024
tokens, at most 2048 in all), interpolated log-linearly between known percentiles.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

PERCENTILES = (0, 10, 25, 50, 75, 90, 95, 99, 100)
PROMPT = (4, 12, 22, 130, 398, 656, 802, 947, 1024)  # tokens; the mean is 237, the data's 242
OUTPUT = (1, 10, 24, 126, 320, 504, 691, 967, 2044)  # likewise 208 and 208
MAX_TOTAL = 2048


@dataclass(frozen=True)
class Lengths:
    """Tokens of one request."""

    prompt: int
    output: int


def sharegpt(count: int, seed: int) -> list[Lengths]:
    """Lengths of `count` requests; prompt and output are drawn independently.

    The shares are stratified (one request in each of `count` equal slices of the distribution),
    so that few requests have the right percentiles and two seeds nearly the same tokens.
    """
    rng = np.random.default_rng(seed)
    prompts = _quantiles(rng, count, PROMPT)
    outputs = np.minimum(_quantiles(rng, count, OUTPUT), MAX_TOTAL - prompts)
    return [Lengths(int(p), int(o)) for p, o in zip(prompts, outputs, strict=True)]


def fixed(count: int, prompt: int, output: int) -> list[Lengths]:
    """The same lengths for every request."""
    return [Lengths(prompt, output)] * count


def random_prompts(
    lengths: Sequence[Lengths], vocab: int, rng: np.random.Generator
) -> list[list[int]]:
    """Random token ids in [0, vocab) of the given prompt lengths: no two share a prefix."""
    return [rng.integers(0, vocab, item.prompt).tolist() for item in lengths]


def poisson_arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Seconds at which `count` requests arrive, the first at 0.

    Args:
        rate: requests a second on average; inf: all at once.
    """
    gaps = np.random.default_rng(seed).exponential(0 if math.isinf(rate) else 1 / rate, count)
    return (np.cumsum(gaps) - gaps[0]).tolist()


def _quantiles(
    rng: np.random.Generator, count: int, tokens_at_percentiles: Sequence[int]
) -> np.ndarray:
    share = 100 * rng.permutation(np.arange(count) + rng.random(count)) / count
    return np.exp(np.interp(share, PERCENTILES, np.log(tokens_at_percentiles))).round().astype(int)
