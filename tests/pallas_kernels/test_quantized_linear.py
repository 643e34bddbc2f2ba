"""Products with quantized kernels against float64, in interpret mode."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.quantized_linear import (
    TuningConfig,
    is_supported,
    quantized_linear,
    tuning_config,
)
from pallas_kernels.rms_norm import Norm, half_norm, rms_norm

D, F = 256, 128
E4M3 = jnp.float8_e4m3fn
WHOLE, SPLIT = TuningConfig(64, 16, 64, 1, 4, 2), TuningConfig(128, 32, 64, 3, 4, 2)
RNG = np.random.default_rng(0)
KINDS = ("e4m3 rows", "e4m3", "e4m3 groups", "int8", "int8 zero", "int4 groups", "int4 groups zero")


def op(*operands: Any, **options: Any) -> jax.Array:
    return quantized_linear(*operands, interpret=True, **options).x


def operands(kind: str, T: int) -> tuple[tuple[jax.Array, ...], dict[str, jax.Array], np.ndarray]:
    """Arguments, options and the result in float64."""
    x_TD = jnp.asarray(RNG.normal(size=(T, D)), E4M3 if "rows" in kind else jnp.bfloat16)
    groups = 4 if "groups" in kind else 1
    scale_GF = jnp.asarray(RNG.uniform(0.5, 2, (groups, F)) / 64, jnp.float32)
    options: dict[str, jax.Array] = {}
    if "e4m3" in kind:
        kernel = jnp.asarray(RNG.normal(size=(F, D)) * 4, E4M3)
        wide = np.asarray(kernel, np.float64)
    else:
        low, high = (-8, 8) if "int4" in kind else (-128, 128)
        wide = RNG.integers(low, high, (F, D)).astype(np.float64)
        parts = 4 if "int4" in kind else 2
        digits = (wide - low).reshape(F, -1, parts, 64 // parts)
        packed = (digits * (high - low) ** np.arange(parts)[:, None]).sum(2).reshape(F, -1)
        kernel = jnp.asarray(packed.astype(np.uint16).view("uint16" if parts == 4 else "int16"))
    if "zero" in kind:
        options["zero_GF"] = jnp.asarray(RNG.integers(low, high, (groups, F)), jnp.int8)
        wide = wide - np.repeat(np.asarray(options["zero_GF"], float), D // groups, 0).T
    if "rows" in kind:
        options["row_scale_T"] = jnp.asarray(RNG.uniform(0.5, 2, T), jnp.float32)
    dense = wide * np.repeat(np.asarray(scale_GF, np.float64), D // groups, 0).T
    want = np.asarray(x_TD, np.float64) @ dense.T
    if "rows" in kind:
        want = want * np.asarray(options["row_scale_T"])[:, None]
    scale = scale_GF if groups > 1 else scale_GF[0]
    return (x_TD, kernel, scale), options, want


@pytest.mark.parametrize("kind", KINDS)
def test_agrees_with_float64(kind: str) -> None:
    T, config = {"e4m3": (1, WHOLE), "int8": (40, WHOLE)}.get(kind, (27, SPLIT))
    arguments, options, want = operands(kind, T)
    y_TF = op(*arguments, config=config, **options)
    assert (y_TF.dtype, y_TF.shape) == (jnp.bfloat16, (T, F))
    np.testing.assert_allclose(np.asarray(y_TF, float), want, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("kind", ["e4m3 rows", "int4 groups zero"])
@pytest.mark.parametrize("config", [WHOLE, SPLIT])
def test_what_stands_around_is_done_on_the_way(kind: str, config: TuningConfig) -> None:
    arguments, options, want = operands(kind, 5)
    bias_F = jnp.asarray(RNG.normal(size=F), jnp.bfloat16)
    gate, up = np.split(want + np.asarray(bias_F, float), 2, axis=1)
    around: dict[str, Any] = {"bias_F": bias_F, "config": config, "dtype": jnp.float32}
    y_TF = op(*arguments, activation="silu", **around, **options)
    np.testing.assert_allclose(y_TF, gate / (1 + np.exp(-gate)) * up, rtol=1e-3, atol=1e-3)
    residual_TF = jnp.asarray(RNG.normal(size=(5, F)), jnp.float32)
    found = quantized_linear(
        *arguments, residual_TF=residual_TF, next_scale_F=bias_F, interpret=True, **around,
        **options,
    )  # fmt: skip
    want = want + np.asarray(bias_F, float) + np.asarray(residual_TF)
    np.testing.assert_allclose(found.x, want, rtol=1e-3, atol=1e-3)
    assert found.half_normed is not None
    np.testing.assert_allclose(
        np.asarray(found.half_normed.scaled_TD), want * np.asarray(bias_F), rtol=1e-3, atol=1e-3
    )
    np.testing.assert_allclose(found.half_normed.square_XT.sum(0), (want**2).sum(1), rtol=1e-3)


def test_a_norm_is_completed() -> None:
    (x_TD, *others), options, _ = operands("int8", 5)
    factor_D = jnp.asarray(RNG.uniform(0.5, 2, D), jnp.bfloat16)
    y_TF = op(half_norm(x_TD, factor_D), *others, eps=0.5, config=SPLIT, **options)
    normed_TD = rms_norm(x_TD, Norm(factor_D, 0.5, False)).astype(jnp.bfloat16)
    want_TF = op(normed_TD, *others, config=SPLIT, **options)
    # Rows are not rounded between their norm and the product.
    error_TF = np.abs(np.asarray(y_TF, float) - np.asarray(want_TF, float))
    assert error_TF.max() < 1e-2 * np.abs(np.asarray(want_TF, float)).max()


def test_float16() -> None:
    (x_TD, *others), options, want = operands("int4 groups", 3)
    y_TF = op(x_TD.astype(jnp.float16), *others, config=WHOLE, **options)
    assert y_TF.dtype == jnp.float16
    np.testing.assert_allclose(np.asarray(y_TF, float), want, rtol=2e-3, atol=2e-3)


def test_a_row_does_not_depend_on_the_others(config: TuningConfig = SPLIT) -> None:
    (x_TD, *others), options, _ = operands("int4 groups zero", 8)
    y_TF = op(x_TD, *others, config=config, **options)
    changed_TF = op(x_TD.at[1:].multiply(-3), *others, config=config, **options)
    np.testing.assert_array_equal(y_TF[:1], changed_TF[:1])
    np.testing.assert_array_equal(y_TF[:1], op(x_TD[:1], *others, config=config, **options))


def test_operands_out_of_bounds() -> None:
    (x_TD, kernel, scale), _, _ = operands("int8", 4)
    (_, packed, scale_GF), _, _ = operands("int4 groups", 4)
    calls: tuple[tuple[tuple[Any, ...], TuningConfig], ...] = (
        ((x_TD, kernel[:, 1:], scale), WHOLE),
        ((x_TD, packed[:, 1:], scale_GF), WHOLE),
        ((x_TD, kernel, scale[1:]), WHOLE),
        ((x_TD, kernel.astype(jnp.int32), scale), WHOLE),
        ((x_TD.astype(E4M3), kernel, scale), WHOLE),
        ((x_TD.astype(jnp.float32), kernel, scale), WHOLE),
        ((x_TD, kernel[:96], scale[:96]), WHOLE),
        ((x_TD, packed, scale_GF), dataclasses.replace(WHOLE, block_in=128)),
        ((x_TD, packed, scale_GF), dataclasses.replace(WHOLE, block_in=32)),
    )
    with pytest.raises(ValueError, match="gelu has no place"):
        op(x_TD, kernel, scale, activation="gelu", config=WHOLE)
    for operands_, config in calls:
        with pytest.raises(ValueError, match=r"fit|expected|go with"):
            op(*operands_, config=config)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(TuningConfig)])
def test_bad_settings(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        dataclasses.replace(WHOLE, **{field: 170})


@pytest.mark.parametrize("T", [1, 17, 64])
@pytest.mark.parametrize(
    ("inner", "outer"), [(3584, 4608), (3584, 3584), (3584, 37888), (18944, 3584), (896, 1152)]
)
def test_settings_fit_real_models(T: int, inner: int, outer: int) -> None:
    for group in (inner, 128, 64):
        for rows in (jnp.bfloat16, E4M3):
            sizes = {"T": T, "D": inner, "F": outer, "group": group, "rows_dtype": rows}
            assert is_supported(**sizes) == (T == 1 or rows == jnp.bfloat16)
            for kernel in (jnp.int16, jnp.uint16):
                assert tuning_config(**sizes, kernel_dtype=kernel).fits(inner, outer, group)


def test_what_is_left_to_others() -> None:
    sizes = {"T": 8, "D": 256, "F": 128, "group": 64, "rows_dtype": jnp.float16}
    assert is_supported(**sizes)
    for change in ({"T": 65}, {"F": 96}, {"group": 32}, {"group": 192}):
        assert not is_supported(**(sizes | change))
    assert not is_supported(**(sizes | {"rows_dtype": jnp.float32}))
