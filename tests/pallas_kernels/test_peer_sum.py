"""What surrounds the exchange; `scripts/check_gpu_peer_sum.py` checks that itself, on two GPUs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.peer_sum import (
    BOXES,
    EMPTY,
    Peers,
    boxes,
    is_supported,
    max_words,
    peer_sum,
)
from pallas_kernels.rms_norm import half_norm

RNG = np.random.default_rng(0)


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.normal(size=shape), jnp.bfloat16)


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_bias_and_residual_are_added_once_and_the_next_norm_begun(devices: int) -> None:
    x_TD, bias_D, residual_TD, scale_D = (
        normal(3, 1024),
        normal(1024),
        normal(3, 1024),
        normal(1024),
    )
    x_TD = x_TD.at[0, :3].set(jnp.array([0, jnp.inf, -0.0], jnp.bfloat16))
    rows = peer_sum(
        x_TD,
        Peers(jnp.zeros((devices, 2), jnp.int32), 0),
        jnp.int32(0),
        bias_D=bias_D,
        residual_TD=residual_TD,
        next_scale_D=scale_D,
        interpret=True,
    )
    x, bias, residual = (np.asarray(each, np.float32) for each in (x_TD, bias_D, residual_TD))
    expected = jnp.asarray(sum(devices * [x]) + bias + residual, jnp.bfloat16)
    np.testing.assert_array_equal(rows.x, expected)
    begun = half_norm(rows.x, scale_D)
    np.testing.assert_array_equal(rows.half_normed.scaled_TD, begun.scaled_TD)
    squares = (half.square_XT.sum(axis=0) for half in (rows.half_normed, begun))
    np.testing.assert_allclose(*squares, rtol=1e-5)


def test_a_sum_alone() -> None:
    x_TD = normal(2, 512)
    rows = peer_sum(x_TD, Peers(jnp.zeros((2, 2), jnp.int32), 1), jnp.int32(1), interpret=True)
    np.testing.assert_array_equal(rows.x, x_TD * 2)
    assert rows.half_normed is None


def test_what_says_that_a_place_is_empty_is_never_sent() -> None:
    nans = jax.lax.bitcast_convert_type(jnp.full((1, 512), EMPTY, jnp.int16), jnp.bfloat16)
    assert jnp.isnan(nans).all()
    rows = peer_sum(nans, Peers(jnp.zeros((1, 2), jnp.int32), 0), jnp.int32(0), interpret=True)
    sent = jax.lax.bitcast_convert_type(rows.x, jnp.int16)
    assert jnp.isnan(rows.x).all() and not (sent == EMPTY).any()


def test_several_blocks_a_program() -> None:
    x_TD = normal(520, 1024)  # more than as many programs as run at once would take
    assert is_supported(x_TD, 2)
    where_N2 = jnp.zeros((2, 2), jnp.int32)
    rows = peer_sum(x_TD, Peers(where_N2, 0), jnp.int32(0), residual_TD=x_TD, interpret=True)
    expected = x_TD.astype(jnp.float32) * 3
    np.testing.assert_array_equal(rows.x, expected.astype(jnp.bfloat16))


def test_which_sums_fit() -> None:
    assert is_supported(jnp.zeros((256, 6144), jnp.bfloat16), 2)
    assert not is_supported(jnp.zeros((256, 6144), jnp.bfloat16), 4)
    assert not is_supported(jnp.zeros((8, 640), jnp.bfloat16), 2)
    assert not is_supported(jnp.zeros((8, 1024)), 2)
    empty = boxes(2)
    assert empty.shape == (2, BOXES, 2, max_words(2))
    assert (empty == EMPTY).all()
