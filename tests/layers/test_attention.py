"""The attention layer: where tokens are written, which backend runs, what a step gives."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ragged_attention import Ragged, attention_by_definition, ragged_batch

from jaxpaged.arrays.kv_pages import KVPages
from jaxpaged.arrays.step_batch import StepBatch
from jaxpaged.layers.attention import (
    AttentionCase,
    attend,
    attention_backend,
    write_places,
)

S = 16


def step_batch(r: Ragged, page_tables: tuple[jax.Array, ...]) -> StepBatch:
    """The step whose queries are `r`'s; tokens' ids do not matter here."""
    T, B = r.q_TNH.shape[0], r.kv_len_B.shape[0]
    starts, lengths = np.asarray(r.query_start_B1), np.asarray(r.kv_len_B)
    seq_T, position_T = np.full(T, B - 1, np.int32), np.zeros(T, np.int32)
    for b in range(int(r.num_seqs)):
        own = slice(starts[b], starts[b + 1])
        seq_T[own] = b
        position_T[own] = np.arange(lengths[b] - (own.stop - own.start), lengths[b])
    return StepBatch(
        token_T=jnp.zeros(T, jnp.int32),
        position_T=jnp.asarray(position_T),
        seq_T=jnp.asarray(seq_T),
        query_start_B1=r.query_start_B1,
        kv_len_B=r.kv_len_B,
        num_decodes=r.num_decodes,
        num_seqs=r.num_seqs,
        page_tables=page_tables,
        row_R=jnp.zeros(1, jnp.int32),
    )


def test_tokens_go_to_the_page_and_slot_of_their_position() -> None:
    r = ragged_batch([(1, 17), (1, 16), (20, 40)], T=32, B=4)
    other = r.page_table_BM + 1
    places = write_places(step_batch(r, (other, r.page_table_BM)), 1, S)
    table = np.asarray(r.page_table_BM)
    positions = [(0, 16), (1, 15), *[(2, p) for p in range(20, 40)]]
    assert places.page_T[:22].tolist() == [table[b, p // S] for b, p in positions]
    assert places.slot_T[:22].tolist() == [p % S for _, p in positions]


def test_padding_goes_to_the_null_page() -> None:
    """Even when the last row of the tables, which padding names, belongs to a sequence."""
    r = ragged_batch([(1, 17)] * 4, T=16, B=4)
    places = write_places(step_batch(r, (r.page_table_BM,)), 0, S)
    assert (places.page_T[:4] > 0).all()
    assert (places.page_T[4:] == 0).all()


@pytest.mark.parametrize("backend", ["xla"])
def test_a_step_writes_its_keys_and_sees_them(backend: str) -> None:
    r = ragged_batch([(1, 17), (1, 130), (20, 40), (9, 9)], T=32, B=4)
    batch = step_batch(r, (r.page_table_BM,))
    written = np.array(r.pages_P2KSH)
    places = write_places(batch, 0, S)
    rng = np.random.default_rng(1)
    kv_TK2H = jnp.asarray(rng.normal(size=(32, 2, 2, 16)), jnp.float32)
    for t in range(int(r.query_start_B1[-1])):
        written[places.page_T[t], :, :, places.slot_T[t]] = kv_TK2H[t].swapaxes(0, 1)
    q_TKGH = r.q_TNH.reshape(32, 2, -1, 16)
    still = jnp.ones((32, 8)), jnp.zeros((32, 8))  # cos and sin of no rotation
    step = jax.jit(
        partial(
            attend,
            layer_scales_2K=None,
            scales=None,
            backend=backend,
            norm_eps=0.0,
            norm_plus_one=False,
            scale=0.3,
            window=33,
            softcap=9.0,
        )
    )
    out, pages = step(
        jnp.concatenate((q_TKGH, kv_TK2H), axis=2),
        KVPages(r.pages_P2KSH, None),
        rope=still,
        batch=batch,
        places=places,
    )
    expected = attention_by_definition(
        r.replace(pages_P2KSH=jnp.asarray(written)), scale=0.3, window=33, softcap=9.0
    )
    np.testing.assert_allclose(out, expected, atol=2e-6)
    np.testing.assert_array_equal(pages.values_P2KSH[1:], written[1:])
    assert pages.scale_P2KS is None


def case(platform: str, capability: float = 0.0, **changes: object) -> AttentionCase:
    half = jnp.dtype(jnp.bfloat16)
    return dataclasses.replace(
        AttentionCase(platform, capability, half, half, 8, 128, 16), **changes
    )


FLOAT8, INT8 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.int8)
FLOAT32 = jnp.dtype(jnp.float32)


@pytest.mark.parametrize(
    ("where", "chosen"),
    [
        (case("cpu"), "xla"),
        (case("gpu", 9.0), "triton"),
        (case("gpu", 8.0), "triton"),
        (case("gpu", 10.0), "triton"),
        (case("gpu", 7.5), "xla"),
        (case("gpu", 9.0, dtype=FLOAT32, kv_dtype=FLOAT32), "triton"),
        (case("gpu", 9.0, kv_dtype=FLOAT32), "triton"),
        (case("gpu", 9.0, kv_dtype=FLOAT8), "triton"),
        (case("gpu", 8.0, kv_dtype=FLOAT8), "xla"),
        (case("gpu", 8.0, kv_dtype=INT8), "triton"),
        (case("gpu", 9.0, head_dim=80), "triton"),
        (case("gpu", 9.0, head_dim=12), "triton"),
        (case("gpu", 9.0, head_dim=12, kv_dtype=INT8), "xla"),
        (case("gpu", 9.0, page_size=128), "triton"),
        (case("gpu", 9.0, queries_per_kv_head=32), "xla"),
        (case("gpu", 9.0, head_dim=512), "xla"),
    ],
)
def test_the_best_backend_that_serves_the_case(where: AttentionCase, chosen: str) -> None:
    assert attention_backend("auto", where) == chosen
    assert attention_backend("xla", where) == "xla"


def test_hopper_prefill_has_to_be_asked_for() -> None:
    assert attention_backend("mosaic", case("gpu", 9.0)) == "mosaic"
    for where in (
        case("gpu", 8.0),
        case("gpu", 9.0, kv_dtype=FLOAT32),
        case("gpu", 9.0, kv_dtype=FLOAT8),
        case("gpu", 9.0, head_dim=80),
        case("gpu", 9.0, page_size=128),
    ):
        pages = where.kv_dtype.name
        with pytest.raises(ValueError, match=f"pages of {pages}: choose from auto, triton, xla"):
            attention_backend("mosaic", where)


@pytest.mark.parametrize(
    ("name", "platform"), [("mosaic", "cpu"), ("xla", "abacus"), ("auto", "abacus")]
)
def test_unknown_backend_names_the_choices(name: str, platform: str) -> None:
    with pytest.raises(
        ValueError, match=rf"'{name}' does not run on {platform} .*: choose from auto"
    ):
        attention_backend(name, case(platform))
