from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.layers.rope import RopeSpec, rope_tables
from pallas_kernels.rope_write import apply_rope

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}


def test_position_zero_changes_nothing_and_lengths_stay() -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 2, 8)), jnp.float32)
    tables = rope_tables(RopeSpec(8, 1e4), jnp.asarray([0, 1, 7]))
    y = apply_rope(x, *tables)
    np.testing.assert_array_equal(y[0], x[0])
    np.testing.assert_allclose(jnp.linalg.norm(y, axis=-1), jnp.linalg.norm(x, axis=-1), rtol=1e-6)


def test_scores_depend_on_distance_alone() -> None:
    q, k = jnp.asarray(np.random.default_rng(1).normal(size=(2, 16)), jnp.float32)

    def score(at: int, distance: int) -> float:
        tables = rope_tables(RopeSpec(16, 1e4), jnp.asarray([at, at - distance]))
        a, b = apply_rope(jnp.stack((q, k)), *tables)
        return float(a @ b)

    assert score(5, 3) == pytest.approx(score(60, 3), rel=1e-4)
    assert score(5, 3) != pytest.approx(score(5, 4), rel=1e-2)


def test_halves_rotate_together_as_in_hugging_face() -> None:
    x = jnp.asarray([[1.0, 2.0, 3.0, 4.0]])
    cos, sin = rope_tables(RopeSpec(4, 100.0), jnp.asarray([2]))
    angles = 2 * np.array([1.0, 0.1])
    np.testing.assert_allclose(cos[0], np.cos(angles), rtol=1e-6)
    y = apply_rope(x, cos, sin)[0]
    np.testing.assert_allclose(
        y[jnp.asarray([0, 2])],
        [np.cos(2) - 3 * np.sin(2), 3 * np.cos(2) + np.sin(2)],
        rtol=1e-5,
    )


def test_linear_slows_every_pair() -> None:
    plain = RopeSpec(8, 1e4).frequencies()
    spec = RopeSpec.from_parameters({"type": "linear", "rope_theta": 1e4, "factor": 4}, 8, 2048)
    np.testing.assert_allclose(spec.frequencies(), plain / 4, rtol=1e-6)


def test_llama3_keeps_short_waves_and_slows_long_ones() -> None:
    spec = RopeSpec.from_parameters(LLAMA3, 128, 131_072)
    plain = RopeSpec(128, 500_000.0).frequencies()
    ratio = spec.frequencies() / plain
    np.testing.assert_allclose(ratio[:20], 1, rtol=1e-6)
    np.testing.assert_allclose(ratio[-20:], 1 / 8, rtol=1e-5)
    assert np.all(np.diff(ratio) <= 1e-7)


def test_yarn_magnitude_follows_the_factor_or_is_given() -> None:
    assert RopeSpec.from_parameters(YARN, 64, 32_768).magnitude == pytest.approx(1.138629)
    given = RopeSpec.from_parameters({**YARN, "attention_factor": 1.5}, 64, 32_768)
    assert given.magnitude == 1.5
    cos, _ = rope_tables(given, jnp.asarray([0]))
    np.testing.assert_allclose(cos, 1.5)


def test_yarn_factor_may_follow_from_the_lengths() -> None:
    parameters = {**YARN, "factor": None, "original_max_position_embeddings": 8192}
    assert RopeSpec.from_parameters(parameters, 64, 32_768).factor == 4


def test_unknown_kind_names_itself_and_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'longrope' is not supported; .*llama3, yarn"):
        RopeSpec.from_parameters({"rope_type": "longrope", "rope_theta": 1e4}, 64, 4096)


@pytest.mark.parametrize("missing", ["factor", "low_freq_factor", "high_freq_factor"])
def test_missing_number_is_named(missing: str) -> None:
    parameters = {key: value for key, value in LLAMA3.items() if key != missing}
    with pytest.raises(ValueError, match=f"'llama3' lacks '{missing}'"):
        RopeSpec.from_parameters(parameters, 64, 4096)
