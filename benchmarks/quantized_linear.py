"""Products with quantized weights on a GPU, as a layer of Qwen2.5 7B has them.

Each scheme of `--quantization` beside bfloat16: microseconds a product, what share of that the
bytes of its weights and scales take at a plain copy's rate, and the largest error beside float32
products with the same weights, in parts of the largest result. Where few rows have a kernel,
XLA's way is measured too.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.common import write_results
from benchmarks.sampling import COPY_RATE
from jaxpaged.quantization import KERNEL, ON_THE_FLY, Around, arrange
from jaxpaged.quantization.scheme import contract
from pallas_kernels import quantized_linear_mosaic as mosaic
from pallas_kernels.quantized_linear import MAX_E4M3_ROWS, MAX_ROWS
from pallas_kernels.rms_norm import Rows

SHAPES = {"qkv": (3584, 4608), "o": (3584, 3584), "gate_up": (3584, 37888), "down": (18944, 3584)}
CACHE = 100e6  # bytes that a chain's weights take at least: more than the card caches
Arrays = dict[str, jax.Array]


@partial(jax.jit, static_argnums=(0, 1, 2))
def weights(name: str, size: int, outputs: int, seed: int) -> Arrays:
    """Normal weights as a scheme stores them."""
    dense = jax.random.normal(jax.random.key(seed), (outputs, size)) * size**-0.5
    if name == "bfloat16":
        return {KERNEL: dense.astype(jnp.bfloat16)}
    made = ON_THE_FLY[name].scheme.quantize(dense)
    return {array: arrange(array, x, x.ndim == 2) for array, x in made.items()}


def way(name: str, fuse: bool) -> Callable[[jax.Array, Arrays], jax.Array]:
    """A product (rows, arrays)."""
    if name == "bfloat16":
        return lambda x_TI, arrays: contract(x_TI, arrays[KERNEL])
    return partial(_product, name, fuse)


def _product(name: str, fuse: bool, x_TI: jax.Array, arrays: Arrays) -> jax.Array:
    scheme: Any = ON_THE_FLY[name].scheme
    if fuse:
        return scheme.fused(Rows(x_TI), arrays, Around(), x_TI.dtype).x
    return scheme.product(x_TI, arrays, x_TI.dtype)


def chain(
    one: Callable[[jax.Array, Arrays], jax.Array],
    passes: int,
    x_TI: jax.Array,
    pool: list[Arrays],
) -> jax.Array:
    """Products with each of the pool, again and again, one after the other; the last result."""

    def go_through(_: Any, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x_TI, y = carry
        columns = []
        for arrays in pool:
            x_TI, y = jax.lax.optimization_barrier((x_TI, one(x_TI, arrays)))
            columns.append(y[:, :1])
        # The next pass needs something of all of them, or XLA would leave products out.
        return x_TI + (0 * sum(columns)).astype(x_TI.dtype), y

    like = jax.eval_shape(one, x_TI, pool[0])
    first = x_TI, jnp.zeros(like.shape, like.dtype)
    return jax.lax.fori_loop(0, passes, go_through, first)[1]


def passes_for(T: int, where: str, num_bytes: int, count: int) -> int:
    """So many that a chain takes milliseconds: the host needs a tenth of one to start it."""
    least = max(num_bytes / COPY_RATE, 2 * T * math.prod(SHAPES[where]) / 1e15)
    return math.ceil(2e-3 / (least * count))


def microseconds(run: Any, x_TI: jax.Array, pool: list[Arrays], calls: int) -> float:
    """Median time of a product; chains are queued back to back."""
    for _ in range(3):  # the card's clock rises meanwhile
        run(x_TI, pool).block_until_ready()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(4):
            y = run(x_TI, pool)
        y.block_until_ready()
        times.append((time.perf_counter() - start) / (4 * calls))
    return round(statistics.median(times) * 1e6, 1)


def error(name: str, x_TI: jax.Array, arrays: Arrays, y: jax.Array) -> float:
    """Beside the plain product of the same rows and weights in float32."""
    want = _product(name, False, x_TI.astype(jnp.float32), arrays)
    return float(jnp.max(jnp.abs(y - want)) / jnp.max(jnp.abs(want)))


def main() -> int:
    """Measure all, print it and write it to results/quantized_linear.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 32, 64, 256, 4096])
    parser.add_argument("--products", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--schemes", nargs="+", default=list(ON_THE_FLY), choices=list(ON_THE_FLY))
    args = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    good = True
    with ThreadPoolExecutor() as threads:
        for where in args.products:
            size, outputs = SHAPES[where]
            for name in ("bfloat16", *args.schemes):
                first = weights(name, size, outputs, 0)
                num_bytes = sum(x.nbytes for x in first.values())
                count = max(1, math.ceil(CACHE / num_bytes))
                pool = [first, *(weights(name, size, outputs, i) for i in range(1, count))]
                rows = {T: jax.random.normal(jax.random.key(T), (T, size)) for T in args.rows}
                rows = {T: x.astype(jnp.bfloat16) for T, x in rows.items()}
                most = mosaic.MAX_ROWS if mosaic.is_hopper() else MAX_ROWS
                most = MAX_E4M3_ROWS if name.startswith("fp8") else most
                most = 0 if name == "bfloat16" else most
                cases = [
                    (T, fuse)
                    for T, fuse in product(args.rows, (False, True))
                    if not fuse or most >= T
                ]
                passes = {T: passes_for(T, where, num_bytes, count) for T in args.rows}
                build = partial(_compile, name, rows=rows, pool=pool, passes=passes)
                compiled = list(threads.map(build, cases))
                for (T, fuse), run in zip(cases, compiled, strict=True):
                    taken = microseconds(run, rows[T], pool, passes[T] * count)
                    figures = {"us": taken, "share": round(num_bytes / COPY_RATE * 1e6 / taken, 3)}
                    if fuse:
                        y = run(rows[T], pool)
                        figures["error"] = error(name, rows[T], pool[-1], y)
                        good &= figures["error"] < 1e-2
                    key = f"{where} {T} {name} {'kernel' if fuse else 'XLA'}"
                    found[key] = figures
                    print(key, figures, flush=True)
                del pool, first
            path = write_results("quantized_linear", {"products": found})
    print(path)
    return 0 if good else 1


def _compile(
    name: str, case: tuple[int, bool], *, rows: Any, pool: list[Arrays], passes: dict[int, int]
) -> Any:
    T, fuse = case
    run = partial(chain, way(name, fuse), passes[T])
    return jax.jit(run).lower(rows[T], pool).compile()


if __name__ == "__main__":
    raise SystemExit(main())
