"""Pairs of bytes as two float16."""

from __future__ import annotations

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
