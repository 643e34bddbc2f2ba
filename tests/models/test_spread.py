from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models

from jaxpaged.models import load_spec
from jaxpaged.models.spread import spread_leaf, spread_spec
from jaxpaged.quantization import ON_THE_FLY

SPEC = load_spec(tiny_models.CONFIGS["qwen2"])  # 6 query heads, 2 KV heads, 56, 97 tokens


def test_one_device_changes_nothing() -> None:
    assert spread_spec(SPEC, 1) is SPEC


@pytest.mark.parametrize(
    ("num_devices", "num_kv_heads", "copies"), [(2, 2, 1), (3, 6, 3), (6, 6, 3)]
)
def test_kv_heads_are_copied_until_they_divide(
    num_devices: int, num_kv_heads: int, copies: int
) -> None:
    spread = spread_spec(replace(SPEC, ffn=60), num_devices)
    assert (spread.num_kv_heads, spread.kv_copies) == (num_kv_heads, copies)
    assert spread.num_kv_heads * spread.queries_per_kv_head == 6
    assert spread.stored == replace(SPEC, ffn=60)


def test_the_vocabulary_is_padded_to_whole_mask_words() -> None:
    assert spread_spec(SPEC, 2).vocab_rows == 128
    assert spread_spec(replace(SPEC, vocab=192), 2).vocab_padding == 0


def test_what_does_not_divide_is_named_with_what_does() -> None:
    with pytest.raises(ValueError) as error:
        spread_spec(SPEC, 4)
    assert str(error.value) == (
        "-tp 4 does not divide this model's num_attention_heads (6); what does: 1, 2"
    )
    with pytest.raises(ValueError, match=r"heads \(6\) and intermediate_size \(56\); .*: 1, 2$"):
        spread_spec(SPEC, 5)


def test_packed_weights_divide_by_elements() -> None:
    packed = replace(SPEC, ffn=60).quantized_like(ON_THE_FLY["int4_per_group_weight_only"])
    assert spread_spec(packed, 3).kv_copies == 3  # 15 elements of the MLP, 12 of the heads
    with pytest.raises(ValueError) as error:
        spread_spec(packed, 2)
    assert str(error.value) == (
        "-tp 2 does not divide this model's intermediate_size / 4, since 4 "
        "weights of down_proj share an element (15); what does: 1, 3"
    )
    whole = packed.quantized_like(ON_THE_FLY["int8_per_channel_weight_only"])
    assert spread_spec(whole, 2).stored == whole


def test_queries_keep_their_keys() -> None:
    spec = spread_spec(replace(SPEC, ffn=60), 6)
    qkv_KXH = jnp.arange(2 * 5 * 8).reshape(2, 5, 8)
    spread_KXH = spread_leaf(spec, "layers_0/attention/qkv/bias", qkv_KXH)
    assert spread_KXH.shape == (6, 3, 8)
    for head in range(6):
        np.testing.assert_array_equal(spread_KXH[head, 0], qkv_KXH[head // 3, head % 3])
        np.testing.assert_array_equal(spread_KXH[head, 1:], qkv_KXH[head // 3, 3:])
