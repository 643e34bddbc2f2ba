"""config.json in its old and new spellings, and what it is refused for."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_models

from jaxpaged.layers.rope import RopeSpec
from jaxpaged.models import FAMILIES, UnsupportedModelError, load_spec

LLAMA = tiny_models.CONFIGS["llama2"]
MISTRAL = tiny_models.CONFIGS["mistral-window"]
QWEN3 = tiny_models.CONFIGS["qwen3"]
GEMMA3 = tiny_models.CONFIGS["gemma3-old"]


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def windows(config: dict[str, Any]) -> list[int | None]:
    return [layer.window for layer in load_spec(config).layers]


def ropes(config: dict[str, Any]) -> list[RopeSpec]:
    return [layer.rope for layer in load_spec(config).layers]


def test_old_and_new_spellings_of_rope_agree() -> None:
    scaling = {"rope_type": "linear", "factor": 4.0}
    old = {**LLAMA, "rope_theta": 5e5, "rope_scaling": scaling}
    new = {**LLAMA, "rope_parameters": {**scaling, "rope_theta": 5e5}}
    assert ropes(old) == ropes(new)
    assert ropes(old)[0].theta == 5e5


def test_gemma_spellings_agree() -> None:
    nested = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    old = without(GEMMA3, "rope_parameters")
    new = without(GEMMA3, "rope_theta", "rope_local_base_freq", "rope_scaling")
    new |= {"rope_parameters": nested}
    assert ropes(old) == ropes(new)
    assert [(rope.theta, rope.kind) for rope in ropes(new)] == [
        (1e4, "default"),
        (1e4, "default"),
        (1e6, "linear"),
    ]


def test_gemma_without_any_rope_has_its_own_bases() -> None:
    bare = without(GEMMA3, "rope_theta", "rope_local_base_freq", "rope_scaling")
    assert [rope.theta for rope in ropes(bare)] == [1e4, 1e4, 1e6]


def test_gemma_defaults() -> None:
    spec = load_spec(without(GEMMA3, "head_dim", "query_pre_attn_scalar"))
    assert (spec.head_dim, spec.attention_scale) == (256, 256**-0.5)
    assert spec.tie_embeddings  # config.json leaves it out
    assert spec.eos_token_ids == (1, 2)


def test_gemma_window_pattern() -> None:
    many = without(GEMMA3, "sliding_window_pattern") | {"num_hidden_layers": 12}
    assert windows(many) == [9, 9, 9, 9, 9, None] * 2


def test_mistral_window_may_be_null_and_defaults_to_4096() -> None:
    assert windows(MISTRAL) == [7, 7]
    assert windows({**MISTRAL, "sliding_window": None}) == [None, None]
    assert windows(without(MISTRAL, "sliding_window")) == [4096, 4096]


def test_qwen_windows_need_their_switch() -> None:
    config = {**QWEN3, "num_hidden_layers": 3, "sliding_window": 8, "max_window_layers": 1}
    assert windows(config) == [None] * 3
    assert windows({**config, "use_sliding_window": True}) == [None, 8, 8]


def test_sizes_and_defaults() -> None:
    spec = load_spec(without(LLAMA, "num_key_value_heads", "torch_dtype"))
    assert (spec.num_kv_heads, spec.head_dim, spec.queries_per_kv_head) == (3, 16, 1)
    assert spec.dtype == "float32"
    assert not spec.tie_embeddings
    assert load_spec({**without(LLAMA, "torch_dtype"), "dtype": "bfloat16"}).dtype == "bfloat16"


def test_specs_are_hashable() -> None:
    assert len({load_spec(config) for config in tiny_models.CONFIGS.values()}) == len(
        tiny_models.CONFIGS
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, "Gemma3ForConditionalGeneration"),
        ({"architectures": None, "model_type": "mamba"}, "none .model type 'mamba'."),
        (
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            "ordinary weights with --quant",
        ),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn' .*bfloat16"),
        ({"hidden_act": "relu"}, "activation 'relu' .*silu"),
        ({"num_attention_heads": 4}, "num_attention_heads 4 is not a multiple"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "RoPE scaling 'dynamic'"),
        ({"vocab_size": None}, "lacks 'vocab_size'"),
    ],
)
def test_what_is_not_supported_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message) as error:
        load_spec({**LLAMA, **change})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", [{"a": 1}, {}, 3, 0, [["x"]], ["LlamaForCausalLM", 1], "Llama"])
def test_architectures_of_the_wrong_kind(value: object) -> None:
    with pytest.raises(UnsupportedModelError, match="architectures must be a list of names") as e:
        load_spec({**LLAMA, "architectures": value})
    assert repr(value) in str(e.value)


@pytest.mark.parametrize("config", [LLAMA, MISTRAL, QWEN3, GEMMA3], ids=lambda c: c["model_type"])
@pytest.mark.parametrize(
    ("key", "values", "rule"),
    [
        *(
            (key, (-1, 0, 1.5, "x", [], True), "a positive integer")
            for key in (
                "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings",
            )
        ),
        ("rms_norm_eps", (None, "x", 0, -1e-6, float("nan"), float("inf"), True), "a number above"),
        *(
            (key, ([], "x", 0, 1), "true or false")
            for key in ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window")
        ),
        ("eos_token_id", ("x", 1.5, [1.5], [2, None], True), "the id of a token"),
    ],
)  # fmt: skip
def test_values_of_the_wrong_kind_are_named(
    config: dict[str, Any], key: str, values: tuple[object, ...], rule: str
) -> None:
    for value in values:
        with pytest.raises(UnsupportedModelError, match=f"{key} must be {rule}") as error:
            load_spec({**config, key: value})
        assert str(error.value).endswith(f"got {value!r}")


def test_heads_are_made_of_pairs() -> None:
    with pytest.raises(UnsupportedModelError, match="head_dim 7 is odd"):
        load_spec({**LLAMA, "head_dim": 7})


@pytest.mark.parametrize("key", ["final_logit_softcapping", "query_pre_attn_scalar"])
def test_gemmas_numbers_are_numbers(key: str) -> None:
    for value in ("x", 0, -2.0, [3]):
        with pytest.raises(UnsupportedModelError, match=f"{key} must be a number above 0"):
            load_spec({**GEMMA3, key: value})


def test_a_window_must_be_a_size_where_it_is_used() -> None:
    for window in (0, -1, "x", [7]):
        with pytest.raises(UnsupportedModelError, match="sliding_window must be a positive"):
            load_spec({**MISTRAL, "sliding_window": window})
        assert windows({**QWEN3, "sliding_window": window}) == [None, None]


def test_null_is_the_default_where_there_is_one() -> None:
    keys = ("num_key_value_heads", "head_dim", "tie_word_embeddings", "attention_bias", "mlp_bias")
    spec = load_spec({**LLAMA, **dict.fromkeys(keys)})
    assert (spec.num_kv_heads, spec.head_dim, spec.tie_embeddings) == (3, 16, False)
    assert load_spec({**QWEN3, "head_dim": None}).head_dim == 128
    assert load_spec({**QWEN3, "use_sliding_window": None}) == load_spec(QWEN3)


def test_unknown_architecture_lists_the_known_ones() -> None:
    with pytest.raises(UnsupportedModelError) as error:
        load_spec({"architectures": ["MambaForCausalLM"]})
    assert all(name in str(error.value) for name in FAMILIES)


def test_layer_types_are_checked() -> None:
    with pytest.raises(UnsupportedModelError, match="'linear_attention'"):
        load_spec({**QWEN3, "layer_types": ["full_attention", "linear_attention"]})
    with pytest.raises(UnsupportedModelError, match="1 entries for 2 layers"):
        load_spec({**QWEN3, "layer_types": ["full_attention"]})


def test_bidirectional_gemma_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="bidirectional"):
        load_spec({**GEMMA3, "use_bidirectional_attention": True})
