"""Attention kernels on a GPU against the time their bytes or operations take.

Pages lie shuffled in a pool many times the size of the card's cache; a chain of calls, each with
its own pages, runs as one executable, as a model's layers do.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import write_results
from pallas_kernels import paged_attention_decode as decode
from pallas_kernels.paged_attention_prefill import paged_attention_prefill
from pallas_kernels.paged_attention_prefill_mosaic import paged_attention_prefill_mosaic

COPY_RATE = 4.3e12  # bytes a second of a plain device copy on an H200
S = 16
POOL_BYTES = 1 << 31
PREFILLS: dict[str, Callable[..., jax.Array]] = {
    "mosaic": paged_attention_prefill_mosaic,
    "triton": paged_attention_prefill,
}
MAX_CONTEXT = 32768  # width of the page tables, in tokens


@dataclass(frozen=True)
class Heads:
    """Head counts of a model."""

    N: int
    K: int
    H: int

    def __str__(self) -> str:
        return f"{self.N}/{self.K}/{self.H}"

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.K * self.H * 2

    @property
    def pages(self) -> int:
        return POOL_BYTES // (S * self.bytes_per_token)


MODELS = (Heads(28, 4, 128), Heads(32, 8, 128), Heads(16, 8, 128), Heads(4, 1, 256))
WORK = (  # batch, mean context, ragged
    (256, 1024, False),
    (64, 4096, False),
    (64, 1024, False),
    (256, 1024, True),
    (64, 4096, True),
    (64, 1024, True),
    (8, 1024, False),
    (1, 32768, False),
    (1, 8192, False),
    (1, 1024, False),
)
BATCHES = tuple(sorted({B for B, _, _ in WORK}))


def lengths(B: int, mean: int, ragged: bool) -> np.ndarray:
    """Contexts of a batch; ragged ones are log-normal, at most eight times the mean."""
    if not ragged:
        return np.full(B, mean, np.int32)
    drawn = np.random.default_rng(0).lognormal(0, 0.8, B)
    return np.clip(drawn * mean / drawn.mean(), 1, 8 * mean).astype(np.int32)


def make_pool(heads: Heads, pages: str = "bfloat16") -> jax.Array:
    """As many random keys and values as take 2 GiB in bfloat16; integers have their range."""
    shape = (heads.pages, 2, heads.K, S, heads.H)

    @jax.jit
    def make(key: jax.Array) -> jax.Array:
        pool = jax.random.normal(key, shape, jnp.bfloat16)
        return (jnp.clip(pool * 30, -127, 127) if pages == "int8" else pool).astype(pages)

    return make(jax.random.key(0))


def scales_shape(heads: Heads, pages: str) -> tuple[int, ...] | None:
    """Of the scales of pages of this dtype."""
    if pages == "bfloat16":
        return None
    return (heads.pages, 2, heads.K, S) if pages == "int8" else (2, heads.K)


def row_bytes(heads: Heads, pages: str) -> int:
    """Of a key or a value of one head, its scale included if it has one of its own."""
    return {"bfloat16": 2 * heads.H, "int8": heads.H + 4}.get(pages, heads.H)


@cache
def page_tables(heads: Heads, kv_len_B: tuple[int, ...], count: int) -> list[jax.Array]:
    """`count` tables of shuffled pages, disjoint as far as the pool reaches."""
    rng = np.random.default_rng(1)
    pages = rng.permutation(np.arange(1, heads.pages, dtype=np.int32))
    tables, at = [], 0
    for _ in range(count):
        table_BM = np.zeros((len(kv_len_B), MAX_CONTEXT // S), np.int32)
        for b, length in enumerate(kv_len_B):
            used = -(-length // S)
            if at + used > len(pages):
                at = 0
            table_BM[b, :used] = pages[at : at + used]
            at += used
        tables.append(jnp.asarray(table_BM))
    return tables


def seconds(run: Callable[[jax.Array], jax.Array], x: jax.Array, calls: int) -> float:
    """Median time of one of the `calls` in a chain; chains are queued back to back.

    A chain that donates its operand works in place: then it is replayed as it was captured,
    where new addresses would have every kernel of it set up anew.
    """
    repeats, times = 4, []
    x = run(run(x)).block_until_ready()
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(repeats):
            x = run(x)
        x.block_until_ready()
        times.append((time.perf_counter() - start) / (repeats * calls))
    return statistics.median(times)


def calls_of(B: int) -> int:
    """Length of the chain: a 7B model's layers; more where a call is shorter than its dispatch."""
    return 28 if B > 8 else 56


def compile_decode(
    heads: Heads, B: int, config: decode.TuningConfig | None, pages: str = "bfloat16"
) -> Any:
    """An executable (q, pool, scales, tables, lengths) -> q for a chain of decode attentions."""

    @jax.jit
    def one(
        q: jax.Array,
        pool: jax.Array,
        scales: jax.Array | None,
        table: jax.Array,
        kv_len: jax.Array,
    ) -> jax.Array:
        return decode.paged_attention_decode(
            q,
            pool,
            table,
            kv_len_B=kv_len,
            num_decodes=jnp.int32(B),
            scale=heads.H**-0.5,
            config=config,
            page_scales=scales,
        )

    @partial(jax.jit, donate_argnums=0)
    def chain(
        q: jax.Array,
        pool: jax.Array,
        scales: jax.Array | None,
        tables: Sequence[jax.Array],
        kv_len: jax.Array,
    ) -> jax.Array:
        for table in tables:
            q = one(q, pool, scales, table, kv_len)
        return q

    like = jax.ShapeDtypeStruct
    table, scales = like((B, MAX_CONTEXT // S), jnp.int32), scales_shape(heads, pages)
    return chain.lower(
        like((B, heads.N, heads.H), jnp.bfloat16),
        like((heads.pages, 2, heads.K, S, heads.H), jnp.dtype(pages)),
        None if scales is None else like(scales, jnp.float32),
        [table] * calls_of(B),
        like((B,), jnp.int32),
    ).compile()


def time_decode(
    heads: Heads,
    pool: jax.Array,
    work: tuple[int, int, bool],
    compiled: Any,
    pages: str = "bfloat16",
) -> dict[str, Any]:
    """Time and share of the floor of one kind of work."""
    B, mean, ragged = work
    kv_len_B = lengths(B, mean, ragged)
    tables = page_tables(heads, tuple(kv_len_B.tolist()), calls_of(B))
    on_device = jnp.asarray(kv_len_B)
    q = jax.random.normal(jax.random.key(2), (B, heads.N, heads.H), jnp.bfloat16)
    shape = scales_shape(heads, pages)
    scales = None if shape is None else jnp.full(shape, 0.03)
    taken = seconds(lambda q: compiled(q, pool, scales, tables, on_device), q, calls_of(B))
    floor = int(kv_len_B.sum()) * 2 * heads.K * row_bytes(heads, pages) / COPY_RATE
    return {
        "heads": str(heads),
        "pages": pages,
        "work": f"{'ragged, ' if ragged else ''}B {B}, context {mean}",
        "floor_us": round(floor * 1e6, 1),
        "us": round(taken * 1e6, 1),
        "share_of_floor": round(floor / taken, 3),
    }


def compile_prefill(heads: Heads, T: int, kernel: Callable[..., jax.Array]) -> Any:
    """An executable (q, pool, table) -> q for four causal attentions of one prompt of T."""

    @jax.jit
    def chain(q: jax.Array, pool: jax.Array, table: jax.Array) -> jax.Array:
        for _ in range(4):
            q = kernel(
                q,
                pool,
                table,
                query_start_B1=jnp.array([0, T]),
                kv_len_B=jnp.array([T]),
                num_decodes=jnp.int32(0),
                num_seqs=jnp.int32(1),
                scale=heads.H**-0.5,
            )
        return q

    like = jax.ShapeDtypeStruct
    return chain.lower(
        like((T, heads.N, heads.H), jnp.bfloat16),
        like((heads.pages, 2, heads.K, S, heads.H), jnp.bfloat16),
        like((1, MAX_CONTEXT // S), jnp.int32),
    ).compile()


def operations(heads: Heads, T: int) -> float:
    """Floating-point operations of causal attention over T tokens."""
    return 4 * heads.N * heads.H * T * (T + 1) / 2


def time_prefill(
    heads: Heads, pool: jax.Array, T: int, kernel: str, compiled: Any
) -> dict[str, Any]:
    """Time and rate of one prompt's causal attention."""
    table = page_tables(heads, (T,), 1)[0]
    q = jax.random.normal(jax.random.key(2), (T, heads.N, heads.H), jnp.bfloat16)
    taken = seconds(lambda q: compiled(q, pool, table), q, 4)
    return {
        "heads": str(heads),
        "kernel": kernel,
        "work": f"prompt of {T}",
        "us": round(taken * 1e6, 1),
        "tflops": round(operations(heads, T) / taken / 1e12, 1),
    }


def time_cudnn(heads: Heads, T: int) -> dict[str, Any]:
    """cuDNN's attention over dense keys and values of the same prompt."""
    rng = jax.random.split(jax.random.key(3), 3)
    q, k, v = (
        jax.random.normal(key, (1, T, n, heads.H), jnp.bfloat16)
        for key, n in zip(rng, (heads.N, heads.K, heads.K), strict=True)
    )

    @jax.jit
    def chain(q: jax.Array) -> jax.Array:
        for _ in range(4):
            q = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
        return q

    taken = seconds(chain, q, 4)
    return {
        "heads": str(heads),
        "kernel": "cuDNN, dense",
        "work": f"prompt of {T}",
        "us": round(taken * 1e6, 1),
        "tflops": round(operations(heads, T) / taken / 1e12, 1),
    }


def in_parallel(jobs: Sequence[Callable[[], Any]]) -> list[Any]:
    """Results of all jobs, compiled on all cores."""
    with ThreadPoolExecutor(16) as pool:
        return [future.result() for future in [pool.submit(job) for job in jobs]]


def main() -> None:
    """Time all kernels and write results/kernels.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--prompts", type=int, nargs="+", default=[512, 8192], help="tokens of the prefills"
    )
    parser.add_argument(
        "--pages",
        nargs="+",
        default=["bfloat16", "float8_e4m3fn", "int8"],
        help="dtypes of the pages that decode attention reads",
    )
    args = parser.parse_args()
    prompts = args.prompts
    pairs = list(product(MODELS, BATCHES, args.pages))
    compiles = [partial(compile_decode, heads, B, None, pages) for heads, B, pages in pairs]
    decoders = dict(zip(pairs, in_parallel(compiles), strict=True))
    works = list(product(MODELS, prompts, PREFILLS))
    jobs = [partial(compile_prefill, heads, T, PREFILLS[name]) for heads, T, name in works]
    prefills = dict(zip(works, in_parallel(jobs), strict=True))
    decoded, prefilled = [], []
    for heads in MODELS:
        for pages in args.pages:
            pool = make_pool(heads, pages)
            for work in WORK:
                compiled = decoders[heads, work[0], pages]
                decoded.append(time_decode(heads, pool, work, compiled, pages))
                print(decoded[-1], flush=True)
            del pool
        pool = make_pool(heads)
        for prompt, kernel in product(prompts, PREFILLS):
            compiled = prefills[heads, prompt, kernel]
            prefilled.append(time_prefill(heads, pool, prompt, kernel, compiled))
            print(prefilled[-1], flush=True)
        del pool
        if heads.H <= 128:
            prefilled.append(time_cudnn(heads, max(prompts)))
            print(prefilled[-1], flush=True)
    settings = {
        f"{heads} B {B}": asdict(
            decode.tuning_config(B=B, K=heads.K, H=heads.H, bytes_per_element=2)
        )
        for heads, B in product(MODELS, BATCHES)
    }
    path = write_results(
        "kernels",
        {
            "copy_rate": COPY_RATE,
            "decode": decoded,
            "prefill": prefilled,
            "decode_settings": settings,
        },
    )
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
