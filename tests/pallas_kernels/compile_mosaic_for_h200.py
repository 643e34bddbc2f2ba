"""Compile the Hopper kernels for an H200 on a machine that has none; prints a line a case.

A program of its own for the reasons that compile_for_h200.py gives.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from compile_for_h200 import h200_mesh
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.paged_attention_prefill_mosaic import paged_attention_prefill_mosaic
from pallas_kernels.quantized_linear_mosaic import quantized_linear_mosaic
from pallas_kernels.rms_norm import HalfNormed, Rows
from pallas_kernels.wide_integers import packed

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


# T, D, F, kernel, dtype of the rows, groups, what else: products of Qwen2.5 7B, and smaller ones.
PRODUCTS: tuple[tuple[int, int, int, str, str, int, set[str]], ...] = (
    (5, 3584, 37888, "uint16", "bfloat16", 28, {"activation", "square"}),
    (16, 18944, 3584, "uint16", "float16", 148, {"residual", "zero"}),
    (20, 3584, 37888, "uint16", "bfloat16", 28, {"activation"}),
    (64, 3584, 37888, "uint16", "bfloat16", 28, {"activation", "square", "zero"}),
    (64, 18944, 3584, "uint16", "bfloat16", 148, {"residual"}),
    (128, 3584, 4608, "uint16", "bfloat16", 28, {"square", "bias", "zero"}),
    (64, 3584, 37888, "int16", "bfloat16", 1, {"activation", "square"}),
    (128, 18944, 3584, "int16", "bfloat16", 1, {"residual"}),
    (32, 3584, 152064, "int16", "bfloat16", 1, {"square"}),
    (40, 1024, 512, "int16", "float16", 16, {"zero", "bias"}),
    (100, 1024, 384, "uint16", "float16", 1, {"residual", "zero"}),
)


def product(
    x_TD: jax.Array, square_XT: jax.Array, *operands: jax.Array, halves: bool, **options: Any
) -> Rows:
    x = HalfNormed(x_TD, square_XT) if halves else x_TD
    return quantized_linear_mosaic(x, *operands, eps=1e-6, **options)


def compile_products(mesh: Mesh, like: Any) -> None:
    for T, D, F, kernel, dtype, groups, others in PRODUCTS:
        optional = {
            "zero": {"zero_GF": like((groups, F), "int8")},
            "bias": {"bias_F": like((F,), dtype)},
            "residual": {
                "residual_TF": like((T, F), dtype),
                "next_scale_F": like((F,), dtype),
            },
        }
        arrays: dict[str, Any] = {}
        for name in others & optional.keys():
            arrays |= optional[name]
        run = partial(
            product,
            halves="square" in others,
            activation="silu" if "activation" in others else None,
        )
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            jax.jit(run).lower(
                like((T, D), dtype),
                like((D // 64, T), "float32"),
                like((F, D // packed(kernel)), kernel),
                like((groups, F) if groups > 1 else (F,), "float32"),
                **arrays,
            ).compile()
        print(f"compiled {T} {D} {F} {kernel} {dtype} {groups} {sorted(others)}", flush=True)


def compile_prefill(mesh: Mesh, like: Any) -> None:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kernel", choices=["prefill", "products"])
    mesh = h200_mesh()
    sharding = NamedSharding(mesh, PartitionSpec())

    def like(shape: tuple[int, ...], dtype: str = "int32") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)

    compiles = {"prefill": compile_prefill, "products": compile_products}
    compiles[parser.parse_args().kernel](mesh, like)


if __name__ == "__main__":
    main()
