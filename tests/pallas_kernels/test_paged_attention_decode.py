"""The split-KV decode kernel, interpreted, against its definition."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ragged_attention import Ragged, attention_by_definition, in_one_byte, ragged_batch

from pallas_kernels.paged_attention_decode import (
    TuningConfig,
    paged_attention_decode,
    tuning_config,
)

WHOLE = TuningConfig(block_keys=32, num_warps=2, num_stages=2, programs=0)
CUT = TuningConfig(block_keys=16, num_warps=2, num_stages=2, programs=12)


def attention(r: Ragged, config: TuningConfig = CUT, scale: float = 0.25, **options) -> np.ndarray:
    options |= {"scale": scale, "page_scales": r.page_scales}
    decode = partial(paged_attention_decode, config=config, interpret=True, **options)
    out = jax.jit(decode)(
        r.q_TNH, r.pages_P2KSH, r.page_table_BM, kv_len_B=r.kv_len_B, num_decodes=r.num_decodes
    )
    assert out.dtype == r.q_TNH.dtype
    return np.asarray(out, np.float32)


def check(r: Ragged, config: TuningConfig = CUT, atol: float = 2e-6, **options) -> None:
    got = attention(r, config, **options)
    want = attention_by_definition(r, **{"scale": 0.25, **options})
    np.testing.assert_allclose(got, want, atol=atol, rtol=atol)


def batch(*lengths: int, **shape) -> Ragged:
    return ragged_batch([(1, n) for n in lengths], **{"T": 4, "B": 4, **shape})


@pytest.mark.parametrize("config", [WHOLE, CUT], ids=["whole", "cut"])
@pytest.mark.parametrize("lengths", [(5, 200, 33), (1,), (16, 32, 48, 200)], ids=str)
def test_ragged_lengths(lengths: tuple[int, ...], config: TuningConfig) -> None:
    check(batch(*lengths), config)


def test_one_long_sequence_is_cut_into_many() -> None:
    check(batch(380, T=1, B=1))


def test_layers_share_a_plan() -> None:
    """The kernel leaves its counts of finished items as it found them."""
    r = batch(200, 90, 33)
    decode = partial(
        paged_attention_decode, scale=0.25, config=CUT, interpret=True, num_decodes=r.num_decodes
    )

    @jax.jit
    def layers(q_TNH: jax.Array) -> list[jax.Array]:
        return [
            decode(factor * q_TNH, r.pages_P2KSH, r.page_table_BM, kv_len_B=r.kv_len_B)
            for factor in (1.0, 2.0, 3.0)
        ]

    for factor, out in zip((1.0, 2.0, 3.0), layers(r.q_TNH), strict=True):
        want = attention_by_definition(r, scale=0.25 * factor)
        np.testing.assert_allclose(out, want, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize(("B", "programs"), [(1, 64), (3, 30), (6, 2), (6, 64)])
def test_any_number_of_sequences_and_programs(B: int, programs: int) -> None:
    lengths = [150, 1, 40, 150, 64, 17][: max(1, B - 1)]
    r = ragged_batch([(1, n) for n in lengths], T=B, B=B)
    check(r, TuningConfig(block_keys=16, num_warps=2, num_stages=2, programs=programs))


@pytest.mark.parametrize("lengths", [(), (0, 40, 0)], ids=str)
def test_empty_and_missing_sequences_give_zeros(lengths: tuple[int, ...]) -> None:
    r = batch(*lengths)
    assert (attention(r)[np.asarray(r.kv_len_B) == 0] == 0).all()


@pytest.mark.parametrize("window", [1, 30])
def test_window(window: int) -> None:
    check(batch(100, 20), window=window)


def test_softcap_and_scale() -> None:
    check(batch(100, 20), softcap=3.0, scale=2.0)


@pytest.mark.parametrize(
    "shape",
    [
        {"N": 2, "K": 2, "H": 64},
        {"N": 7, "K": 1, "H": 80, "S": 32, "M": 4},
        {"N": 16, "K": 1, "H": 96, "S": 64, "M": 2},
        {"N": 2, "K": 1, "H": 256, "S": 128, "M": 1},
        {"N": 4, "K": 2, "H": 8},
    ],
    ids=str,
)
def test_shapes(shape: dict[str, int]) -> None:
    check(batch(100, 20, **shape), scale=0.1)


@pytest.mark.parametrize(("dtype", "atol"), [("bfloat16", 2e-2), ("float16", 3e-3)])
def test_half_precision(dtype: str, atol: float) -> None:
    check(batch(100, 20, dtype=dtype), atol=atol)


def test_pages_narrower_than_the_queries() -> None:
    r = batch(100, 20, dtype="bfloat16")
    check(r.replace(q_TNH=r.q_TNH.astype("float32")))


def test_other_rows_stay_where_it_writes_into_an_array() -> None:
    r = batch(100, 20, T=6)
    into = jnp.full_like(r.q_TNH, 7)
    got = attention(r, into_TNH=into)
    assert (got[2:] == 7).all()
    np.testing.assert_allclose(got[:2], attention_by_definition(r, scale=0.25)[:2], atol=2e-6)


@pytest.mark.parametrize(
    ("field", "value"),
    [("block_keys", 48), ("num_warps", 3), ("num_stages", 0), ("programs", -1)],
)
def test_settings_are_validated(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=field):
        TuningConfig(
            **{"block_keys": 32, "num_warps": 2, "num_stages": 2, "programs": 0, field: value}
        )


@pytest.mark.parametrize(
    ("shape", "options", "complaint"),
    [
        ({"N": 17, "K": 1}, {}, "at most 16"),
        ({"T": 8}, {}, "8 queries for 4"),
        ({"S": 24}, {}, "power of two"),
        ({"dtype": "int8"}, {}, "int8"),
        ({}, {"window": 0}, "window"),
        ({}, {"softcap": -1.0}, "softcap"),
    ],
)
def test_operands_are_validated(shape: dict, options: dict, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        attention(batch(5, **shape), **options)


def test_settings_depend_on_static_shapes() -> None:
    large = tuning_config(B=256, K=8, H=128, bytes_per_element=2)
    assert large != tuning_config(B=1, K=8, H=128, bytes_per_element=2)
    narrow = tuning_config(B=256, K=8, H=128, bytes_per_element=2, narrow=True)
    assert narrow.num_warps > tuning_config(B=128, K=8, H=128, bytes_per_element=2).num_warps
    wide = tuning_config(B=256, K=8, H=128, bytes_per_element=4)
    assert wide.block_keys < large.block_keys


ONE_BYTE = ["float8_e4m3fn", "float8_e5m2", "int8"]


@pytest.mark.parametrize("dtype", ONE_BYTE)
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ({"H": 64}, {}),
        ({"N": 7, "K": 1, "H": 80, "S": 32, "M": 4}, {"window": 30}),
        ({"N": 16, "K": 1, "H": 32, "S": 64, "M": 2}, {"softcap": 3.0}),
    ],
    ids=str,
)
def test_pages_of_one_byte(dtype: str, shape: dict, options: dict) -> None:
    check(in_one_byte(batch(100, 20, **shape), dtype), **options)


@pytest.mark.parametrize("dtype", ONE_BYTE)
def test_half_precision_reads_pages_of_one_byte_in_pairs(dtype: str) -> None:
    """Queries of any size: in float16, each row is over a power of two of its own."""
    r = batch(100, 20, dtype="bfloat16", N=4, K=2, H=48)
    r = r.replace(q_TNH=r.q_TNH * jnp.asarray([1e5, 1, 1e-5, 0.1], "bfloat16")[:, None])
    check(in_one_byte(r, dtype), atol=2e-2, scale=0.1)


@pytest.mark.parametrize("H", [16, 30])
def test_rows_that_make_no_pairs_are_refused(H: int) -> None:
    with pytest.raises(ValueError, match=f"multiples of 4 from 20, got {H}"):
        attention(in_one_byte(batch(5, H=H), "int8"))
