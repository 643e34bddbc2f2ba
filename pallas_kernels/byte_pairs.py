"""Pages of one byte read as pairs, the way tensor cores like their operands.

Two neighbours of a row, an even column and an odd one, come as one number of 16 bits: what is
loaded is as wide as what is multiplied, so that it goes from memory to registers by the same
instructions as half precision, and each half takes a few operations on integers to become a
float16. Products of rows are then sums over even and odd columns.

These functions run inside kernels of Pallas' Triton dialect.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# What a float16 made here is to be multiplied by.
UNIT = {"float8_e4m3fn": 256.0, "float8_e5m2": 1.0, "int8": 1.0}
WEIGHT_UNIT = 256.0  # slots' scales may be so small that weights of values need it in float16


def as_pairs(pages_P2KSH: jax.Array) -> jax.Array:
    """uint16[P, 2, K, S, H / 2]: the same memory."""
    shape = pages_P2KSH.shape
    pairs = pages_P2KSH.reshape(*shape[:-1], shape[-1] // 2, 2)
    return lax.bitcast_convert_type(pairs, jnp.uint16)


def even_and_odd(pair: jax.Array, stored: Any) -> tuple[jax.Array, jax.Array]:
    """The float16 halves, over `UNIT`, of numbers of a dtype of one byte."""
    if stored == jnp.int8:  # 1152 + x: its last byte is x + 128
        even, odd = (pair ^ 0x80) & 0xFF, (pair ^ 0x8000) >> 8
        return _half(even | 0x6400) - 1152, _half(odd | 0x6400) - 1152
    if stored == jnp.float8_e5m2:
        return _half(pair << 8), _half(pair & 0xFF00)
    # The exponent has a bit less and is 8 less: sign and the rest move apart.
    even = ((pair & 0x80) << 8) | ((pair & 0x7F) << 7)
    odd = (pair & 0x8000) | ((pair & 0x7F00) >> 1)
    return _half(even), _half(odd)


def split_columns(x_RH: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Even and odd columns, [R, H / 2] each."""
    R, H = x_RH.shape
    even, odd = jnp.split(x_RH.reshape(R, H // 2, 2), 2, axis=2)
    return even.reshape(R, H // 2), odd.reshape(R, H // 2)


def join_columns(even_RD: jax.Array, odd_RD: jax.Array) -> jax.Array:
    """The reverse."""
    R, D = even_RD.shape
    both = jnp.concatenate((even_RD[:, :, None], odd_RD[:, :, None]), axis=2)
    return both.reshape(R, 2 * D)


def _half(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.float16)
