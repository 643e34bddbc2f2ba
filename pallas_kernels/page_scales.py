"""Keys and values in pages of one byte: how they are stored, and what they are read with.

What a slot holds times its scale is the key or value. Floats of eight bits share a scale that is
given, one for the keys and one for the values of each KV head: [2, K]. Integers have one of their
own in every slot, [P, 2, K, S], which is written with them and never again: a page that sequences
share stays as it is.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

FLOAT8 = (jnp.float8_e4m3fn, jnp.float8_e5m2)
SMALLEST = 1e-20  # largest value that a slot's scale is made for, so that none is 0


def computed_dtype(q_dtype: Any, page_dtype: Any) -> jnp.dtype:
    """What attention multiplies in: the wider of both, the queries' if pages are of one byte.

    (Kernels may take float16 there, which holds all that a byte does, in place of bfloat16.)
    """
    if jnp.dtype(page_dtype).itemsize == 1:
        return jnp.dtype(q_dtype)
    return jnp.promote_types(q_dtype, page_dtype)


def check_page_scales(pages_P2KSH: jax.Array, page_scales: jax.Array | None) -> None:
    """Raise ValueError unless the scales are those that pages of this dtype have."""
    P, _, K, S, _ = pages_P2KSH.shape
    dtype = pages_P2KSH.dtype
    expected: tuple[int, ...] | None = None
    if dtype == jnp.int8:
        expected = (P, 2, K, S)
    elif dtype in FLOAT8:
        expected = (2, K)
    elif dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(
            "pages must be float32, bfloat16, float16, float8_e4m3fn, float8_e5m2 or int8, "
            f"got {dtype}"
        )
    found = None if page_scales is None else page_scales.shape
    if found != expected:
        raise ValueError(f"pages of {dtype} have scales {expected}, got {found}")


def slot_scale(largest: jax.Array) -> jax.Array:
    """The scale of int8 slots whose largest magnitudes these are."""
    return jnp.maximum(largest.astype(jnp.float32), SMALLEST) / 127


def narrowed(x: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    """x / scale in a dtype of one byte; what lies beyond its range becomes its largest value."""
    x = x.astype(jnp.float32) / scale
    if dtype == jnp.int8:
        return jnp.clip(jnp.floor(x + 0.5), -127, 127).astype(dtype)
    bound = float(jnp.finfo(dtype).max)
    return jnp.clip(x, -bound, bound).astype(dtype)
