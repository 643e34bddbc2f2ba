"""Writing keys and values into pages."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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
    got = write_kv_pages(k, v, pages, jnp.asarray(page), jnp.asarray(slot))
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
