"""Pages of one byte as pairs, the way tensor cores like their operands.

Two neighbours of a row, an even column and an odd one, come as one number of 16 bits: what is
loaded is as wide as what is multiplied, so that it goes from memory to registers by the same
instructions as half precision. There a few instructions make two float16 of every four bytes; what
Triton itself makes of a conversion takes longer than the bytes do. Products of rows are then sums
over even and odd columns. (Prefill has no registers left for that: it takes whole rows.)

No kernel sees a pool's bytes, also not to write them: JAX's Triton kernels count elements in 32
bits with a sign as long as an array has no more than 4 GiB, which may be more bytes than that.

These functions run inside kernels of Pallas' Triton dialect.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.elementwise import elementwise

# PTX from two pairs, $1, to their even halves or their odd ones, $0.
CONVERSIONS = {
    "float8_e4m3fn": tuple(
        f"""{{
            .reg .b32 sorted;
            .reg .b16 two, rest;
            prmt.b32 sorted, $1, 0, {bytes};
            mov.b32 {{two, rest}}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, two;
        }}"""
        for bytes in ("0x4420", "0x4431")
    ),
    # The upper byte of a float16.
    "float8_e5m2": ("prmt.b32 $0, $1, 0, 0x2404;", "and.b32 $0, $1, 0xff00ff00;"),
    # 1152 + x has x + 128 as its lower byte.
    "int8": tuple(
        f"""{{
            .reg .b32 sum, bias;
            prmt.b32 sum, $1, 0, {bytes};
            xor.b32 sum, sum, 0x64806480;
            mov.b32 bias, 0x64806480;
            sub.f16x2 $0, sum, bias;
        }}"""
        for bytes in ("0x4240", "0x4341")
    ),
}


def makes_pairs(H: int) -> bool:
    """Whether halves of such rows are whole pairs, and half as many of them as numbers also where
    kernels pad either to a power of two of at least 16.
    """
    return H % 4 == 0 and H > 16


def as_pairs(pages_P2KSH: jax.Array) -> jax.Array:
    """Pages of one byte as uint16[P, 2, K, S, H / 2], the same memory; others as they are.

    Raises:
        ValueError: rows that `makes_pairs` says no to.
    """
    *shape, H = pages_P2KSH.shape
    if pages_P2KSH.dtype.itemsize > 1:
        return pages_P2KSH
    if not makes_pairs(H):
        raise ValueError(f"heads in pages of one byte must be multiples of 4 from 20, got {H}")
    return lax.bitcast_convert_type(pages_P2KSH.reshape(*shape, H // 2, 2), jnp.uint16)


def from_pairs(pool: jax.Array, stored: Any) -> jax.Array:
    """The reverse, for pages of this dtype."""
    if jnp.dtype(stored).itemsize > 1:
        return pool
    return lax.bitcast_convert_type(pool, stored).reshape(*pool.shape[:-1], -1)


def even_and_odd(pair: jax.Array, stored: Any, *, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """The float16 halves of numbers of a dtype of one byte.

    Args:
        interpret: by plain JAX, for any platform.
    """
    if interpret:
        both = lax.bitcast_convert_type(lax.bitcast_convert_type(pair, jnp.uint8), stored)
        return both[..., 0].astype(jnp.float16), both[..., 1].astype(jnp.float16)
    even, odd = (
        elementwise(code, "=r,r", pair, dtype=jnp.float16, pack=2)
        for code in CONVERSIONS[jnp.dtype(stored).name]
    )
    return even, odd


def paired(x_RH: jax.Array) -> jax.Array:
    """uint16[R, H / 2] of numbers of one byte, as `as_pairs` has them."""
    even, odd = split_columns(lax.bitcast_convert_type(x_RH, jnp.uint8).astype(jnp.uint16))
    return even | (odd << 8)


def unpaired(pair_RD: jax.Array, stored: Any) -> jax.Array:
    """The reverse, in a dtype of one byte."""
    even, odd = ((pair_RD >> shift).astype(jnp.uint8) for shift in (0, 8))
    return lax.bitcast_convert_type(join_columns(even, odd), stored)


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
