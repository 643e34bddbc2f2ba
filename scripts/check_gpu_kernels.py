"""Compare kernels with their definitions on the GPU of this machine.

    python scripts/check_gpu_kernels.py [DTYPE...]

Attention against float64, rope_write against plain XLA.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "fixtures")]

from ragged_attention import (  # noqa: E402
    Ragged,
    attention_by_definition,
    in_one_byte,
    ragged_batch,
)

from pallas_kernels.paged_attention_prefill import paged_attention_prefill  # noqa: E402
from pallas_kernels.paged_attention_prefill_mosaic import (  # noqa: E402
    paged_attention_prefill_mosaic,
)
from pallas_kernels.paged_attention_triton import paged_attention_triton  # noqa: E402
from pallas_kernels.rope_write import (  # noqa: E402
    Written,
    rope_write,
    rope_write_reference,
)

TOLERANCE = {"float32": 1e-5, "float16": 3e-3, "bfloat16": 2e-2}
EMPTY = 1  # the sequence that is given a length of 0
DECODES = [(1, 1), (1, 17), (1, 900), (1, 2048), (1, 500), (1, 128)]
MIXED = [*DECODES, (5, 5), (40, 700), (64, 64), (17, 300)]
SHAPES: tuple[dict[str, Any], ...] = (
    {"N": 28, "K": 4, "H": 128},
    {"N": 32, "K": 8, "H": 128, "S": 32, "M": 64},
    {"N": 16, "K": 8, "H": 64, "S": 64, "M": 32},
    {"N": 4, "K": 1, "H": 256},
    {"N": 4, "K": 4, "H": 80, "S": 128, "M": 16},
    {"N": 16, "K": 1, "H": 96},
)
ONE_BYTE = ("float8_e4m3fn", "float8_e5m2", "int8")
OPTIONS: tuple[dict[str, Any], ...] = ({}, {"window": 100, "softcap": 5.0})


def pages_before(pages_P2KSH: jax.Array, gib: int | None) -> int:
    """How many more pages make an array of so many GiB; None: as it is."""
    count, *page = pages_P2KSH.shape
    return 0 if gib is None else (gib << 30) // (pages_P2KSH.itemsize * math.prod(page)) - count


def is_of_pages(x: Any) -> bool:
    """Whether this is a pool, or the scales of its slots, and not other scales, or none."""
    return x is not None and x.ndim >= 4


def behind(before: int, x: Any) -> Any:
    """What is of pages behind so many of zeros, all else as it is."""
    return jnp.pad(x, [(before, 0)] + [(0, 0)] * (x.ndim - 1)) if is_of_pages(x) else x


def at_the_end_of(r: Ragged, gib: int | None) -> Ragged:
    """The same batch in the last pages of an array of so many GiB."""
    before = pages_before(r.pages_P2KSH, gib)
    return dataclasses.replace(
        r,
        pages_P2KSH=behind(before, r.pages_P2KSH),
        page_table_BM=r.page_table_BM + before,
        page_scales=behind(before, r.page_scales),
    )


def check_attention(
    shape: dict[str, Any],
    dtype: str,
    kind: str,
    options: dict[str, Any],
    pages: str | None = None,
    pool_gib: int | None = None,
) -> tuple[float, float]:
    """Worst difference of one case, and what is allowed; `pages` of one byte or of `dtype`."""
    decode_only = kind == "decode"
    r = ragged_batch(
        DECODES if decode_only else MIXED,
        T=16 if decode_only else 160,
        B=16,
        dtype=dtype,
        **{"M": 128, **shape},
    )
    if pages is not None:
        r = in_one_byte(r, pages)
    attend: Callable[..., jax.Array] = partial(
        paged_attention_triton,
        scale=0.1,
        decode_only=decode_only,
        prefill=paged_attention_prefill_mosaic if kind == "mosaic" else paged_attention_prefill,
        **options,
    )

    @jax.jit
    def layers(q_TNH: jax.Array, **rest: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Two layers in turn, which share what decoding plans for a step."""
        first = attend(q_TNH, **rest)
        turned, _ = jax.lax.optimization_barrier((-q_TNH, first))
        return first, attend(turned, **rest)

    worst = 0.0
    got = layers(**{**vars(at_the_end_of(r, pool_gib)), "kv_len_B": r.kv_len_B.at[EMPTY].set(0)})
    for sign, out in zip((1, -1), got, strict=True):
        want = attention_by_definition(r, scale=sign * 0.1, **options)
        want[EMPTY] = 0
        worst = np.maximum(worst, np.abs(np.asarray(out.astype(jnp.float32)) - want).max())
    return worst, TOLERANCE[dtype]


def check_rope_write(
    shape: dict[str, Any],
    dtype: str,
    kind: str,
    options: dict[str, Any],
    pages: str | None = None,
    pool_gib: int | None = None,
) -> tuple[float, float]:
    """Worst difference from the plain version, in queries and pages, and what is allowed."""
    T, P = 300, 64
    N, K, H, S = shape["N"], shape["K"], shape["H"], shape.get("S", 16)
    rng = np.random.default_rng(0)

    def normal(*size: int, dtype: str = dtype) -> jax.Array:
        return jnp.asarray(rng.normal(size=size), dtype)

    angle = rng.uniform(0, 6, (T, H // 2))
    # Each token its own slot: which one wins a shared slot is not said.
    place_T = rng.permutation(P * S)[:T].astype(np.int32)
    activations = (
        normal(T, K, N // K + 2, H),
        jnp.asarray(np.cos(angle), jnp.float32),
        jnp.asarray(np.sin(angle), jnp.float32),
    )
    stored = normal(P, 2, K, S, H, dtype=dtype if pages is None else "float32")
    stored = stored.astype(pages or dtype)
    norms = (normal(H), normal(H)) if options["norm"] else None
    scales = None
    if pages is not None:
        scales = jnp.full((P, 2, K, S) if pages == "int8" else (2, K), 0.05)

    def written(write: Callable[..., Written], before: int) -> tuple[jax.Array, ...]:
        run = partial(write, eps=1e-6, plus_one=options["plus_one"])
        q_TNH, *paged = jax.jit(run, donate_argnums=3 if before else ())(
            *activations,
            behind(before, stored),
            jnp.asarray(before + place_T // S),
            jnp.asarray(place_T % S),
            norms,
            page_scales=behind(before, scales),
        )
        if not jax.jit(lambda x: (x[:before] == 0).all())(paged[0]):
            raise AssertionError("pages were written that no token names")
        return q_TNH, *(x[before:] if is_of_pages(x) else x for x in paged)

    got = written(rope_write, pages_before(stored, pool_gib))
    want = written(rope_write_reference, 0)
    if scales is not None:  # compared as they are read
        got, want = (
            (q, values.astype("float32") * (x[..., None] if x.ndim == 4 else 0.05))
            for q, values, x in (got, want)
        )
    differences = [
        np.asarray(jnp.abs(a.astype("float32") - b.astype("float32")).max())
        for a, b in zip(got[:2], want[:2], strict=True)
    ]
    if pages is not None:  # a rounding apart may cross a border: one step of the largest value
        return float(np.max(differences)), {"int8": 0.1, "float8_e4m3fn": 1, "float8_e5m2": 2}[
            pages
        ]
    # XLA may keep more digits between norm and rotation than the kernel, which rounds there.
    return float(np.max(differences)), 20 * TOLERANCE[dtype]


def cases(dtypes: Sequence[str]) -> Iterator[tuple[Callable[..., tuple[float, float]], Any]]:
    """Every case: its check, and what it is of."""
    for shape, dtype, options in product(SHAPES, dtypes, OPTIONS):
        hopper = dtype != "float32" and shape["H"] in (64, 128, 256) and shape.get("S", 16) <= 64
        for kind in ("decode", "triton", "mosaic")[: 2 + hopper]:
            yield check_attention, (shape, dtype, kind, options)
    for shape, pages, kind in product(SHAPES, ONE_BYTE, ("decode", "triton")):
        yield check_attention, (shape, dtypes[0], kind, OPTIONS[1], pages)
    for shape, pages in zip(SHAPES, 2 * ONE_BYTE, strict=True):
        options = {"norm": True, "plus_one": True}
        yield check_rope_write, (shape, dtypes[0], "rope", options, pages)
    for shape, dtype in product(SHAPES, dtypes):
        for norm, plus_one in ((False, False), (True, True)):
            yield check_rope_write, (shape, dtype, "rope", {"norm": norm, "plus_one": plus_one})
    # Pools whose ends 32 bits do not reach, and ones whose bytes 32 bits with a sign do not.
    plain = {"norm": False, "plus_one": False}
    for pages, gib in ((None, 5), *product(("float8_e4m3fn", "int8"), (3, 5))):
        for kind in ("decode", "triton", "mosaic")[: 3 if pages is None else 2]:
            yield check_attention, (SHAPES[0], "bfloat16", kind, OPTIONS[0], pages, gib)
        yield check_rope_write, (SHAPES[0], "bfloat16", "rope", plain, pages, gib)


def run(case: tuple[Callable[..., tuple[float, float]], Any]) -> bool:
    """Whether a case is right; prints it."""
    check, what = case
    worst, allowed = check(*what)
    good = bool(worst <= allowed)  # NaN is not
    print("ok  " if good else "BAD ", f"{worst:.1e}", *what, flush=True)
    return good


def main() -> int:
    """Check all cases, or those of the dtypes given; returns 1 if any is wrong."""
    with ThreadPoolExecutor() as pool:
        good = list(pool.map(run, cases(sys.argv[1:] or list(TOLERANCE))))
    print(
        f"{jax.devices()[0].device_kind}, jax {jax.__version__}: {sum(good)} of {len(good)} right"
    )
    return int(not all(good))


if __name__ == "__main__":
    sys.exit(main())
