"""Pairs of bytes as two float16."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.byte_pairs import (
    CONVERSIONS,
    as_pairs,
    even_and_odd,
    from_pairs,
    join_columns,
    paired,
    split_columns,
    unpaired,
)
from pallas_kernels.paged_attention_triton import paged_attention_triton
from pallas_kernels.rope_write import rope_write


@pytest.mark.parametrize("dtype", list(CONVERSIONS))
def test_every_byte_becomes_its_number(dtype: str) -> None:
    stored = np.arange(256, dtype=np.uint8).view(jnp.dtype(dtype))
    row = jnp.asarray(np.concatenate([stored, stored[::-1]])).reshape(1, 1, 1, 1, -1)
    halves = even_and_odd(as_pairs(row), row.dtype, interpret=True)
    for got, want in zip(halves, (row[..., ::2], row[..., 1::2]), strict=True):
        np.testing.assert_array_equal(got.astype("float32"), want.astype("float32"))


@pytest.mark.parametrize("dtype", list(CONVERSIONS))
def test_pairs_in_registers_are_those_in_memory(dtype: str) -> None:
    stored = np.random.default_rng(0).permutation(256).astype(np.uint8).view(jnp.dtype(dtype))
    row_RH = jnp.asarray(stored).reshape(4, 64)
    pair_RD = as_pairs(row_RH)
    np.testing.assert_array_equal(paired(row_RH), pair_RD)
    for back in (unpaired(pair_RD, row_RH.dtype), from_pairs(pair_RD, row_RH.dtype)):
        np.testing.assert_array_equal(
            np.asarray(back).view(np.uint8), stored.view(np.uint8).reshape(4, 64)
        )


def test_columns_are_split_and_joined() -> None:
    x = jnp.arange(12.0).reshape(2, 6)
    even, odd = split_columns(x)
    np.testing.assert_array_equal(odd, x[:, 1::2])
    np.testing.assert_array_equal(join_columns(even, odd), x)


def kernel_operands(jaxpr: Any) -> Iterator[Any]:
    """What every kernel in a function is given, outer functions' and inner ones'."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield from (operand.aval for operand in equation.invars)
        for inner in equation.params.values():
            if hasattr(inner, "jaxpr"):
                yield from kernel_operands(inner.jaxpr)


@pytest.mark.parametrize("gib", [3, 5])
@pytest.mark.parametrize("dtype", list(CONVERSIONS))
def test_kernels_can_count_what_large_pools_hold(dtype: str, gib: int) -> None:
    T, B, N, K, S, H = 32, 8, 8, 2, 16, 128
    P = (gib << 30) // (2 * K * S * H)

    def like(*shape: int, dtype: str = "int32") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    pool, table = like(P, 2, K, S, H, dtype=dtype), like(T, H // 2, dtype="float32")
    scales = like(*((P, 2, K, S) if dtype == "int8" else (2, K)), dtype="float32")
    qkv = like(T, K, N // K + 2, H, dtype="bfloat16")
    write = jax.make_jaxpr(rope_write)(
        qkv, table, table, pool, like(T), like(T), page_scales=scales
    )
    attend = jax.make_jaxpr(partial(paged_attention_triton, scale=0.1))(
        like(T, N, H, dtype="bfloat16"),
        pool,
        like(B, 64),
        query_start_B1=like(B + 1),
        kv_len_B=like(B),
        num_decodes=like(),
        num_seqs=like(),
        page_scales=scales,
    )
    operands = [x for traced in (write, attend) for x in kernel_operands(traced.jaxpr)]
    sizes = [(x.size, x.size * x.dtype.itemsize) for x in operands]
    assert [size for _, size in sizes].count(gib << 30) == 3
    # JAX's Triton kernels count in 32 bits, of which one is the sign, up to 4 GiB an array.
    assert all(count <= 1 << 31 or size > 1 << 32 for count, size in sizes)
