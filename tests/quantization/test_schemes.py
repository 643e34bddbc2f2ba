"""Every scheme against NumPy: what is stored, how far it is off, and what products make of it."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.config import EngineConfig
from jaxpaged.quantization import (
    KERNEL,
    METHODS,
    ON_THE_FLY,
    Around,
    UnsupportedQuantizationError,
    arrange,
)
from jaxpaged.quantization import fp8 as fp8_module
from jaxpaged.quantization import scheme as scheme_module
from jaxpaged.quantization.fp8 import Fp8, quantize_rows
from jaxpaged.quantization.scheme import divides, finished
from jaxpaged.quantization.weight_only import WeightOnly, pack, unpack
from pallas_kernels import quantized_linear_mosaic as mosaic
from pallas_kernels.quantized_linear import TuningConfig, quantized_linear
from pallas_kernels.rms_norm import Norm, Rows, rms_norm
from pallas_kernels.round_rows import round_added, round_gated, round_rows

RNG = np.random.default_rng(0)
SCHEMES = {name: quantized.scheme for name, quantized in ON_THE_FLY.items()} | {
    "fp8 weights, blocks of 64": WeightOnly("float8_e4m3fn", group=64),
    "int8 with zeros": WeightOnly("int8", group=64, has_zero=True),
    "int8 in one group with zeros": WeightOnly("int8", has_zero=True),
    "int4, a scale a channel": WeightOnly("int4"),
}


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


def arranged(rows: dict[str, jax.Array], ndim: int) -> dict[str, jax.Array]:
    return {name: arrange(name, x, x.ndim == ndim) for name, x in rows.items()}


def dequantized(scheme: Any, rows: dict[str, jax.Array]) -> np.ndarray:
    """[..., I] in float64, from arrays whose terms come last."""
    kernel = rows[KERNEL]
    if kernel.dtype in (jnp.uint16, jnp.int16):
        bits = 4 if kernel.dtype == jnp.uint16 else 8
        *lead, size = kernel.shape
        runs = np.asarray(kernel).reshape(*lead, -1, 1, min(size, 4 * bits)).view(np.uint16)
        parts = (runs >> np.arange(0, 16, bits)[:, None]) % 2**bits
        kernel = parts.reshape(*lead, -1).astype(float) - 2 ** (bits - 1)
    wide = np.asarray(kernel, np.float64)

    def along(name: str) -> np.ndarray:
        x = np.asarray(rows[name], np.float64)
        x = x if x.ndim == wide.ndim else x[..., None]
        return np.repeat(x, wide.shape[-1] // x.shape[-1], -1)

    zero = along("kernel_zero") if "kernel_zero" in rows else 0
    return (wide - zero) * along("kernel_scale")


def test_flag_and_schemes_have_the_same_names() -> None:
    field = EngineConfig.__dataclass_fields__["quantization"]
    assert field.metadata["choices"] == (*ON_THE_FLY, *METHODS)


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("outputs", [(12,), (2, 3, 4)])
def test_stored_arrays_and_their_error(name: str, outputs: tuple[int, ...]) -> None:
    scheme, weight = SCHEMES[name], normal(*outputs, 192) * 3
    rows = scheme.quantize(weight)
    stored = arranged(rows, weight.ndim)
    specs = scheme.arrays(192)
    assert {n: (x.shape, x.dtype) for n, x in stored.items()} == {
        n: (spec.shape(n, outputs), jnp.dtype(spec.dtype)) for n, spec in specs.items()
    }
    assert all(
        len(spec.axes(n, (None,) * len(outputs), "ffn", True)) == stored[n].ndim
        for n, spec in specs.items()
    )
    exact, found = np.asarray(weight, np.float64), dequantized(scheme, rows)
    is_float = stored[KERNEL].dtype == jnp.float8_e4m3fn
    step = np.abs(stored["kernel_scale"]).max()
    # Half a step of an integer, a whole one at the end of 4 bits that has no eighth; of a float
    # with 3 bits of mantissa half of an eighth.
    bound = step * (1 if stored[KERNEL].dtype == jnp.uint16 else 0.5)
    if is_float:
        bound = np.maximum(np.abs(exact) / 16, step * 2.0**-10)
    assert (np.abs(found - exact) <= bound * 1.001).all()


@pytest.mark.parametrize("name", SCHEMES)
def test_zeros_stay_zeros(name: str) -> None:
    rows = SCHEMES[name].quantize(jnp.zeros((4, 64)))
    np.testing.assert_array_equal(dequantized(SCHEMES[name], rows), 0)


@pytest.mark.parametrize("name", SCHEMES)
def test_products(name: str) -> None:
    scheme, weight, x_TI = SCHEMES[name], normal(2, 3, 4, 192), normal(5, 192)
    rows = scheme.quantize(weight)
    y = jax.jit(scheme.product, static_argnums=2)(x_TI, arranged(rows, 4), x_TI.dtype)
    x = np.asarray(x_TI, np.float64)
    if isinstance(scheme, Fp8):
        q_TI, scale_T = quantize_rows(x_TI)
        x = np.asarray(q_TI, np.float64) * np.asarray(scale_T)[:, None]
    assert y.shape == (5, 2, 3, 4)
    want = np.tensordot(x, np.moveaxis(dequantized(scheme, rows), -1, 0), 1)
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", SCHEMES)
def test_few_rows_on_a_gpu(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """One kernel, and the same numbers within bfloat16's rounding."""
    interpreted = {"quantized_linear": quantized_linear, "round_rows": round_rows}
    for module, name_ in ((scheme_module, "quantized_linear"), (fp8_module, "round_rows")):
        monkeypatch.setattr(module, name_, partial(interpreted[name_], interpret=True))
    scheme, x_TI = SCHEMES[name], normal(5, 128).astype(jnp.bfloat16)
    arrays = arranged(scheme.quantize(normal(2, 64, 128)), 3)
    norm = Norm(jnp.ones(128, jnp.bfloat16), 1e-6, plus_one=False)
    around = Around(norm, normal(2, 64).astype(jnp.bfloat16), "silu", None, None)

    def whole(x_TI: jax.Array) -> Any:
        return scheme.fused(Rows(x_TI), arrays, around, jnp.bfloat16).x

    names = [equation.primitive.name for equation in jax.make_jaxpr(whole)(x_TI).jaxpr.eqns]
    assert names.count("pallas_call") == (2 if isinstance(scheme, Fp8) else 1)
    assert "dot_general" not in names
    y = scheme.product(rms_norm(x_TI, norm).astype(jnp.bfloat16), arrays, jnp.float32)
    y += around.bias
    want = np.asarray(jax.nn.silu(y[:, 0]) * y[:, 1])
    error = np.abs(np.asarray(whole(x_TI), float) - want).max()
    assert error < 2e-2 * np.abs(want).max()
    for dtype, atol in ((jnp.bfloat16, 0.2), (jnp.float32, 0.1)):
        plain = scheme.product(x_TI, arrays, dtype)
        fused = scheme.fused(Rows(x_TI), arrays, Around(), dtype).x
        assert (fused.shape, fused.dtype, plain.dtype) == ((5, 2, 64), dtype, dtype)
        np.testing.assert_allclose(
            np.asarray(fused, float), np.asarray(plain, float), rtol=2e-2, atol=atol
        )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_8_bit_floats_of_few_rows_on_a_gpu(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three products in a row: a kernel rounds what each of them makes for the next."""
    monkeypatch.setattr(fp8_module, "round_rows", partial(round_rows, interpret=True))
    monkeypatch.setattr(
        scheme_module, "quantized_linear", partial(quantized_linear, interpret=True)
    )
    T, scheme = 8, Fp8()
    x_TI = normal(T, 128).astype(dtype)
    wide, down, last = (
        arranged(scheme.quantize(normal(*shape)), len(shape))
        for shape in ((2, 64, 128), (128, 64), (64, 128))
    )
    norm, next_norm = (
        Norm(jnp.asarray(RNG.uniform(0.5, 2, 128), dtype), 1e-6, plus_one=False) for _ in range(2)
    )
    around = Around(norm, normal(2, 64).astype(dtype), "silu")
    after = Around(residual=normal(T, 128).astype(dtype), next_norm=next_norm)

    def products(x_TI: jax.Array) -> list[Any]:
        gated = scheme.fused(Rows(x_TI), wide, around, dtype)
        added = scheme.fused(gated, down, after, dtype)
        return [gated.x, added.x, scheme.fused(added, last, Around(next_norm), dtype).x]

    def plain(x_TI: jax.Array) -> list[Any]:
        y = scheme.product(rms_norm(x_TI, norm).astype(dtype), wide, jnp.float32)
        y = finished(y, dtype, around.bias, "silu")
        z = after.residual + scheme.product(y, down, jnp.float32).astype(dtype)
        return [y, z, scheme.product(rms_norm(z, next_norm).astype(dtype), last, dtype)]

    for got, wanted in zip(products(x_TI), plain(x_TI), strict=True):
        got, want = np.asarray(got, float), np.asarray(wanted, float)
        assert np.abs(got - want).max() < 5e-2 * np.abs(want).max()
        assert np.abs(got - want).mean() < 2e-2 * np.abs(want).mean()
    jaxpr = str(jax.make_jaxpr(products)(x_TI))
    assert jaxpr.count("name=quantized_linear") == 3
    assert jaxpr.count("name=round_rows") == 3


@pytest.mark.parametrize(
    "name", [name for name, scheme in SCHEMES.items() if isinstance(scheme, WeightOnly)]
)
def test_more_rows_of_integers_on_hopper(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Its kernel takes what the other one would, and rows that are too many for that."""
    taken: list[int] = []

    def kernel(x: Any, *operands: Any, **options: Any) -> Rows:
        taken.append(x.scaled_TD.shape[0])
        config = TuningConfig(64, 32, 64, 1, 4, 2)
        return quantized_linear(x, *operands, config=config, interpret=True, **options)

    scheme, F = SCHEMES[name], 256
    weight, norm = normal(F, 512), Norm(jnp.ones(512, jnp.bfloat16), 1e-6, plus_one=False)
    arrays = arranged(scheme.quantize(weight), 2)
    monkeypatch.setattr(mosaic, "is_hopper", lambda: True)
    monkeypatch.setattr(mosaic, "quantized_linear_mosaic", kernel)
    serves = scheme.storage != "float8_e4m3fn"
    for T in (100, mosaic.MAX_ROWS + 1):
        x_TI = normal(T, 512).astype(jnp.bfloat16)
        rows = scheme.fused(Rows(x_TI), arrays, Around(norm), jnp.bfloat16)
        assert (rows is not None) == (serves and T == 100)
        if rows is not None:
            want = scheme.product(rms_norm(x_TI, norm).astype(jnp.bfloat16), arrays, jnp.float32)
            error = np.abs(np.asarray(rows.x, float) - np.asarray(want))
            assert error.max() < 2e-2 * np.abs(np.asarray(want)).max()
    assert taken == [100] * serves


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_8_bit_floats_of_many_rows_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, activation: str
) -> None:
    """Three products in a row: between two of them rows are read by one kernel, by nothing else
    but where that has no such activation.
    """
    kernels = {"round_rows": round_rows, "round_gated": round_gated, "round_added": round_added}
    for name, kernel in kernels.items():
        monkeypatch.setattr(fp8_module, name, partial(kernel, interpret=True))
    x_TI, scheme = normal(20, 128).astype(jnp.bfloat16), Fp8()
    wide, down, last = (
        arranged(scheme.quantize(normal(*shape)), len(shape))
        for shape in ((2, 72, 128), (96, 72), (40, 96))
    )
    norm, next_norm = (Norm(jnp.ones(n, jnp.bfloat16), 1e-6, plus_one=False) for n in (128, 96))
    around = Around(norm, normal(2, 72).astype(jnp.bfloat16), activation)
    after = Around(residual=normal(20, 96).astype(jnp.bfloat16), next_norm=next_norm)

    def products(x_TI: jax.Array) -> list[Any]:
        gated = scheme.fused(Rows(x_TI), wide, around, jnp.bfloat16)
        added = scheme.fused(gated, down, after, jnp.bfloat16)
        return [gated.x, added.x, scheme.fused(added, last, Around(next_norm), jnp.bfloat16).x]

    def plain(x_TI: jax.Array) -> list[Any]:
        y = scheme.product(rms_norm(x_TI, norm).astype(jnp.bfloat16), wide, jnp.bfloat16)
        y = finished(y, jnp.bfloat16, around.bias, activation)
        z = after.residual + scheme.product(y, down, jnp.bfloat16)
        normed = rms_norm(z, next_norm).astype(jnp.bfloat16)
        return [y, z, scheme.product(normed, last, jnp.bfloat16)]

    # XLA may leave out a rounding to bfloat16, and a value be rounded to its neighbour in e4m3.
    for got, wanted in zip(jax.jit(products)(x_TI), jax.jit(plain)(x_TI), strict=True):
        got, want = np.asarray(got, float), np.asarray(wanted, float)
        assert np.abs(got - want).max() < 5e-2 * np.abs(want).max()
        assert np.abs(got - want).mean() < 2e-2 * np.abs(want).mean()
    jaxpr = str(jax.make_jaxpr(lambda x_TI: products(x_TI)[-1])(x_TI))
    assert jaxpr.count("pallas_call[") == 3


def test_one_scale_a_tensor_or_an_output() -> None:
    weight = normal(8, 64) * jnp.arange(1, 9)[:, None]
    assert len(set(Fp8(per_tensor=True).quantize(weight)["kernel_scale"].tolist())) == 1
    assert len(set(Fp8().quantize(weight)["kernel_scale"].tolist())) == 8


def test_a_row_is_rounded_whatever_its_neighbours() -> None:
    x_TI = normal(6, 64).at[3:].multiply(1e4)
    together, alone = quantize_rows(x_TI), quantize_rows(x_TI[1:2])
    for a, b in zip(together, alone, strict=True):
        np.testing.assert_array_equal(np.asarray(a[1:2], np.float32), np.asarray(b, np.float32))
    assert np.isfinite(np.asarray(together[0], np.float32)).all()
    error = np.asarray(together[0], np.float32) * np.asarray(together[1])[:, None] - x_TI
    assert (np.abs(error) <= np.maximum(np.abs(x_TI) / 15, np.asarray(together[1])[:, None])).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_is_rounded_alike_in_steps_of_all_sizes(dtype: str) -> None:
    """Compiled for each size, as steps are: the same bytes and the same scale."""
    x_TI = (normal(300, 640) * jnp.logspace(-3, 3, 300)[:, None]).astype(dtype)
    rounded = jax.jit(quantize_rows)
    q_TI, scale_T = (np.asarray(x) for x in rounded(x_TI))
    for size in (1, 2, 8, 64):
        for start in (0, 37):
            q_SI, scale_S = (np.asarray(x) for x in rounded(x_TI[start : start + size]))
            np.testing.assert_array_equal(
                q_SI.view(np.uint8), q_TI[start : start + size].view(np.uint8)
            )
            np.testing.assert_array_equal(scale_S, scale_T[start : start + size])


def test_four_bits_use_all_sixteen_values() -> None:
    """The largest of a group is -8 times its scale, whatever its sign."""
    scheme = WeightOnly("int4", group=4)
    for sign in (1, -1):
        rows = scheme.quantize(sign * jnp.asarray([[8.0, -7.0, 3.4, -7.9]]))
        np.testing.assert_array_equal(unpack(rows[KERNEL]), [[-8, 7, -3, 7]])
        np.testing.assert_array_equal(rows["kernel_scale"], [[-sign]])


@pytest.mark.parametrize(("bits", "dtype"), [(4, jnp.uint16), (8, jnp.int16)])
def test_several_to_an_element(bits: int, dtype: Any) -> None:
    x = jnp.arange(-8, 8, dtype=jnp.int8).reshape(2, 8)
    packed = pack(x, bits)
    assert (packed.shape, packed.dtype) == ((2, bits // 2), dtype)
    # -8, -6, -4 and -2: the first of each quarter; or -8 and -4, of each half.
    assert int(packed[0, 0]) == (0x6420 if bits == 4 else 0x7C78)
    np.testing.assert_array_equal(unpack(packed), x)
    half = 2 ** (bits - 1)
    wide = jnp.asarray(RNG.integers(-half, half, (3, 192)), jnp.int8)
    np.testing.assert_array_equal(unpack(pack(wide, bits)), wide)


@pytest.mark.parametrize(("storage", "terms"), [("int4", 6), ("int8", 7)])
def test_what_does_not_fill_its_elements(storage: str, terms: int) -> None:
    with pytest.raises(UnsupportedQuantizationError, match=f"sums over {terms} terms"):
        WeightOnly(storage).arrays(terms)


@pytest.mark.parametrize("storage", ["int4", "int8"])
def test_a_device_has_whole_runs_of_packed_terms(storage: str) -> None:
    scheme = WeightOnly(storage, group=32)  # packed in runs of 64
    assert divides(scheme.arrays(256), 2)
    assert not divides(scheme.arrays(192), 2)  # though 96 terms are whole groups


def test_groups_divide_the_terms() -> None:
    scheme = WeightOnly("int4", group=128)
    assert scheme.group_size(256) == 128
    assert scheme.group_size(192) == 64
