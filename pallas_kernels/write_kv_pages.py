"""Writing a step's new keys and values into their pages."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def write_kv_pages(
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    pages_P2KSH: jax.Array,
    page_T: jax.Array,
    slot_T: jax.Array,
) -> jax.Array:
    """Put token t's key and value into slot `slot_T[t]` of page `page_T[t]`.

    In place when the pages are donated: one scatter whose window, [2, K, H], keeps the heads
    whole, so that pages sharded on K stay where they are. Several tokens may name the same slot
    (padding does, in page 0); one of them wins.

    Args:
        k_TKH, v_TKH: new keys and values, cast to the pages' dtype.
        pages_P2KSH: the pool, keys at 0 and values at 1. XLA's CPU backend has no bfloat16
            scatter and converts the whole pool twice; every other dtype is updated in place.
        page_T, slot_T: int32, inside the pool.

    Returns:
        The updated pool.
    """
    kv_T2KH = jnp.stack([k_TKH, v_TKH], axis=1).astype(pages_P2KSH.dtype)
    return pages_P2KSH.at[page_T, :, :, slot_T].set(kv_T2KH, mode="promise_in_bounds")
