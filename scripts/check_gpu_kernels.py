"""Compare the attention kernels with their definition in float64 on the GPU of this machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
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

from ragged_attention import attention_by_definition, ragged_batch  # noqa: E402

from pallas_kernels.paged_attention_triton import paged_attention_triton  # noqa: E402

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
OPTIONS: tuple[dict[str, Any], ...] = ({}, {"window": 100, "softcap": 5.0})


def check(shape: dict[str, Any], dtype: str, decode_only: bool, options: dict[str, Any]) -> bool:
    """Whether one case is right; prints it."""
    r = ragged_batch(
        DECODES if decode_only else MIXED,
        T=16 if decode_only else 160,
        B=16,
        dtype=dtype,
        **{"M": 128, **shape},
    )
    attend: Callable[..., jax.Array] = partial(
        paged_attention_triton, scale=0.1, decode_only=decode_only, **options
    )

    @jax.jit
    def layers(q_TNH: jax.Array, **rest: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Two layers in turn, which share what decoding plans for a step."""
        first = attend(q_TNH, **rest)
        turned, _ = jax.lax.optimization_barrier((-q_TNH, first))
        return first, attend(turned, **rest)

    worst = 0.0
    got = layers(**{**vars(r), "kv_len_B": r.kv_len_B.at[EMPTY].set(0)})
    for sign, out in zip((1, -1), got, strict=True):
        want = attention_by_definition(r, scale=sign * 0.1, **options)
        want[EMPTY] = 0
        worst = np.maximum(worst, np.abs(np.asarray(out.astype(jnp.float32)) - want).max())
    good = bool(worst <= TOLERANCE[dtype])  # NaN is not
    print("ok  " if good else "BAD ", f"{worst:.1e}", shape, dtype, decode_only, options)
    return good


def main() -> int:
    """Check all cases, or those of the dtypes given; returns 1 if any is wrong."""
    dtypes = sys.argv[1:] or list(TOLERANCE)
    cases = list(product(SHAPES, dtypes, (True, False), OPTIONS))
    with ThreadPoolExecutor() as pool:
        good = list(pool.map(lambda case: check(*case), cases))
    print(
        f"{jax.devices()[0].device_kind}, jax {jax.__version__}: {sum(good)} of {len(good)} right"
    )
    return int(not all(good))


if __name__ == "__main__":
    sys.exit(main())
