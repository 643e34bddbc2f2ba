"""Writing a step's new keys and values into their pages."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.page_scales import FLOAT8, narrowed, slot_scale


def write_kv_pages(
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    pages_P2KSH: jax.Array,
    page_T: jax.Array,
    slot_T: jax.Array,
    page_scales: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Put token t's key and value into slot `slot_T[t]` of page `page_T[t]`.

    In place when the pages are donated: one scatter whose window, [2, K, H], keeps the heads
    whole, so that pages sharded on K stay where they are. Several tokens may name the same slot
    (padding does, in page 0); one of them wins.

    Args:
        k_TKH, v_TKH: new keys and values, cast to the pages' dtype.
        pages_P2KSH: the pool, keys at 0 and values at 1. XLA's CPU backend has no bfloat16
            scatter and converts the whole pool twice; every other dtype is updated in place.
        page_T, slot_T: int32, inside the pool.
        page_scales: of pages of one byte; see `page_scales`.

    Returns:
        The updated pool, and its scales: where they belong to slots, with the tokens' own.
    """
    kv_T2KH, dtype = jnp.stack([k_TKH, v_TKH], axis=1), pages_P2KSH.dtype
    if page_scales is None:
        kv_T2KH = kv_T2KH.astype(dtype)
    elif page_scales.ndim == 2:
        kv_T2KH = narrowed(kv_T2KH, page_scales[:, :, None], dtype)
    else:
        scale_T2K = slot_scale(jnp.abs(kv_T2KH).max(axis=-1))
        kv_T2KH = narrowed(kv_T2KH, scale_T2K[..., None], dtype)
        page_scales = page_scales.at[page_T, :, :, slot_T].set(scale_T2K, mode="promise_in_bounds")
    if dtype in FLOAT8:
        return _write_one_by_one(kv_T2KH, pages_P2KSH, page_T, slot_T), page_scales
    pages_P2KSH = pages_P2KSH.at[page_T, :, :, slot_T].set(kv_T2KH, mode="promise_in_bounds")
    return pages_P2KSH, page_scales


def _write_one_by_one(
    kv_T2KH: jax.Array, pages_P2KSH: jax.Array, page_T: jax.Array, slot_T: jax.Array
) -> jax.Array:
    """The scatter for dtypes in which XLA's CPU backend has none."""

    def write(t: jax.Array, pages_P2KSH: jax.Array) -> jax.Array:
        kv_12K1H = kv_T2KH[t][None, :, :, None]
        return lax.dynamic_update_slice(pages_P2KSH, kv_12K1H, (page_T[t], 0, 0, slot_T[t], 0))

    return lax.fori_loop(0, kv_T2KH.shape[0], write, pages_P2KSH)
