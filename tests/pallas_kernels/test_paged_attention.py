"""Paged attention in XLA against its definition."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from ragged_attention import Ragged, attention_by_definition, in_one_byte, ragged_batch

from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.write_kv_pages import write_kv_pages


@partial(jax.jit, static_argnames=("decode_only", "scale", "window", "softcap"))
def attention(r: Ragged, decode_only: bool = False, scale: float = 0.25, **options) -> jax.Array:
    return paged_attention(
        **vars(r),
        scale=scale,
        decode_only=decode_only,
        **options,
    )


def check(r: Ragged, decode_only: bool = False, atol: float = 2e-6, **options) -> None:
    got = np.asarray(attention(r, decode_only=decode_only, **options), np.float32)
    want = attention_by_definition(r, **{"scale": 0.25, **options})
    np.testing.assert_allclose(got, want, atol=atol, rtol=atol)
    assert (got[int(r.query_start_B1[-1]) :] == 0).all()


MIXED = [(1, 5), (1, 200), (1, 384), (70, 70), (3, 290), (100, 200)]


@pytest.mark.parametrize(
    "sequences",
    [
        MIXED,
        [(1, 1)],
        [(1, 128), (1, 129), (1, 127)],
        [(64, 64), (65, 65), (63, 384)],  # around the size of a tile
        [(256, 384)],  # fills the batch
        [(1, 9)] * 8,  # every row of the table in use
        [],
    ],
    ids=str,
)
def test_ragged_batches(sequences: list[tuple[int, int]]) -> None:
    check(ragged_batch(sequences, T=256, B=8))


@pytest.mark.parametrize("B", [1, 2, 8, 16])
def test_decode_only(B: int) -> None:
    lengths = np.random.default_rng(B).integers(1, 384, B - B // 4)
    check(ragged_batch([(1, int(n)) for n in lengths], T=B, B=B), decode_only=True)


def test_no_sequence_at_all_gives_zeros() -> None:
    check(ragged_batch([], T=8, B=8), decode_only=True)


@pytest.mark.parametrize("window", [1, 16, 100, 128, 1000])
def test_window(window: int) -> None:
    check(ragged_batch(MIXED, T=256, B=8), window=window)


def test_pages_before_the_window_may_be_gone() -> None:
    """Released pages are 0 in the table, and page 0 holds rubbish."""
    r = ragged_batch([(1, 300), (1, 150), (40, 340)], T=64, B=4)
    want = attention(r, window=50)
    table = np.asarray(r.page_table_BM).copy()
    for b, first_query in enumerate([299, 149, 300]):
        table[b, : (first_query - 49) // 16] = 0
    got = attention(replace(r, page_table_BM=jnp.asarray(table)), window=50)
    assert (got == want).all()


def test_softcap_and_scale() -> None:
    r = ragged_batch(MIXED, T=256, B=8)
    check(r, softcap=3.0, scale=2.0)
    assert np.abs(attention(r, softcap=3.0, scale=2.0) - attention(r, scale=2.0)).max() > 0.01


@pytest.mark.parametrize(
    "shape",
    [
        {"N": 1, "K": 1, "H": 64},
        {"N": 14, "K": 2, "H": 80},
        {"N": 16, "K": 1, "H": 96},
        {"N": 6, "K": 6, "H": 8},
        {"S": 32, "M": 12},
        {"S": 64, "M": 7},
        {"S": 128, "M": 3},
        {"S": 256, "M": 2},
    ],
    ids=str,
)
def test_shapes(shape: dict[str, int]) -> None:
    check(ragged_batch([(1, 130), (1, 3), (20, 300)], T=32, B=4, **shape))


@pytest.mark.parametrize(("dtype", "atol"), [("bfloat16", 2e-2), ("float16", 3e-3)])
def test_half_precision_pages(dtype: str, atol: float) -> None:
    r = ragged_batch(MIXED, T=256, B=8, dtype=dtype)
    assert attention(r).dtype == dtype
    check(r, atol=atol)


@pytest.mark.parametrize(("queries", "pages"), [("bfloat16", "float32"), ("float32", "float16")])
def test_pages_of_another_dtype_than_the_queries(queries: str, pages: str) -> None:
    r = ragged_batch(MIXED, T=256, B=8, dtype="float16")
    r = r.replace(q_TNH=r.q_TNH.astype(queries), pages_P2KSH=r.pages_P2KSH.astype(pages))
    assert attention(r).dtype == queries
    check(r, atol=1e-2 if queries == "bfloat16" else 2e-6)


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(st.data())
def test_any_ragged_batch(data: st.DataObject) -> None:
    T, B, longest = 64, 8, 384
    queries = data.draw(
        st.lists(st.integers(1, 40), max_size=B).filter(lambda counts: sum(counts) <= T)
    )
    sequences = [(count, data.draw(st.integers(count, longest))) for count in sorted(queries)]
    check(ragged_batch(sequences, T=T, B=B, seed=data.draw(st.integers(0, 99))))


def test_bits_of_a_row_do_not_depend_on_its_neighbours() -> None:
    own = (1, 140)
    alone = ragged_batch([own], T=16, B=16)
    crowd = ragged_batch([own, *[(1, 20 * n) for n in range(1, 16)]], T=16, B=16)
    crowd = replace(crowd, q_TNH=crowd.q_TNH.at[0].set(alone.q_TNH[0]))
    pages, table = np.array(crowd.pages_P2KSH), np.asarray(crowd.page_table_BM)
    pages[table[0, :9]] = np.asarray(alone.pages_P2KSH)[np.asarray(alone.page_table_BM)[0, :9]]
    crowd = replace(crowd, pages_P2KSH=jnp.asarray(pages))
    assert (attention(crowd, decode_only=True)[0] == attention(alone, decode_only=True)[0]).all()
    assert (attention(crowd)[0] == attention(alone)[0]).all()


def layers(q_TNH, pages_P2KSH, table, starts, lengths, num_decodes, num_seqs, *, decode_only):
    """Three layers that share one array of pages, each fed by the one before."""
    page_T = table[0, :1] + jnp.zeros(q_TNH.shape[0], jnp.int32)
    slot_T = jnp.zeros_like(page_T)
    for _ in range(3):
        k_TKH = q_TNH[:, : pages_P2KSH.shape[2]]
        pages_P2KSH, _ = write_kv_pages(k_TKH, k_TKH, pages_P2KSH, page_T, slot_T)
        q_TNH = paged_attention(
            q_TNH,
            pages_P2KSH,
            table,
            query_start_B1=starts,
            kv_len_B=lengths,
            num_decodes=num_decodes,
            num_seqs=num_seqs,
            scale=1.0,
            decode_only=decode_only,
        )
    return q_TNH, pages_P2KSH


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("decode_only", [True, False])
def test_donated_pages_are_never_copied(dtype: str, decode_only: bool) -> None:
    r = ragged_batch([], T=16, B=16, M=400, dtype=dtype)
    step = jax.jit(partial(layers, decode_only=decode_only), donate_argnums=1)
    compiled = step.lower(
        r.q_TNH,
        r.pages_P2KSH,
        r.page_table_BM,
        r.query_start_B1,
        r.kv_len_B,
        r.num_decodes,
        r.num_seqs,
    ).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < r.pages_P2KSH.nbytes / 4
    assert compiled.memory_analysis().alias_size_in_bytes >= r.pages_P2KSH.nbytes


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
@pytest.mark.parametrize("options", [{}, {"window": 100, "softcap": 3.0}], ids=str)
def test_pages_of_one_byte(dtype: str, options: dict[str, float]) -> None:
    r = ragged_batch(MIXED, T=256, B=8)
    check(in_one_byte(r, dtype), **options)
    check(in_one_byte(r.replace(q_TNH=r.q_TNH.astype("bfloat16")), dtype), atol=2e-2, **options)
