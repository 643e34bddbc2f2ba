"""The sampling kernels, interpreted, against plain XLA and against the distribution."""

from __future__ import annotations

from functools import partial
from itertools import product

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from scipy import special, stats

from pallas_kernels.sample_top_k_top_p import (
    TuningConfig,
    gumbel,
    sample_top_k_top_p,
    tuning_config,
)
from pallas_kernels.sampling import draw_tokens

# A row of 999 logits takes every way: with few groups listed or many, gathered or not.
SMALL = TuningConfig(block=256, num_warps=4, programs=120, many_groups=4, gathered=256)
FILTERS = list(product([0, 1, 7, 40, 300, 10_000], [1.0, 0.9, 0.3, 1e-9], [0.0, 0.02, 1.0]))
ROWS = len(FILTERS)

expected = jax.jit(draw_tokens)
drawn = jax.jit(partial(sample_top_k_top_p, config=SMALL, interpret=True))


def settings(rows: int, seed: int = 0, **changed) -> dict[str, jax.Array]:
    """Rows with seeds of their own and everything off, except for `changed`."""
    rng = np.random.default_rng(seed)
    defaults = {
        "seed_R2": rng.integers(0, 2**32, (rows, 2), np.uint32),
        "choice_R": rng.integers(0, 5, rows),
        "position_R": rng.integers(0, 5000, rows),
        "temperature_R": 1.0,
        "top_k_R": 0,
        "top_p_R": 1.0,
        "min_p_R": 0.0,
    }
    dtypes = {
        "seed_R2": np.uint32,
        "choice_R": np.int32,
        "position_R": np.int32,
        "top_k_R": np.int32,
    }
    return {
        name: jnp.asarray(
            np.broadcast_to(
                np.asarray(value, dtypes.get(name, np.float32)),
                (rows, 2) if name == "seed_R2" else (rows,),
            )
        )
        for name, value in (defaults | changed).items()
    }


def all_filters(**changed) -> dict[str, jax.Array]:
    top_k, top_p, min_p = zip(*FILTERS, strict=True)
    return settings(ROWS, top_k_R=top_k, top_p_R=top_p, min_p_R=min_p, **changed)


def normal(V: int, scale: float, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(ROWS, V)).astype(np.float32) * scale


@pytest.mark.parametrize("temperature", [0.0, 0.4, 1.0, 3.0])
@pytest.mark.parametrize(
    ("V", "scale"), [(999, 0.5), (999, 3.0), (999, 12.0), (999, 0.0), (5, 2.0), (5003, 3.0)]
)
def test_same_tokens_as_plain_xla(V: int, scale: float, temperature: float) -> None:
    logits = normal(V, scale)
    own = all_filters(temperature_R=temperature)
    assert drawn(logits, **own).tolist() == expected(logits, **own).tolist()


@pytest.mark.parametrize("forbidden", [0.5, 0.99])
def test_ties_and_forbidden_tokens(forbidden: float) -> None:
    logits = np.round(normal(999, 3.0) * 2) / 2
    rng = np.random.default_rng(2)
    logits[rng.random(logits.shape) < forbidden] = -np.inf
    logits[:, 500] = 0  # at least one is allowed
    own = all_filters()
    tokens = drawn(logits, **own)
    assert tokens.tolist() == expected(logits, **own).tolist()
    assert np.isfinite(logits[np.arange(ROWS), tokens]).all()


@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(
    values=st.lists(st.integers(-12, 12), min_size=60, max_size=60),
    rules=st.lists(
        st.tuples(st.integers(0, 62), st.floats(0.01, 1.0), st.sampled_from([0.0, 0.001, 0.3])),
        min_size=8,
        max_size=8,
    ),
)
def test_whole_numbers(values, rules) -> None:
    logits = np.tile(np.asarray(values, np.float32) / 2, (8, 1))
    top_k, top_p, min_p = zip(*rules, strict=True)
    # An x of half numbers has sums of exp(x) whose order of summation decides at times.
    top_p = [round(p, 2) + 0.003 for p in top_p]
    own = settings(8, top_k_R=top_k, top_p_R=top_p, min_p_R=min_p)
    assert drawn(logits, **own).tolist() == expected(logits, **own).tolist()


def test_greedy_takes_the_first_of_the_best() -> None:
    logits = normal(999, 3.0)
    logits[:, [700, 31, 960]] = 50
    own = all_filters(temperature_R=np.tile([0, 1e-6], ROWS // 2))
    assert set(drawn(logits, **own).tolist()) == {31}


def test_huge_logits_at_a_small_temperature_stay_finite() -> None:
    logits = np.full((ROWS, 999), -3e38, np.float32)
    logits[:, [3, 900]] = 3e38
    own = all_filters(temperature_R=2e-5)
    assert set(drawn(logits, **own).tolist()) == {3, 900}


def test_broken_logits_still_give_a_token() -> None:
    logits = normal(999, 1.0)
    logits[:20] = np.nan
    logits[20:40] = -np.inf
    logits[40:, 3] = np.nan
    tokens = np.asarray(drawn(logits, **all_filters()))
    assert (tokens >= 0).all() and (tokens < 999).all()


def test_filters_left_out_are_off() -> None:
    logits = normal(999, 1.0)
    own = settings(ROWS)
    plain = {name: own[name] for name in ("seed_R2", "choice_R", "position_R", "temperature_R")}
    tokens = drawn(logits, **plain)
    assert tokens.tolist() == drawn(logits, **own).tolist()
    assert tokens.tolist() == expected(logits, **plain).tolist()


def test_layout_changes_nothing() -> None:
    logits = normal(999, 3.0)
    own = all_filters()
    tokens = drawn(logits, **own).tolist()
    for config in (TuningConfig(512, 4, 1, 0, 512), TuningConfig(1024, 4, 1000), None):
        again = jax.jit(partial(sample_top_k_top_p, config=config, interpret=True))
        assert again(logits, **own).tolist() == tokens


def test_draws_follow_the_renormalised_rest() -> None:
    count = 4096
    logits = np.full((count, 64), -np.inf, np.float32)
    logits[:, 20:26] = [1.0, 0.0, -1.0, 2.0, 0.5, -3.0]
    same = {"seed_R2": [[7, 8]], "choice_R": 0, "position_R": np.arange(count)}
    tokens = drawn(logits, **settings(count, top_k_R=4, top_p_R=0.9, **same))
    kept = np.array([20, 23, 24])
    frequencies = np.bincount(tokens, minlength=64)
    assert frequencies[kept].sum() == count
    probabilities = special.softmax(logits[0, kept].astype(np.float64))
    assert stats.chisquare(frequencies[kept], probabilities * count).pvalue > 1e-3


def test_noise_is_that_of_jax_random() -> None:
    key = jax.random.key(5)
    words = jax.random.key_data(key)
    got = gumbel((words[0], words[1]), jnp.arange(1000))
    np.testing.assert_array_equal(got, jax.random.gumbel(key, (1000,), jnp.float32))


@pytest.mark.parametrize(
    "setting",
    [
        {"block": 96},
        {"block": 8192},
        {"num_warps": 3},
        {"programs": 0},
        {"many_groups": -1},
        {"gathered": 100},
    ],
)
def test_settings_are_checked(setting: dict[str, int]) -> None:
    good = {"block": 1024, "num_warps": 8, "programs": 100}
    TuningConfig(**good)
    with pytest.raises(ValueError, match=next(iter(setting))):
        TuningConfig(**good | setting)


def test_every_size_has_a_setting() -> None:
    for R in (1, 8, 64, 256, 4096):
        tuning_config(R=R)


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match="float32"):
        drawn(jnp.zeros((2, 64), jnp.bfloat16), **settings(2))
