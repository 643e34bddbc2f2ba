"""Writing keys and values into pages."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.page_scales import narrowed, slot_scale
from pallas_kernels.write_kv_pages import write_kv_pages

P, K, S, H = 9, 2, 4, 8


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_tokens_land_in_their_slots_and_nothing_else_moves(dtype: str) -> None:
    rng = np.random.default_rng(0)
    pages = jnp.asarray(rng.normal(size=(P, 2, K, S, H)), dtype)
    k, v = (jnp.asarray(rng.normal(size=(5, K, H)), "float32") for _ in range(2))
    page, slot = [3, 8, 3, 1, 0], [0, 3, 2, 1, 0]
    expected = np.array(pages)
    for t in range(5):
        expected[page[t], 0, :, slot[t]] = k[t].astype(dtype)
        expected[page[t], 1, :, slot[t]] = v[t].astype(dtype)
    got, _ = write_kv_pages(k, v, pages, jnp.asarray(page), jnp.asarray(slot))
    assert got.dtype == dtype
    assert (np.asarray(got) == expected).all()


@pytest.mark.parametrize("tokens", [1, 7])
def test_donated_pages_are_written_in_place(tokens: int) -> None:
    pages = jnp.zeros((1000, 2, K, S, H))
    new = jnp.ones((tokens, K, H))
    place = jnp.zeros(tokens, jnp.int32)
    step = jax.jit(write_kv_pages, donate_argnums=2)
    memory = step.lower(new, new, pages, place, place).compile().memory_analysis()
    assert memory.temp_size_in_bytes < pages.nbytes / 10
    assert memory.alias_size_in_bytes == pages.nbytes


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_pages_of_eight_bit_floats_saturate_and_stay_in_place(dtype: str) -> None:
    pages, place = jnp.zeros((1000, 2, K, S, H), dtype), jnp.asarray([3, 999])
    k = jnp.full((2, K, H), 2.0).at[0].set(-1e9)
    scales = jnp.asarray([[1.0, 2.0], [0.5, 4.0]])  # of keys, of values
    step = jax.jit(write_kv_pages, donate_argnums=2).lower(k, k, pages, place, place % S, scales)
    memory = step.compile().memory_analysis()
    assert memory.temp_size_in_bytes < pages.nbytes / 10
    written, same = step.compile()(k, k, pages, place, place % S, scales)
    np.testing.assert_array_equal(same, scales)
    largest = float(jnp.finfo(dtype).max)
    assert (written[3, :, :, 3].astype("float32") == -largest).all()
    np.testing.assert_array_equal(
        written[999, :, :, 3, 0].astype("float32"), [[2.0, 1.0], [4.0, 0.5]]
    )


def test_integers_have_a_scale_of_their_own_in_every_slot() -> None:
    rng = np.random.default_rng(0)
    k, v = (jnp.asarray(rng.normal(size=(3, K, H)), "float32").at[2].set(0) for _ in range(2))
    pages, scales = jnp.full((P, 2, K, S, H), 7, "int8"), jnp.ones((P, 2, K, S))
    page, slot = jnp.asarray([4, 4, 2]), jnp.asarray([1, 3, 0])
    got, got_scales = write_kv_pages(k, v, pages, page, slot, scales)
    read = got.astype("float32") * got_scales[..., None]
    kv = jnp.stack([k, v], axis=1)
    worst = jnp.abs(kv).max(axis=-1, keepdims=True) / 127 * 0.501
    assert (jnp.abs(read[page, :, :, slot] - kv) <= worst).all()
    others = np.ones((P, S), bool)
    others[page, slot] = False
    rows, cols = np.nonzero(others)
    assert (got[rows, :, :, cols] == 7).all()
    assert (got_scales[rows, :, :, cols] == 1).all()


def test_a_slot_keeps_what_is_not_a_number() -> None:
    """So that a broken model shows itself."""
    x = jnp.asarray([jnp.nan, 1.0])
    assert jnp.isnan(narrowed(x, jnp.float32(1), jnp.float8_e4m3fn)[0])
    assert jnp.isnan(slot_scale(jnp.asarray(jnp.nan)))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
def test_what_is_stored_of_a_token_does_not_depend_on_others(dtype: str) -> None:
    rng = np.random.default_rng(0)
    k, v = (jnp.asarray(rng.normal(size=(6, K, H)) * 9, "float32") for _ in range(2))
    pages = jnp.zeros((P, 2, K, S, H), dtype)
    scales = jnp.zeros((P, 2, K, S)) if dtype == "int8" else jnp.full((2, K), 0.3)
    page, slot = jnp.asarray([1, 1, 2, 5, 5, 5]), jnp.asarray([0, 3, 1, 0, 1, 2])
    crowd, crowd_scales = write_kv_pages(k, v, pages, page, slot, scales)
    one = slice(3, 4)
    alone, alone_scales = write_kv_pages(k[one], v[one], pages, page[one], slot[one], scales)
    np.testing.assert_array_equal(crowd[5, :, :, 0], alone[5, :, :, 0])
    if dtype == "int8":
        np.testing.assert_array_equal(crowd_scales[5, :, :, 0], alone_scales[5, :, :, 0])
