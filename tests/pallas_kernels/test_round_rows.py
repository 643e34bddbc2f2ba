"""Rounded rows against plain XLA, in interpret mode."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.quantization import finished
from jaxpaged.quantization.fp8 import quantize_rows
from pallas_kernels import round_rows as module
from pallas_kernels.product_parts import ACTIVATIONS
from pallas_kernels.rms_norm import Norm, rms_norm
from pallas_kernels.round_rows import (
    MAX_WIDTH,
    gated_layout,
    round_added,
    round_gated,
    round_rows,
)

RNG = np.random.default_rng(0)
T, D = 5, 200


@pytest.mark.parametrize("plus_one", [None, False, True])
def test_they_are_those_of_the_plain_way(plus_one: bool | None) -> None:
    x_TD = jnp.asarray(RNG.normal(size=(T, D)) * 10, jnp.bfloat16).at[2].set(0)
    norm, plain = None, x_TD
    if plus_one is not None:
        norm = Norm(jnp.asarray(RNG.uniform(0.5, 2, D), jnp.bfloat16), 1e-6, plus_one)
        plain = rms_norm(x_TD, norm).astype(jnp.bfloat16)
    found, scale_T1 = round_rows(x_TD, norm, interpret=True)
    want, want_T = quantize_rows(plain)
    np.testing.assert_allclose(scale_T1[:, 0], want_T, rtol=1e-2)
    assert found.dtype == jnp.float8_e4m3fn
    found_TD, want_TD = (np.asarray(x, np.float32) for x in (found, want))
    if norm is None:
        np.testing.assert_array_equal(found_TD, want_TD)
    # The norm's sums may differ in their last bit, and a value be rounded to its neighbour.
    np.testing.assert_allclose(found_TD, want_TD, rtol=0.13, atol=2.0**-9)
    assert (found_TD != want_TD).mean() < 0.05


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("F", [D, 5000])  # one array, and several
def test_gates_are_those_of_the_plain_way(
    activation: str, with_bias: bool, dtype: str, F: int
) -> None:
    sums_T2F = jnp.asarray(RNG.normal(size=(T, 2, F)) * 900, dtype).at[2].set(0)
    row_scale_T1 = jnp.asarray(RNG.uniform(1e-3, 1e-2, (T, 1)), jnp.float32)
    scale_2F = jnp.asarray(RNG.uniform(0.1, 1, (2, F)), jnp.float32)
    bias_2F = jnp.asarray(RNG.normal(size=(2, F)), dtype) if with_bias else None
    y = (sums_T2F.astype(jnp.float32) * row_scale_T1[..., None] * scale_2F).astype(dtype)
    want, want_T = quantize_rows(finished(y, dtype, bias_2F, activation))
    found, scale_T1 = round_gated(
        sums_T2F, row_scale_T1, scale_2F, activation, bias_2F, dtype=dtype, interpret=True
    )
    assert found.shape == (T, F) and scale_T1.shape == (T, 1)
    np.testing.assert_allclose(scale_T1[:, 0], want_T, rtol=1e-2)
    found_TD, want_TD = (np.asarray(x, np.float32) for x in (found, want))
    np.testing.assert_allclose(found_TD, want_TD, rtol=0.13, atol=2.0**-9)
    # XLA may leave out a rounding to bfloat16 between the two.
    assert (found_TD != want_TD).mean() < (0.1 if dtype == "bfloat16" else 0.01)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("D", [D, 3000])  # one array, and several
def test_sums_are_those_of_the_plain_way(with_bias: bool, dtype: str, D: int) -> None:
    sums_TD, residual_TD = (jnp.asarray(RNG.normal(size=(T, D)) * x, dtype) for x in (900, 1))
    row_scale_T1 = jnp.asarray(RNG.uniform(1e-3, 1e-2, (T, 1)), jnp.float32)
    scale_D = jnp.asarray(RNG.uniform(0.1, 1, D), jnp.float32)
    bias_D = jnp.asarray(RNG.normal(size=D), dtype) if with_bias else None
    norm = Norm(jnp.asarray(RNG.uniform(0.5, 2, D), dtype), 1e-6, True)
    y = (sums_TD.astype(jnp.float32) * row_scale_T1 * scale_D).astype(dtype)
    want_TD = finished(y, dtype, bias_D, residual=residual_TD)
    want, want_T = quantize_rows(rms_norm(want_TD, norm).astype(dtype))
    rows = round_added(sums_TD, row_scale_T1, scale_D, residual_TD, norm, bias_D, interpret=True)
    assert rows.x.dtype == dtype and rows.rounded is not None
    found, scale_T1 = rows.rounded
    plain = [np.asarray(x, np.float32) for x in (rows.x, want_TD)]
    np.testing.assert_allclose(*plain, rtol=1e-2 if dtype == "bfloat16" else 1e-6, atol=1e-2)
    np.testing.assert_allclose(scale_T1[:, 0], want_T, rtol=1e-2)
    assert (np.asarray(found, np.float32) != np.asarray(want, np.float32)).mean() < 0.1


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_activations_on_the_card_are_products_with_a_sigmoid(activation: str) -> None:
    x = jnp.linspace(-12, 12, 1000)
    found = x * jax.nn.sigmoid(module.GATED_BY[activation](x))
    np.testing.assert_allclose(found, ACTIVATIONS[activation](x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("largest", [0.0, 1e-37, 1e-36, 1e-20, 1e30])
def test_every_scale_has_a_reciprocal(largest: float) -> None:
    x_TD = jnp.full((1, D), largest).at[0, 0].set(0)
    found_TD, scale_T1 = round_rows(x_TD, interpret=True)
    want_TD, want_T = quantize_rows(x_TD)
    np.testing.assert_array_equal(*(np.asarray(q, np.float32) for q in (found_TD, want_TD)))
    np.testing.assert_array_equal(scale_T1[:, 0], want_T)
    back_TD = np.asarray(found_TD, np.float64) * np.asarray(scale_T1)
    np.testing.assert_allclose(back_TD, x_TD, rtol=0.05, atol=1e-34)


def test_rows_too_wide() -> None:
    with pytest.raises(ValueError, match="wider than 32768"):
        round_rows(jnp.zeros((1, MAX_WIDTH + 1)), interpret=True)


@pytest.mark.parametrize("room", [0, 116, 264])
def test_programs_that_wait_for_each_other_have_room(
    room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "most_sharing", lambda: room)
    shared = set()
    for T in range(1, 300):
        for F in (1000, 4096, 18944, MAX_WIDTH):
            block, _, programs = gated_layout(T, F)
            assert programs == 1 or T * programs <= room
            wide = gated_layout(T, F, sums_bytes=4).programs
            assert wide == 1 or T * wide <= room // 2
            assert programs * block < 2 * F or programs == 1  # none is left without a column
            shared.add(programs)
    assert (len(shared) > 2) == (room > 0)
