from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.layers.norm import RMSNorm

X = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)


@pytest.mark.parametrize("plus_one", [False, True])
def test_normalises_the_last_axis(plus_one: bool) -> None:
    scale = np.linspace(-1, 1, 8, dtype=np.float32)
    norm = RMSNorm(8, eps=1e-3, plus_one=plus_one)
    y = norm.apply({"params": {"scale": scale}}, X)
    expected = X / np.sqrt((X**2).mean(-1, keepdims=True) + 1e-3) * (scale + plus_one)
    np.testing.assert_allclose(y, expected, rtol=1e-5)


def test_half_precision_is_rounded_once() -> None:
    x = jnp.asarray(X * 100, jnp.bfloat16)
    scale = jnp.full(8, 1.2109375, jnp.bfloat16)
    y = RMSNorm(8, eps=1e-6, dtype=jnp.bfloat16).apply({"params": {"scale": scale}}, x)
    wide = np.asarray(x, np.float64)
    exact = wide / np.sqrt((wide**2).mean(-1, keepdims=True)) * 1.2109375
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y, jnp.asarray(exact, jnp.bfloat16))
