"""Compile the Hopper kernel for an H200 on a machine that has none; prints a line a case.

A program of its own for the reasons that compile_for_h200.py gives.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from compile_for_h200 import h200_mesh
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels.paged_attention_prefill_mosaic import paged_attention_prefill_mosaic

CASES = (  # N, K, H, S, dtype, options
    (32, 8, 128, 16, "bfloat16", {}),
    (28, 4, 128, 64, "bfloat16", {}),
    (16, 1, 128, 32, "bfloat16", {"window": 20}),
    (8, 2, 128, 32, "bfloat16", {"window": 200, "softcap": 3.0}),
    (14, 2, 64, 32, "float16", {}),
    (2, 2, 64, 16, "bfloat16", {}),
    (4, 1, 256, 16, "bfloat16", {}),
)


def from_packed(
    q_TNH: jax.Array, pages: jax.Array, table_BM: jax.Array, words_X: jax.Array, **options: Any
) -> jax.Array:
    """The step's small arrays are slices of one, as in an engine."""
    return paged_attention_prefill_mosaic(
        q_TNH,
        pages,
        table_BM,
        query_start_B1=words_X[:257],
        kv_len_B=words_X[300:556],  # XLA passes a large slice on as it lies
        num_decodes=words_X[600],
        num_seqs=words_X[601],
        **options,
    )


def main() -> None:
    mesh = h200_mesh()
    sharding = NamedSharding(mesh, PartitionSpec())

    def like(shape: tuple[int, ...], dtype: str = "int32") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)

    for N, K, H, S, dtype, options in CASES:
        step = jax.jit(partial(from_packed, scale=H**-0.5, **options))
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            compiled = step.lower(
                like((256, N, H), dtype),
                like((4096, 2, K, S, H), dtype),
                like((256, 512)),
                like((1024,)),
            ).compile()
        # Given a slice as it lies, the kernel refuses it for its address: on the card alone.
        if "dynamic_slice_fusion" in compiled.as_text():
            raise SystemExit("the kernel is handed a slice of an array")
        print(f"compiled {N}/{K}/{H} {S} {dtype} {options}", flush=True)


if __name__ == "__main__":
    main()
