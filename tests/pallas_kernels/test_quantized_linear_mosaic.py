"""The Hopper kernel for quantized products: who computes what, what it refuses, and its results.

Those come from an H200 where there is one, and from the dialect's interpreter on CPUs. That one has
no two views of one memory and none of Mosaic's own operations, hence the stand-ins here: what is
tested on CPUs is which tiles are read, how programs share sums, and the arithmetic of groups.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from deviceless import check_mosaic, needs_compiler
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import quantized_linear_mosaic as module
from pallas_kernels.quantized_linear_mosaic import (
    BAND,
    BLOCK,
    MAX_ROWS,
    SHARED_MEMORY,
    WARPGROUPS,
    TuningConfig,
    begin_of,
    is_supported,
    program_of,
    quantized_linear_mosaic,
    terms_of_step,
    tuning_config,
)
from pallas_kernels.rms_norm import HalfNormed
from pallas_kernels.wide_integers import unit

RNG = np.random.default_rng(0)
F = 256


def operands(
    kernel: str, D: int, groups: int, zeros: bool, T: int, dtype: Any = jnp.bfloat16
) -> tuple[tuple[jax.Array, ...], dict[str, jax.Array], np.ndarray]:
    """Rows, weights and scales; zeros; the product in float64."""
    low, high, parts = (-8, 8, 4) if kernel == "uint16" else (-128, 128, 2)
    wide = RNG.integers(low, high, (F, D)).astype(np.float64)
    digits = (wide - low).reshape(F, -1, parts, 64 // parts)
    packed = (digits * (high - low) ** np.arange(parts)[:, None]).sum(2).reshape(F, -1)
    stored = jnp.asarray(packed.astype(np.uint16).view(kernel))
    options: dict[str, jax.Array] = {}
    if zeros:
        options["zero_GF"] = jnp.asarray(RNG.integers(low, high, (groups, F)), jnp.int8)
        wide = wide - np.repeat(np.asarray(options["zero_GF"], float), D // groups, 0).T
    scale_GF = jnp.asarray(RNG.uniform(0.5, 2, (groups, F)) / high / 16, jnp.float32)
    dense = wide * np.repeat(np.asarray(scale_GF, float), D // groups, 0).T
    x_TD = jnp.asarray(RNG.normal(size=(T, D)), dtype)
    scale = scale_GF if groups > 1 else scale_GF[0]
    return (x_TD, stored, scale), options, np.asarray(x_TD, float) @ dense.T


@pytest.mark.parametrize(("tiles", "steps", "programs"), [(148, 14, 66), (14, 74, 66), (3, 5, 15)])
def test_steps_are_shared_out_evenly(tiles: int, steps: int, programs: int) -> None:
    total = tiles * steps
    begins = [int(begin_of(c, programs, total)) for c in range(programs + 1)]
    assert (begins[0], begins[-1]) == (0, total)
    sizes = np.diff(begins)
    assert sizes.min() >= 1
    assert sizes.max() - sizes.min() <= 1
    owners = [int(program_of(step, programs, total)) for step in range(total)]
    np.testing.assert_array_equal(owners, np.repeat(np.arange(programs), sizes))


@pytest.mark.parametrize("kernel", [jnp.int16, jnp.uint16])
@pytest.mark.parametrize("T", [17, 32, 33, 64, 65, 128, 256])
def test_settings_fit_real_models(kernel: Any, T: int) -> None:
    for inner, outer in ((3584, 4608), (3584, 37888), (18944, 3584), (3584, 152064), (4096, 6144)):
        for group in (inner, 128, 64):
            sizes = {"T": T, "D": inner, "F": outer, "group": group}
            types = {"rows_dtype": jnp.bfloat16, "kernel_dtype": kernel}
            assert is_supported(**sizes, **types, gated_zeros=False)
        config = tuning_config(T=T, kernel_dtype=kernel)
        step = BLOCK * 128 + config.block_rows * terms_of_step(kernel) * 2
        assert config.num_stages * step <= SHARED_MEMORY


def test_what_is_left_to_others() -> None:
    sizes: dict[str, Any] = {"T": 64, "D": 1024, "F": 256, "group": 128}
    sizes |= {"rows_dtype": jnp.float16, "kernel_dtype": jnp.uint16, "gated_zeros": True}
    assert is_supported(**sizes)
    assert not is_supported(**(sizes | {"T": 8}))
    assert is_supported(**(sizes | {"T": 8, "F": 37888}))
    for change in (
        {"T": MAX_ROWS + 1}, {"T": 16, "kernel_dtype": jnp.int16}, {"F": 192}, {"D": 896},
        {"group": 32}, {"group": 192}, {"group": 256}, {"rows_dtype": jnp.float32},
        {"kernel_dtype": jnp.int8}, {"kernel_dtype": jnp.float8_e4m3fn},
    ):  # fmt: skip
        assert not is_supported(**(sizes | change))


def test_operands_out_of_bounds() -> None:
    (x_TD, kernel, scale), _, _ = operands("int16", 256, 1, False, 4)
    for bad in (
        (x_TD, kernel[:, 1:], scale),
        (x_TD, kernel[:192], scale[:192]),
        (x_TD, kernel, scale[1:]),
        (x_TD.astype(jnp.float32), kernel, scale),
        (x_TD, kernel.astype(jnp.int32), scale),
    ):
        with pytest.raises(ValueError, match="fit"):
            quantized_linear_mosaic(*bad)
    with pytest.raises(ValueError, match="gelu has no place"):
        quantized_linear_mosaic(x_TD, kernel, scale, activation="gelu")
    with pytest.raises(ValueError, match="gated"):
        quantized_linear_mosaic(x_TD, kernel, scale, activation="silu", residual_TF=x_TD)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(TuningConfig)])
def test_bad_settings(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        dataclasses.replace(TuningConfig(32, 4), **{field: 0})


@needs_compiler
def test_compiles_with_products_that_overlap() -> None:
    check_mosaic("products", count=11)


class Twice:
    """One array in the place of two views."""

    def __init__(self, ref: Any) -> None:
        self.ref = ref

    def __iter__(self) -> Iterator[Any]:
        return iter((self.ref, self.ref))

    def __getitem__(self, _: int) -> Any:
        return self.ref


jax.tree_util.register_pytree_node(Twice, lambda x: ((x.ref,), None), lambda _, x: Twice(*x))


def scratch(real: Any, config: TuningConfig, kernel: Any, rows: Any, **sizes: Any) -> Any:
    words, boxes = 128 // jnp.dtype(kernel).itemsize, terms_of_step(kernel) // 64
    stages, N = config.num_stages, config.block_rows
    return real(config, kernel, rows, **sizes)._replace(
        weights=Twice(plgpu.SMEM((stages, BLOCK, words), kernel)),
        rows=Twice(plgpu.SMEM((stages, boxes, N, 64), rows)),
        numbers=plgpu.SMEM((WARPGROUPS, 2, BAND, N), jnp.float32),
    )


def load_row_sums(ref: Any, first: Any, N: int, _: Any) -> jax.Array:
    return ref[:, pl.ds(first, N)].sum(0)


def store_block(ref: Any, y_BN: jax.Array, outputs: Any, first: Any) -> None:
    B, N = y_BN.shape
    ref[pl.ds(first, N), pl.ds(outputs.first, B)] = y_BN.T


def store_rows(ref: Any, y_N: jax.Array, first: Any) -> None:
    ref[pl.ds(first, y_N.size)] = y_N


def load_block(ref: Any, outputs: Any, first: Any, shape: tuple[int, int]) -> jax.Array:
    return ref[pl.ds(first, shape[1]), pl.ds(outputs.first, shape[0])].T


def unpack_run(words: jax.Array, run: int, zero_B: jax.Array | None, dtype: Any) -> jax.Array:
    bits, X = (4, 16) if words.dtype == jnp.uint16 else (8, 32)
    words_BX, top = words[:, X * run : X * run + X].astype(jnp.int32), 2**bits
    parts = [(words_BX >> at) % top - top // 2 for at in range(0, 16, bits)]
    weights = jnp.concatenate(parts, axis=1) - (0 if zero_B is None else zero_B[:, None])
    return (weights * unit(dtype)).astype(dtype)


def store_part(ref: Any, sum_BN: jax.Array) -> None:
    ref[...] = sum_BN.reshape(ref.shape)


def add_part(
    sum_BN: jax.Array, ref: Any, own_BN: jax.Array, is_own: jax.Array, is_there: jax.Array
) -> jax.Array:
    part_BN = jnp.where(is_own, own_BN, ref[...].reshape(own_BN.shape))
    return sum_BN + jnp.where(is_there, part_BN, 0)


def others_arrived(arrived_ref: Any, last: Any, likely: Any, count_ref: Any) -> None:
    count = jnp.where(likely, arrived_ref[...], -1)
    count_ref[...] = count
    arrived_ref[...] = jnp.where(count == last, 0, arrived_ref[...])


def arrive(arrived_ref: Any, last: Any, count_ref: Any) -> None:
    count = arrived_ref[...]
    count_ref[...] = count
    arrived_ref[...] = jnp.where(count == last, 0, count + 1)


STAND_INS: dict[str, Any] = {
    "load_outputs": lambda ref, outputs, B: ref[pl.ds(outputs.first, B)],
    "load_group": lambda ref, g, outputs, B: ref[0, g, pl.ds(outputs.first, B)],
    "sum_of_outputs": lambda y_BN, _: y_BN.sum(0),
}
STAND_INS |= {
    function.__name__: function
    for function in (
        load_row_sums, store_block, store_rows, load_block, unpack_run, store_part, add_part,
        others_arrived, arrive,
    )
}  # fmt: skip


def wgmma(acc: Any, a: jax.Array, b: Any) -> None:
    acc[...] += jnp.dot(a, b[...], preferred_element_type=jnp.float32)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    if jax.__version_info__ < (0, 11):
        pytest.skip("the interpreter of older versions lacks layouts")
    interpreter = pytest.importorskip("jax._src.pallas.mosaic_gpu.interpret.shared_memory")
    kernel, sum_of = plgpu.kernel, module._sum
    sums: list[Any] = []  # where a warpgroup's accumulators lie

    def sum_in_memory(scratch: Any, *operands: Any) -> jax.Array:
        sums[:] = [scratch.numbers.at[lax.axis_index("warpgroup")]]
        return sum_of(scratch, *operands)

    def run_scoped(body: Any, *accs: Any) -> Any:
        refs = [sums[0].at[i] for i in range(len(accs))]
        for ref in refs:
            ref[...] = jnp.zeros(ref.shape, jnp.float32)
        return body(*refs)

    def forget(barrier: Any) -> None:  # that some of its phases went by unseen
        with barrier.cv:
            barrier.ref_count -= 1

    interpret = plgpu.InterpretGPUParams(uninitialized_memory="zero")
    monkeypatch.setattr(plgpu, "kernel", partial(kernel, interpret=interpret))
    monkeypatch.setattr(plgpu, "wgmma", wgmma)
    monkeypatch.setattr(plgpu, "wgmma_wait", lambda _: None)
    monkeypatch.setattr(plgpu, "wgmma_accumulator_load", lambda acc, wait_n: acc[...])
    monkeypatch.setattr(module.pl, "run_scoped", run_scoped)
    monkeypatch.setattr(module, "_sum", sum_in_memory)
    monkeypatch.setattr(interpreter.Barrier, "deallocate", forget)
    monkeypatch.setattr(module, "_scratch", partial(scratch, module._scratch))
    for name, stand_in in STAND_INS.items():
        monkeypatch.setattr(module, name, stand_in)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("kernel", "D", "groups", "zeros", "T", "rows", "programs"),
    [
        ("uint16", 512, 4, True, 32, 32, 5),  # sums of two and three programs, and whole ones
        ("uint16", 512, 1, False, 32, 32, 2),
        ("int16", 256, 1, False, 32, 32, 3),
        ("int16", 256, 4, True, 32, 32, 4),
        ("uint16", 512, 4, True, 8, 8, 5),
        ("int16", 256, 1, False, 16, 16, 3),
        ("uint16", 512, 4, True, 64, 32, 7),  # two blocks of rows
    ],
)
def test_results_interpreted(
    kernel: str, D: int, groups: int, zeros: bool, T: int, rows: int, programs: int
) -> None:
    arguments, options, want = operands(kernel, D, groups, zeros, T)
    config = TuningConfig(rows, 2, programs)
    y_TF = quantized_linear_mosaic(*arguments, config=config, **options).x
    np.testing.assert_allclose(np.asarray(y_TF, float), want, rtol=1e-2, atol=1e-2)


def around(T: int, D: int, dtype: Any = jnp.bfloat16) -> dict[str, Any]:
    """What stands around a product, but for its activation."""
    return {
        "bias_F": jnp.asarray(RNG.normal(size=F), dtype),
        "residual_TF": jnp.asarray(RNG.normal(size=(T, F)), dtype),
        "next_scale_F": jnp.asarray(RNG.normal(size=F), dtype),
        "square_XT": jnp.asarray(RNG.uniform(0.5, 1.5, (5, T)) * D / 5, jnp.float32),
    }


def check_around(got: Any, product_TF: np.ndarray, D: int, given: dict[str, Any]) -> None:
    """Results within the rounding of their dtype, and the norm begun with them as they are."""
    mean_T = np.asarray(given["square_XT"], float).sum(0) / D
    want = product_TF / np.sqrt(mean_T + 0.5)[:, None]
    want += np.asarray(given["bias_F"], float) + np.asarray(given["residual_TF"], float)
    y_TF = np.asarray(got.x, float)
    np.testing.assert_allclose(y_TF, want, rtol=1e-2, atol=1e-2)
    scaled_TF = np.asarray((got.x * given["next_scale_F"]), float)
    np.testing.assert_array_equal(np.asarray(got.half_normed.scaled_TD, float), scaled_TF)
    square_T = got.half_normed.square_XT.sum(0)
    np.testing.assert_allclose(square_T, (y_TF**2).sum(1), rtol=1e-4)


@pytest.mark.usefixtures("interpreted")
def test_what_stands_around_interpreted() -> None:
    (x_TD, *others), options, want = operands("uint16", 256, 2, False, 32)
    given = around(32, 256)
    got = quantized_linear_mosaic(
        HalfNormed(x_TD, given["square_XT"]),
        *others,
        eps=0.5,
        config=TuningConfig(32, 2, 3),
        **{name: value for name, value in given.items() if name != "square_XT"},
        **options,
    )
    check_around(got, want, 256, given)


def is_hopper() -> bool:
    device = jax.devices()[0]
    return device.platform == "gpu" and device.compute_capability == "9.0"


@pytest.mark.skipif(not is_hopper(), reason="needs a Hopper GPU")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("T", [1, 9, 17, 33, 100, 200])
@pytest.mark.parametrize(
    ("kernel", "D", "groups", "zeros"),
    [
        ("uint16", 1024, 8, True),
        ("uint16", 1024, 16, False),
        ("uint16", 18944, 148, True),
        ("uint16", 1024, 1, False),
        ("int16", 1024, 1, False),
        ("int16", 1024, 16, True),
    ],
)
def test_results(dtype: str, T: int, kernel: str, D: int, groups: int, zeros: bool) -> None:
    (x_TD, *others), options, want = operands(kernel, D, groups, zeros, T, jnp.dtype(dtype))
    given = around(T, D, jnp.dtype(dtype))
    added = {name: value for name, value in given.items() if name != "square_XT"}
    run = jax.jit(partial(quantized_linear_mosaic, eps=0.5))
    x = HalfNormed(x_TD, given["square_XT"])
    got, again = (run(x, *others, **added, **options) for _ in range(2))
    check_around(got, want, D, given)
    np.testing.assert_array_equal(got.x, again.x)
    gated = jax.jit(partial(quantized_linear_mosaic, activation="silu"))(x_TD, *others, **options)
    gate, up = np.split(want, 2, axis=1)
    np.testing.assert_allclose(
        np.asarray(gated.x, float), gate / (1 + np.exp(-gate)) * up, rtol=1e-2, atol=1e-2
    )
