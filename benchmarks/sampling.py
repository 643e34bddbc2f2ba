"""Sampling on a GPU: its variants beside a full sort and XLA's top_k of the same logits.

Random logits have a language model's peak (normal, with a tail that falls four times slower), or
are normal alone: then top-p keeps a large part of the vocabulary.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.common import write_results
from jaxpaged.runtime.sampler import VARIANTS, SamplingBatch, input_fields, sample

VOCAB = 151_936
COPY_RATE = 4.3e12  # bytes a second of a plain device copy on an H200
LOGITS = {
    "peaked": lambda normal: 2 * normal + jnp.where(normal > 2, 6 * (normal - 2), 0),
    "normal": lambda normal: 1.5 * normal,
}
RULES: dict[str, tuple[str, dict[str, float]]] = {
    "greedy": ("greedy", {}),
    "no filter": ("plain", {}),
    "top_k 50, top_p 0.95": ("filtered", {"top_k_R": 50, "top_p_R": 0.95}),
    "top_k 1000": ("filtered", {"top_k_R": 1000}),
    "top_p 0.95": ("filtered", {"top_p_R": 0.95}),
    "min_p 0.05": ("filtered", {"min_p_R": 0.05}),
}


def batch(variant: str, R: int, rules: dict[str, float]) -> SamplingBatch:
    """Rows of different seeds at temperature 0.8."""
    values = {"target_R": -1, "temperature_R": 0.8, "top_p_R": 1.0, **rules}
    arrays = {
        name: np.full((R, *tail), values.get(name, 0), dtype)
        for name, tail, dtype in (("position_R", (), "int32"), *input_fields(variant, VOCAB))
    }
    if variant != "greedy":
        arrays["seed_R2"][:, 0] = np.arange(R)
    return SamplingBatch.from_arrays(jax.tree.map(jnp.asarray, arrays))


def compile_chain(
    one: Callable[[jax.Array, jax.Array, Any], jax.Array], R: int, settings: Any
) -> jax.stages.Compiled:
    """An executable (pool, settings) -> tokens: each call waits for the last one's tokens."""
    one = jax.jit(one)  # traced once

    def chain(pool: list[jax.Array], settings: Any) -> jax.Array:
        token_R = jnp.zeros(R, jnp.int32)
        for logits_RV in pool:
            token_R = one(logits_RV, token_R, settings)
        return token_R

    pool = [jax.ShapeDtypeStruct((R, VOCAB), jnp.float32)] * calls(R)
    return jax.jit(chain).lower(pool, settings).compile()


def calls(R: int) -> int:
    """Logits that a chain goes through; from 64 rows on they do not fit the card's cache."""
    return 3 if R > 64 else 8


def microseconds(run: jax.stages.Compiled, pool: list[jax.Array], settings: Any) -> float:
    """Median time of a call; chains are queued back to back."""
    run(pool, settings).block_until_ready()
    times, repeats = [], 4
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(repeats):
            out = run(pool, settings)
        out.block_until_ready()
        times.append((time.perf_counter() - start) / (repeats * len(pool)))
    return round(statistics.median(times) * 1e6, 1)


def with_sampler(variant: str) -> Callable[[jax.Array, jax.Array, SamplingBatch], jax.Array]:
    """A function (logits, positions, settings) -> tokens."""

    def one(logits_RV: jax.Array, token_R: jax.Array, settings: SamplingBatch) -> jax.Array:
        settings = dataclasses.replace(settings, position_R=token_R)
        return sample(logits_RV, settings, variant, None, max_logprobs=0)[0].token_R

    return one


def by_sorting(logits_RV: jax.Array, token_R: jax.Array, _: Any) -> jax.Array:
    """The sort that a sampler of this kind begins with, and no more."""
    order_RV = lax.sort(logits_RV + token_R[:, None].astype(jnp.float32))
    return order_RV[:, -50].astype(jnp.int32)


def by_top_k(logits_RV: jax.Array, token_R: jax.Array, _: Any) -> jax.Array:
    """XLA's 50 largest, and no more."""
    return lax.top_k(logits_RV + token_R[:, None].astype(jnp.float32), 50)[1][:, -1]


WAYS = {
    **{variant: with_sampler(variant) for variant in ("greedy", "plain", "filtered")},
    "sort": by_sorting,
    "top_k": by_top_k,
}


def compile_way(case: tuple[int, str]) -> jax.stages.Compiled:
    """The executable for a number of rows and one of WAYS."""
    R, way = case
    settings = batch(way, R, {}) if way in VARIANTS else None
    return compile_chain(WAYS[way], R, settings)


def measure(R: int, kind: str, compiled: dict[tuple[int, str], Any]) -> dict[str, float]:
    """Microseconds of every rule, and of sorting."""
    keys = jax.random.split(jax.random.key(R), calls(R))
    pool = [LOGITS[kind](jax.random.normal(key, (R, VOCAB))) for key in keys]
    figures = {
        name: microseconds(compiled[R, variant], pool, batch(variant, R, rules))
        for name, (variant, rules) in RULES.items()
    }
    for way in ("sort", "top_k"):
        figures[way] = microseconds(compiled[R, way], pool, None)
    return figures


def main() -> None:
    """Measure all, print it and write it to results/sampling.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256])
    args = parser.parse_args()
    cases = list(product(args.rows, WAYS))
    with ThreadPoolExecutor() as threads:
        compiled = dict(zip(cases, threads.map(compile_way, cases), strict=True))
    results = {}
    for R in args.rows:
        results[str(R)] = {
            "read": round(R * VOCAB * 4 / COPY_RATE * 1e6, 1),
            **{kind: measure(R, kind, compiled) for kind in LOGITS},
        }
        print(R, results[str(R)], flush=True)
    figures = {
        "vocab": VOCAB,
        "unit": "microseconds a call; read: the logits once, at a plain copy's rate",
        "microseconds": results,
    }
    print(write_results("sampling", figures))


if __name__ == "__main__":
    main()
