from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxpaged.arrays.step_batch import StepBatch
from jaxpaged.runtime.pooling import embeddings, pool_means


def batch(**changes: list[int]) -> StepBatch:
    """Three sequences of three, one and two tokens in a bucket of eight tokens."""
    fields = {
        "token_T": [9] * 8,
        "position_T": [0, 1, 2, 4, 0, 1, 0, 0],
        "seq_T": [0, 0, 0, 1, 2, 2, 2, 2],  # padding belongs to the last
        "query_start_B1": [0, 3, 4, 6],
        "kv_len_B": [3, 5, 2],
        "row_R": [2, 3, 5, 0],
    } | changes
    arrays = {name: jnp.asarray(value, jnp.int32) for name, value in fields.items()}
    three = jnp.int32(3)
    return StepBatch(**arrays, num_decodes=three, num_seqs=three, page_tables=())


def test_sums_grow_and_start_over():
    hidden_TD = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    before_SD = np.random.default_rng(1).normal(size=(6, 4)).astype(np.float32)
    slots = [4, 0, 2]
    sum_SD, mean_RD = pool_means(
        jnp.asarray(hidden_TD), batch(), jnp.asarray(slots), jnp.asarray(before_SD)
    )
    expected = before_SD.copy()
    expected[4] = hidden_TD[:3].sum(0)
    expected[0] += hidden_TD[3]
    expected[2] = hidden_TD[4:6].sum(0)
    np.testing.assert_allclose(sum_SD, expected, rtol=1e-5)
    lengths = np.array([3, 5, 2])[:, None]
    np.testing.assert_allclose(mean_RD[:3], expected[slots] / lengths, rtol=1e-5)


def test_an_empty_step_of_padding():
    nothing = batch(query_start_B1=[0] * 4, kv_len_B=[0] * 3, position_T=[0] * 8)
    null = jnp.asarray([5, 5, 5])
    before_SD = jnp.ones((6, 4))
    sum_SD, _ = pool_means(jnp.ones((8, 4)), nothing, null, before_SD)
    np.testing.assert_array_equal(sum_SD[:5], before_SD[:5])


def test_embeddings_have_length_one():
    rows_RD = jnp.asarray([[3.0, 4.0], [0.0, 0.0], [1.0, 1.0]], jnp.bfloat16)
    found_RD = embeddings(2, rows_RD)
    assert found_RD.dtype == jnp.float32
    np.testing.assert_allclose(found_RD, [[0.6, 0.8], [0.0, 0.0]], rtol=1e-6)
