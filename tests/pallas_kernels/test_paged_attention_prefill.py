"""The ragged prefill kernel and the whole of a mixed step, interpreted, against the definition."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ragged_attention import Ragged, attention_by_definition, in_one_byte, ragged_batch

from pallas_kernels.paged_attention_prefill import (
    TuningConfig,
    paged_attention_prefill,
    tuning_config,
)
from pallas_kernels.paged_attention_triton import paged_attention_triton

SMALL = TuningConfig(block_rows=32, block_keys=32, num_warps=4, num_stages=2)
MIXED = [(1, 5), (1, 100), (7, 7), (20, 90)]


def prefill(r: Ragged, config: TuningConfig = SMALL, **options) -> np.ndarray:
    run = partial(
        paged_attention_prefill, config=config, interpret=True, **{"scale": 0.25, **options}
    )
    out = jax.jit(run)(**vars(r))
    assert out.dtype == r.q_TNH.dtype
    return np.asarray(out, np.float32)


def check(r: Ragged, config: TuningConfig = SMALL, atol: float = 2e-6, **options: float) -> None:
    want = attention_by_definition(r, **{"scale": 0.25, **options})
    want[: int(r.num_decodes)] = 0
    np.testing.assert_allclose(prefill(r, config, **options), want, atol=atol, rtol=atol)


@pytest.mark.parametrize(
    "sequences",
    [MIXED, [(16, 16), (17, 40)], [(32, 70)], [(1, 9)] * 3, []],
    ids=str,
)
def test_ragged_batches(sequences: list[tuple[int, int]]) -> None:
    check(ragged_batch(sequences, T=40, B=4))


@pytest.mark.parametrize("window", [1, 20, 1000])
def test_window(window: int) -> None:
    check(ragged_batch(MIXED, T=32, B=4), window=window)


def test_pages_before_the_window_may_be_gone() -> None:
    r = ragged_batch([(20, 120)], T=20, B=1)
    table = np.asarray(r.page_table_BM).copy()
    table[0, : (100 - 9) // 16] = 0  # page 0 holds NaN
    gone = r.replace(page_table_BM=jnp.asarray(table))
    assert (prefill(gone, window=10) == prefill(r, window=10)).all()


def test_softcap_and_scale() -> None:
    check(ragged_batch(MIXED, T=32, B=4), softcap=3.0, scale=2.0)


@pytest.mark.parametrize(
    "shape",
    [
        {"N": 7, "K": 1, "H": 64},
        {"N": 16, "K": 1, "H": 80, "S": 32, "M": 4},
        {"N": 2, "K": 2, "H": 96, "S": 64, "M": 2},
        {"N": 2, "K": 1, "H": 256, "S": 128, "M": 1},
    ],
    ids=str,
)
def test_shapes(shape: dict[str, int]) -> None:
    check(ragged_batch([(1, 20), (12, 70)], T=16, B=2, **shape), scale=0.1, atol=4e-6)


@pytest.mark.parametrize(("dtype", "atol"), [("bfloat16", 2e-2), ("float16", 3e-3)])
def test_half_precision(dtype: str, atol: float) -> None:
    check(ragged_batch(MIXED, T=32, B=4, dtype=dtype), atol=atol)


@pytest.mark.parametrize("field", ["block_rows", "block_keys", "num_warps", "num_stages"])
def test_settings_are_validated(field: str) -> None:
    setting = {"block_rows": 32, "block_keys": 32, "num_warps": 4, "num_stages": 2}
    with pytest.raises(ValueError, match=field):
        TuningConfig(**{**setting, field: 9})


def test_float32_gets_small_tiles() -> None:
    full, half = (tuning_config(H=128, bytes_per_element=size) for size in (4, 2))
    assert full.block_rows < half.block_rows


@pytest.mark.parametrize("options", [{}, {"window": 20, "softcap": 9.0}], ids=str)
def test_a_mixed_step(options: dict[str, float]) -> None:
    r = ragged_batch(MIXED, T=32, B=6)
    step = partial(paged_attention_triton, scale=0.25, interpret=True, **options)
    got = jax.jit(step)(**vars(r))
    want = attention_by_definition(r, scale=0.25, **options)
    np.testing.assert_allclose(got, want, atol=2e-6)


@pytest.mark.parametrize("T", [4, 6])
def test_a_step_of_decodes(T: int) -> None:
    r = ragged_batch([(1, 5), (1, 60)], T=T, B=4)
    step = partial(paged_attention_triton, scale=0.25, decode_only=True, interpret=True)
    got = jax.jit(step)(**vars(r))
    np.testing.assert_allclose(got, attention_by_definition(r, scale=0.25), atol=2e-6)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
@pytest.mark.parametrize(
    ("shape", "options"),
    [({"H": 32}, {}), ({"N": 7, "K": 1, "H": 80}, {"window": 20, "softcap": 9.0})],
    ids=str,
)
def test_a_mixed_step_on_pages_of_one_byte(dtype: str, shape: dict, options: dict) -> None:
    q_dtype, atol = ("bfloat16", 2e-2) if options else ("float32", 2e-6)
    r = in_one_byte(ragged_batch(MIXED, T=32, B=6, dtype=q_dtype, **shape), dtype)
    step = partial(paged_attention_triton, scale=0.25, interpret=True, **options)
    got = np.asarray(jax.jit(step)(**vars(r)), np.float32)
    want = attention_by_definition(r, scale=0.25, **options)
    np.testing.assert_allclose(got, want, atol=atol, rtol=atol)
