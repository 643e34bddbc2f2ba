"""Products of few rows against float64, in interpret mode."""

from __future__ import annotations

import dataclasses
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.product_parts import ACTIVATIONS
from pallas_kernels.rms_norm import Norm, half_norm, rms_norm
from pallas_kernels.small_batch_linear import (
    TuningConfig,
    is_faster,
    small_batch_linear,
    tuning_config,
)

D, F = 256, 64
WHOLE, SPLIT = TuningConfig(32, 64, 1, 4, 2), TuningConfig(16, 32, 4, 4, 2)
RNG = np.random.default_rng(0)

EPS = 1e-2


def op(
    x_TD: jax.Array, kernel: jax.Array, *, norm: Norm | None = None, **options: Any
) -> jax.Array:
    x = x_TD if norm is None else half_norm(x_TD, norm.scale_D)
    return small_batch_linear(x, kernel, eps=EPS, interpret=True, **options).x


def bf16(*shape: int, scale: float = 1.0) -> jax.Array:
    return jnp.asarray(RNG.normal(size=shape) * scale, jnp.bfloat16)


def expected(
    x_TD: jax.Array,
    kernel: jax.Array,
    norm: Norm | None = None,
    bias: jax.Array | None = None,
    activation: str | None = None,
    residual_TF: jax.Array | None = None,
) -> np.ndarray:
    x = np.asarray(x_TD if norm is None else rms_norm(x_TD, norm), np.float64)
    y = np.tensordot(x, np.asarray(kernel, np.float64), 1)
    if bias is not None:
        y += np.asarray(bias, np.float64)
    if activation is not None:
        y = np.asarray(ACTIVATIONS[activation](jnp.asarray(y[:, 0], jnp.float32))) * y[:, 1]
    return y if residual_TF is None else y + np.asarray(residual_TF, np.float64)


@pytest.mark.parametrize("T", [1, 16, 27, 50])
@pytest.mark.parametrize(
    ("options", "config"),
    [
        ((), WHOLE),
        ((), SPLIT),
        (("residual_TF",), SPLIT),
        (("norm", "bias"), WHOLE),
        (("norm", "activation"), WHOLE),
        (("bias", "activation", "residual_TF"), SPLIT),
    ],
    ids=str,
)
def test_agrees_with_float64(T: int, options: tuple[str, ...], config: TuningConfig) -> None:
    out = (2, F) if "activation" in options else (F,)
    x_TD, kernel = bf16(T, D), bf16(D, *out, scale=D**-0.5)
    every: dict[str, Any] = {
        "norm": Norm(bf16(D) + 1, EPS, False),
        "bias": bf16(*out),
        "activation": "silu",
        "residual_TF": bf16(T, F),
    }
    chosen = {name: every[name] for name in options}
    y_TF = op(x_TD, kernel, config=config, **chosen)
    assert y_TF.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        np.asarray(y_TF, np.float64), expected(x_TD, kernel, **chosen), rtol=2e-2, atol=2e-2
    )


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_activations(activation: str) -> None:
    x_TD, kernel = bf16(3, D), bf16(D, 2, F, scale=D**-0.5)
    y_TF = op(x_TD, kernel, activation=activation, config=WHOLE)
    np.testing.assert_allclose(
        np.asarray(y_TF, np.float64),
        expected(x_TD, kernel, activation=activation),
        rtol=1e-2,
        atol=1e-2,
    )


def test_a_row_does_not_depend_on_the_others() -> None:
    x_TD, kernel, norm = bf16(8, D), bf16(D, F), Norm(bf16(D), EPS, False)
    for options in ({"norm": norm, "config": WHOLE}, {"config": SPLIT}):
        y_TF = op(x_TD, kernel, **options)
        others_TF = op(x_TD.at[1:].multiply(-3), kernel, **options)
        np.testing.assert_array_equal(y_TF[:1], others_TF[:1])
        np.testing.assert_array_equal(y_TF[:1], op(x_TD[:1], kernel, **options))


def test_calls_share_their_counters() -> None:
    """Each leaves them as it found them."""
    x_TD, kernel = bf16(4, D), bf16(D, D, scale=D**-0.5)

    @jax.jit
    def twice(x_TD: jax.Array) -> jax.Array:
        return op(op(x_TD, kernel, config=SPLIT), kernel, config=SPLIT)

    once = op(x_TD, kernel, config=SPLIT)
    np.testing.assert_array_equal(twice(x_TD), op(once, kernel, config=SPLIT))


def test_operands_out_of_bounds() -> None:
    x_TD, kernel = bf16(4, D), bf16(D, F)
    for operands, options in (
        ((x_TD, bf16(D, 2, F)), {"config": WHOLE}),
        ((x_TD, kernel), {"config": WHOLE, "activation": "silu"}),
        ((x_TD.astype(jnp.float32), kernel), {"config": WHOLE}),
        ((bf16(65, D), kernel), {"config": WHOLE}),
        ((x_TD, kernel[:, :40]), {"config": WHOLE}),
        ((x_TD, bf16(D, 2, F)), {"config": WHOLE, "activation": "gelu"}),
    ):
        with pytest.raises(ValueError, match=r"fit|bfloat16|gelu"):
            op(*operands, **options)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(TuningConfig)])
def test_bad_settings(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        dataclasses.replace(WHOLE, **{field: 17})


@pytest.mark.parametrize(("T", "config"), [(1, WHOLE), (27, WHOLE), (16, SPLIT)])
def test_the_next_norm_begins(T: int, config: TuningConfig) -> None:
    x_TD, kernel, scale_F = bf16(T, D), bf16(D, F, scale=D**-0.5), bf16(F)
    rows = small_batch_linear(
        x_TD, kernel, next_scale_F=scale_F, residual_TF=bf16(T, F), config=config, interpret=True
    )
    begun, expected = rows.half_normed, half_norm(rows.x, scale_F)
    np.testing.assert_array_equal(begun.scaled_TD, expected.scaled_TD)
    assert begun.square_XT.shape == (F // config.block_out, T)
    np.testing.assert_allclose(begun.square_XT.sum(axis=0), expected.square_XT[0], rtol=1e-5)


def test_where_it_is_faster() -> None:
    """The matrices of Qwen3 0.6B, none of Qwen2.5 7B's."""

    def asked(
        T: int, D: int, *out: int, dtype: Any = jnp.bfloat16, activation: str | None = None
    ) -> bool:
        like = partial(jax.ShapeDtypeStruct, dtype=dtype)
        return is_faster(like((T, D)), like((D, *out)), activation)

    for T in (8, 32, 64):
        assert asked(T, 1024, 4096)
        assert asked(T, 2048, 1024)
        assert asked(T, 1024, 2, 3072, activation="silu")
        assert asked(T, 3072, 1024)
        assert not asked(T, 3584, 4608)
        assert not asked(T, 18944, 3584)
    assert not asked(128, 2048, 1024)
    assert not asked(8, 2048, 1024, dtype=jnp.float32)
    assert not asked(8, 1024, 2, 3072, activation="gelu")
    assert not asked(8, 1000, 1024)
    assert not asked(8, 1024, 100)


def test_settings_fill_the_card() -> None:
    for T, F in product((8, 64), (1024, 1536, 2048, 4096)):
        config = tuning_config(T=T, D=3072, F=F, gated=False)
        assert 64 <= F // config.block_out * config.splits <= 132
