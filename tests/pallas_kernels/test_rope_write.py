"""Norm, rotation and page write in one kernel: against plain XLA."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.rope_write import TuningConfig, rope_write, rope_write_reference

CPU = {"interpret": True}


def operands(
    T: int, K: int, G: int, H: int, dtype: str, *, S: int = 16, padding: int = 3, norm: bool = True
) -> dict[str, Any]:
    """A step whose last `padding` tokens all go to page 0."""
    rng = np.random.default_rng(0)
    P = 2 + T // S + 2

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), dtype)

    angle = rng.uniform(0, 999, size=(T, H // 2))
    place_T = rng.permutation(np.arange(S, P * S))[:T]
    place_T[T - padding :] = rng.integers(0, S, padding)
    return {
        "qkv_TKXH": normal(T, K, G + 2, H),
        "cos_TD": jnp.asarray(np.cos(angle), jnp.float32),
        "sin_TD": jnp.asarray(np.sin(angle), jnp.float32),
        "pages_P2KSH": normal(P, 2, K, S, H),
        "page_T": jnp.asarray(place_T // S, jnp.int32),
        "slot_T": jnp.asarray(place_T % S, jnp.int32),
        "scales": (normal(H), normal(H)) if norm else None,
    }


def check(given: dict[str, Any], config: TuningConfig | None = None, **norm: Any) -> None:
    """Live tokens' queries and pages are the reference's, everything else in the pool stays."""
    got_q, got_pages, _ = jax.jit(partial(rope_write, config=config, **norm, **CPU))(**given)
    q, pages, _ = jax.jit(partial(rope_write_reference, **norm))(**given)
    assert (got_q.dtype, got_pages.dtype) == (q.dtype, pages.dtype)
    for got, expected in ((got_q, q), (got_pages[1:], pages[1:])):
        got, expected = (np.asarray(x, np.float32) for x in (got, expected))
        np.testing.assert_allclose(got, expected, **tolerance(q.dtype))


def tolerance(dtype: Any) -> dict[str, float]:
    """One rounding of the norm apart at most, and that carried through the rotation."""
    if dtype == jnp.float32:
        return {"rtol": 1e-6, "atol": 2e-6}
    eps = float(jnp.finfo(dtype).eps)
    return {"rtol": eps, "atol": 4 * eps}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("H", [64, 80, 96, 128, 256])
def test_head_dims_and_dtypes(H: int, dtype: str) -> None:
    check(operands(9, 2, 3, H, dtype), eps=1e-6)


@pytest.mark.parametrize("G", range(1, 9))
def test_groups(G: int) -> None:
    check(operands(7, 3, G, 64, "float32"), eps=1e-6)


@pytest.mark.parametrize("S", [8, 32, 64])
@pytest.mark.parametrize("norm", [False, True])
def test_page_sizes_with_and_without_norm(S: int, norm: bool) -> None:
    check(operands(21, 2, 2, 16, "float32", S=S, norm=norm), eps=1e-3)


@pytest.mark.parametrize("config", [TuningConfig(1, 1), TuningConfig(2, 2), TuningConfig(8, 4)])
@pytest.mark.parametrize("T", [1, 5, 32])
def test_sizes_of_a_program(T: int, config: TuningConfig) -> None:
    check(operands(T, 2, 4, 16, "bfloat16", padding=T // 3), config, eps=1e-6)


def test_gemma_adds_one_to_the_scales() -> None:
    check(operands(5, 1, 4, 32, "float32"), eps=1e-6, plus_one=True)


@pytest.mark.parametrize(("dtype", "pages"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_pages_of_another_dtype(dtype: str, pages: str) -> None:
    given = operands(5, 2, 1, 32, dtype)
    given["pages_P2KSH"] = given["pages_P2KSH"].astype(pages)
    got_q, got_pages, _ = jax.jit(partial(rope_write, eps=1e-6, **CPU))(**given)
    assert (got_q.dtype, got_pages.dtype) == (dtype, pages)
    _, expected, _ = jax.jit(partial(rope_write_reference, eps=1e-6))(**given)
    np.testing.assert_allclose(
        got_pages[1:].astype("float32"), expected[1:].astype("float32"), rtol=1e-2, atol=1e-2
    )


@pytest.mark.parametrize("pages", ["float8_e4m3fn", "float8_e5m2", "int8"])
@pytest.mark.parametrize(("dtype", "H"), [("float32", 96), ("bfloat16", 64)])
def test_pages_of_one_byte(dtype: str, H: int, pages: str) -> None:
    """Nearly all is stored as the reference has it; a rounding apart may cross a border."""
    given = operands(21, 2, 3, H, dtype)
    P, _, K, S, _ = given["pages_P2KSH"].shape
    given["pages_P2KSH"] = jnp.zeros(given["pages_P2KSH"].shape, pages)
    static = jnp.asarray([[0.01, 0.02], [0.03, 0.005]], jnp.float32)
    given["page_scales"] = jnp.zeros((P, 2, K, S)) if pages == "int8" else static
    _, got, got_scales = jax.jit(partial(rope_write, eps=1e-6, **CPU))(**given)
    _, want, want_scales = jax.jit(partial(rope_write_reference, eps=1e-6))(**given)
    assert got.dtype == pages
    got, want = (np.asarray(x[1:], np.float32) for x in (got, want))
    assert np.abs(want).max() > 100
    assert (got != want).mean() < 1e-3
    np.testing.assert_allclose(got, want, rtol=0.26 if pages != "int8" else 0, atol=1)
    skipped = int(pages == "int8")  # what padding writes into page 0 may be any of it
    np.testing.assert_allclose(got_scales[skipped:], want_scales[skipped:], rtol=1e-2)


def test_values_are_copied_bit_for_bit() -> None:
    given = operands(4, 2, 2, 16, "bfloat16", padding=0)
    _, pages, _ = rope_write(**given, eps=1e-6, **CPU)
    written = pages[given["page_T"], 1, :, given["slot_T"]]
    np.testing.assert_array_equal(written, given["qkv_TKXH"][:, :, -1])


def test_rubbish_in_padding_stays_there() -> None:
    given = operands(8, 2, 2, 16, "float32", padding=3)
    clean, _, _ = rope_write(**given, eps=1e-6, **CPU)
    given["qkv_TKXH"] = given["qkv_TKXH"].at[5:].set(np.nan)
    q, pages, _ = rope_write(**given, eps=1e-6, **CPU)
    np.testing.assert_array_equal(q[:5], clean[:5])
    assert not np.isnan(pages[1:]).any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pages_P2KSH": jnp.zeros((4, 2, 3, 16, 32))}, "do not fit"),
        ({"cos_TD": jnp.zeros((5, 32))}, "expected tables"),
        ({"scales": (jnp.zeros(16), jnp.zeros(32))}, "expected scales"),
        ({"pages_P2KSH": jnp.zeros((4, 2, 2, 16, 32), "int4")}, "must be float32"),
        ({"pages_P2KSH": jnp.zeros((4, 2, 2, 16, 32), "int8")}, r"have scales \(4, 2, 2, 16\)"),
        ({"qkv_TKXH": jnp.zeros((5, 2, 96))}, "expected activations"),
    ],
)
def test_operands_that_do_not_fit(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rope_write(**{**operands(5, 2, 1, 32, "float32"), **change}, **CPU)


@pytest.mark.parametrize("fields", [{"tokens": 3}, {"tokens": 64}, {"num_warps": 3}])
def test_configs_are_checked(fields: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be"):
        TuningConfig(**{"tokens": 8, "num_warps": 1, **fields})
