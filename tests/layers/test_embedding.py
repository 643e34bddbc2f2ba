from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxpaged.layers.embedding import Embedding

TABLE = np.random.default_rng(0).normal(size=(10, 4)).astype(np.float32)


def test_rows_by_token() -> None:
    rows = Embedding(10, 4).apply({"params": {"table": TABLE}}, jnp.asarray([3, 0, 9]))
    np.testing.assert_array_equal(rows, TABLE[[3, 0, 9]])


def test_logits_of_half_precision_are_float32() -> None:
    table = jnp.asarray(TABLE, jnp.bfloat16)
    hidden = jnp.asarray(np.linspace(-1, 1, 8).reshape(2, 4), jnp.bfloat16)
    head = Embedding(10, 4, jnp.bfloat16)
    logits = head.apply({"params": {"table": table}}, hidden, method="logits")
    assert logits.dtype == jnp.float32
    exact = np.asarray(hidden, np.float64) @ np.asarray(table, np.float64).T
    np.testing.assert_allclose(logits, exact, rtol=1e-5, atol=1e-6)
