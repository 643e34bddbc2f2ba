"""Drawing tokens in plain XLA against definitions that sort."""

from __future__ import annotations

from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from scipy import special

from pallas_kernels import sampling

V = 50
kept = jax.jit(sampling.kept)
threshold = jax.jit(sampling.threshold, static_argnums=3)


def random_logits(rows: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, V)).astype(np.float32) * 3


def kept_by_sorting(logits_V, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """Which tokens the filters leave, one rule after the other, ties kept."""
    probs = special.softmax(np.asarray(logits_V, np.float64) / temperature)
    kept = probs >= min_p * probs.max()
    if top_k > 0:
        order = np.sort(np.where(kept, probs, -1))[::-1]
        kept &= probs >= order[min(top_k, len(order)) - 1]
    if top_p < 1:
        rest = np.where(kept, probs, 0)
        rest /= rest.sum()
        order = np.sort(rest)[::-1]
        needed = np.searchsorted(np.cumsum(order), top_p) + 1
        kept &= rest >= order[min(needed, len(order)) - 1]
    return kept


def kept_by_threshold(logits, temperature, top_k, top_p, min_p) -> np.ndarray:
    x_RV = (logits - logits.max(axis=1, keepdims=True)) / np.float32(temperature)
    rows = logits.shape[0]
    filters = {
        "top_k_R": jnp.full(rows, top_k, jnp.int32),
        "top_p_R": jnp.full(rows, top_p, jnp.float32),
        "min_p_R": jnp.full(rows, min_p, jnp.float32),
    }
    return np.asarray(kept(jnp.asarray(x_RV), **filters))


@pytest.mark.parametrize(
    "rules",
    [
        *[{"top_k": k} for k in (0, 1, 7, V, V + 10)],
        *[{"top_p": p} for p in (1e-6, 0.3, 0.95, 1.0)],
        *[{"min_p": p} for p in (0.02, 1.0)],
        {"top_k": 10, "top_p": 0.5},
        {"min_p": 0.1, "top_k": 30, "top_p": 0.9},
        {"top_p": 0.9, "temperature": 0.3},
    ],
    ids=str,
)
def test_filters_keep_what_sorting_keeps(rules: dict[str, float]) -> None:
    logits = random_logits(8, seed=1)
    full = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | rules
    expected = np.stack([kept_by_sorting(row, **full) for row in logits])
    assert (kept_by_threshold(logits, **full) == expected).all()


@pytest.mark.parametrize("digit_bits", [1, 2, 4])
def test_threshold_is_the_key_that_sorting_finds(digit_bits: int) -> None:
    rng = np.random.default_rng(5)
    key_RV = rng.integers(0, 2**32, (6, V), np.uint32)
    need = [1, 2, 17, V - 1, V, V + 1]
    got = threshold(key_RV, jnp.int32(1), jnp.asarray(need, jnp.int32), digit_bits)
    order_RV = np.sort(key_RV)[:, ::-1]
    assert got.tolist() == [*(order_RV[r, n - 1] for r, n in enumerate(need[:-1])), 0]


def test_digits_of_all_sizes_settle_the_same_mass() -> None:
    rng = np.random.default_rng(6)
    key_RV = rng.integers(0, 2**32, (6, V), np.uint32)
    weight_RV = rng.random((6, V), np.float32)
    need_R = weight_RV.sum(axis=1) * np.linspace(0, 1, 6, dtype=np.float32)
    one, four = (threshold(key_RV, weight_RV, need_R, digit_bits) for digit_bits in (1, 4))
    assert one.tolist() == four.tolist()


@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(
    values=st.lists(st.integers(-12, 12), min_size=V, max_size=V),
    temperature=st.sampled_from([0.25, 1.0, 2.0]),
    top_k=st.integers(0, V + 2),
    top_p=st.floats(0.01, 1.0),
    min_p=st.sampled_from([0.0, 0.001, 0.3]),
)
def test_filters_with_ties(values, temperature, top_k, top_p, min_p) -> None:
    """Whole-numbered logits tie often: all of a tie stay or none."""
    x_V = np.asarray(values, np.float32) / 2
    got = kept_by_threshold(x_V[None], temperature, top_k, top_p, min_p)[0]
    allowed = kept_by_sorting(x_V, temperature, top_k, 1.0, min_p)
    last = x_V[got].min()
    assert (got == (allowed & (x_V >= last))).all()
    probs = np.where(allowed, special.softmax(x_V.astype(np.float64) / temperature), 0)
    probs /= probs.sum()
    assert probs[got].sum() >= top_p - 1e-5
    assert probs[x_V > last].sum() < top_p + 1e-5 or top_p == 1


def test_full_size_vocabulary_matches_sorting() -> None:
    logits = np.random.default_rng(3).normal(size=(2, 151_936)).astype(np.float32) * 2
    full = {"temperature": 0.7, "top_k": 5000, "top_p": 0.9, "min_p": 0.0}
    for row, got in zip(logits, kept_by_threshold(logits, **full), strict=True):
        expected = kept_by_sorting(row, **full)
        assert abs(int(got.sum()) - int(expected.sum())) <= 1  # float32 sums at the border
        assert (got & expected).sum() >= min(got.sum(), expected.sum())


@pytest.mark.parametrize("on_gpu", [False, True])
def test_the_first_of_the_largest_on_either_platform(
    on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chosen(x_RV: jax.Array, *, cuda: Any, default: Any) -> jax.Array:
        return cuda(x_RV) if on_gpu else default(x_RV)

    monkeypatch.setattr(sampling.lax, "platform_dependent", chosen)
    x_RV = np.random.default_rng(3).integers(0, 9, (64, 50)).astype(np.float32)
    x_RV[::4] = -np.inf
    x_RV[1, 7] = np.inf
    found_R = sampling.argmax(jnp.asarray(x_RV))
    assert found_R.dtype == jnp.int32
    np.testing.assert_array_equal(found_R, x_RV.argmax(axis=1))
