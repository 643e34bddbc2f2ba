"""Compare the attention kernels with their definition in float64 on the GPU of this machine."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "fixtures")]

from ragged_attention import attention_by_definition, ragged_batch  # noqa: E402

from pallas_kernels.paged_attention_triton import paged_attention_triton  # noqa: E402

TOLERANCE = {"float32": 1e-5, "float16": 3e-3, "bfloat16": 2e-2}
DECODES = [(1, 1), (1, 17), (1, 900), (1, 2048), (1, 500), (1, 128)]
MIXED = [*DECODES, (5, 5), (100, 1100), (64, 64), (33, 700)]
SHAPES = (
    {"N": 28, "K": 4, "H": 128},
    {"N": 32, "K": 8, "H": 128, "S": 32, "M": 64},
    {"N": 16, "K": 8, "H": 64, "S": 64, "M": 32},
    {"N": 4, "K": 1, "H": 256},
    {"N": 4, "K": 4, "H": 80, "S": 128, "M": 16},
    {"N": 16, "K": 1, "H": 96},
)
OPTIONS: tuple[dict[str, float], ...] = ({}, {"window": 100, "softcap": 5.0})


def main() -> int:
    """Print a line a case; returns 1 if any is wrong."""
    failed = 0
    for number, shape in enumerate(SHAPES):
        for dtype, tolerance in TOLERANCE.items():
            for sequences, T in ((DECODES, 16), (MIXED, 256)):
                r = ragged_batch(
                    sequences, T=T, B=16, dtype=dtype, seed=number, **{"M": 128, **shape}
                )
                for options in OPTIONS:
                    step = partial(
                        paged_attention_triton, scale=0.1, decode_only=sequences is DECODES,
                        **options,
                    )
                    got = np.asarray(
                        jax.jit(step)(
                            r.q_TNH, r.pages_P2KSH, r.page_table_BM,
                            query_start_B1=r.query_start_B1, kv_len_B=r.kv_len_B,
                            num_decodes=r.num_decodes, num_seqs=r.num_seqs,
                        ).astype(jnp.float32)
                    )
                    want = attention_by_definition(r, scale=0.1, **options)
                    worst = np.abs(got - want).max()
                    good = bool(worst <= tolerance)  # NaN is not
                    failed += not good
                    print("ok  " if good else "BAD ", f"{worst:.1e}", shape, dtype, T, options)
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}: {failed} failed")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
