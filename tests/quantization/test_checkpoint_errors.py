"""What of quantized checkpoints cannot be read: one line each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from paged_runner import make_decoder
from quantized_checkpoints import CONFIG, settings, stored, write

from jaxpaged.model_files import ModelFilesError
from jaxpaged.models import load_spec
from jaxpaged.models.spec import UnsupportedModelError
from jaxpaged.runtime.weights import load_params


@pytest.mark.parametrize(
    ("found", "match"),
    [
        ({"quant_method": "bitsandbytes"}, "ordinary weights with --quantization"),
        ({"quant_method": "aqlm"}, "'aqlm' is not supported; supported: awq, compressed"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv'"),
        ({"quant_method": "gptq", "bits": 3}, "bits 3 is not supported; supported: 4, 8"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size 128 is not"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "NVFP4"),
        ({"quant_method": "compressed-tensors", "sparsity_config": {"format": "24"}}, "24"),
        ({"quant_method": "awq", "bits": 4, "group_size": "x"}, "group_size 'x' is not supp"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size 0 is not supported"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": None}}},
            "lacks 'targets': add it",
        ),
        ({"quant_method": "fp8", "ignored_layers": 3}, "wrong kind .TypeError"),
        ({"quant_method": "compressed-tensors", "ignore": ["re:("]}, "wrong kind .error: miss"),
        (
            {
                "quant_method": "compressed-tensors",
                "transform_config": {"config_groups": {"R4": {"type": "hadamard"}}},
            },
            "transform_config is not .* whose activations are not rotated",
        ),
        (["awq"], "wrong kind .AttributeError"),
    ],
)
def test_what_nothing_reads(found: Any, match: str) -> None:
    with pytest.raises(UnsupportedModelError, match=match) as error:
        load_spec({**CONFIG, "quantization_config": found})
    assert "\n" not in str(error.value)


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64}


@pytest.mark.parametrize(
    ("asked", "found", "match"),
    [
        ("gptq", AWQ, "gptq needs such weights, .* quantized otherwise .awq.: leave it out"),
        ("fp8_per_channel", AWQ, "needs ordinary weights, .* otherwise .awq.: leave it out"),
        ("awq", {"quant_method": "quark"}, "'quark' is not supported"),
        ("fp8_per_channel", {"quant_method": None}, "'unnamed' is not supported"),
        ("fp8", None, "fp8 names what a checkpoint stores, .* choose from fp8_per_tensor, fp8_per"),
    ],
)
def test_what_was_asked_for_is_not_what_is_stored(asked: str, found: Any, match: str) -> None:
    with pytest.raises(UnsupportedModelError, match=match):
        load_spec({**CONFIG, "quantization_config": found}, asked)


def test_the_name_of_what_is_stored_may_be_said() -> None:
    config = {**CONFIG, "quantization_config": AWQ}
    assert load_spec(config, "awq") == load_spec(config)
    with pytest.raises(UnsupportedModelError, match="--quantize-lm-head needs ordinary weights"):
        load_spec(config, "awq", quantize_lm_head=True)


@pytest.mark.parametrize(
    ("name", "kind", "dtype", "wanted"),
    [
        ("compressed-tensors fp8 channel", "weight", ml_dtypes.bfloat16, "BF16, .* F8_E4M3:"),
        ("compressed-tensors fp8 weights", "weight_scale", np.uint8, "U8, .* BF16 or F16:"),
        ("compressed-tensors int8", "weight", np.float32, "F32, .* I8:"),
        ("compressed-tensors int4 zeros", "weight_zero_point", np.int8, "I8, .* I32:"),
        ("fp8 static", "weight", ml_dtypes.bfloat16, "BF16, .* F8_E4M3:"),
        ("fp8 block", "weight", np.float16, "F16, .* F8_E4M3:"),
        ("gptq 4", "qweight", np.int64, "I64, .* I32:"),
        ("awq", "scales", np.int32, "I32, .* F32 or BF16 or F16:"),
    ],
)
def test_another_type(tmp_path: Path, name: str, kind: str, dtype: Any, wanted: str) -> None:
    """Of one part of a product is enough: shapes fit, and the numbers would be nonsense."""
    tensors, _ = stored(name)
    key = f"model.layers.0.mlp.up_proj.{kind}"
    model = make_decoder(write(tmp_path, name, tensors | {key: tensors[key].astype(dtype)}))
    with pytest.raises(ModelFilesError, match=f"{key} is {wanted} correct") as error:
        load_params(tmp_path, model, progress=False)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("layout", ["dense", "mxfp8-quantized", None])
@pytest.mark.parametrize("name", ["fp8 channel", "int8"])
def test_another_format(name: str, layout: str | None) -> None:
    found = settings()[f"compressed-tensors {name}"] | {"format": layout}
    with pytest.raises(UnsupportedModelError, match=f"format {layout!r} is.*save_compressed"):
        load_spec({**CONFIG, "quantization_config": found})


def test_a_head_that_is_tied_and_stored_quantized(tmp_path: Path) -> None:
    tensors, _ = stored("compressed-tensors int8")
    tensors["lm_head.weight_scale"] = np.ones((9, 1), np.float32)
    config = write(tmp_path, "compressed-tensors int8", tensors)
    model = make_decoder(config | {"tie_word_embeddings": True})
    with pytest.raises(ModelFilesError, match="lm_head.weight_scale .* tie_word_embeddings to"):
        load_params(tmp_path, model, progress=False)


def test_parts_that_are_not_alike() -> None:
    found = settings()["awq"] | {"modules_to_not_convert": ["q_proj"]}
    with pytest.raises(UnsupportedModelError, match=r"quantizes some of .*q_proj.*k_proj"):
        load_spec({**CONFIG, "quantization_config": found})


def test_quantized_twice() -> None:
    with pytest.raises(UnsupportedModelError, match=r"fp8_per_channel needs .*\(awq\)"):
        load_spec({**CONFIG, "quantization_config": settings()["awq"]}, "fp8_per_channel")


@pytest.mark.parametrize("name", ["compressed-tensors fp8 channel", "awq"])
def test_another_shape(tmp_path: Path, name: str) -> None:
    tensors, _ = stored(name)
    key = "model.layers.0.mlp.down_proj." + ("qweight" if name == "awq" else "weight")
    for wrong in (tensors[key].T.copy(), tensors[key][None], tensors[key][:0]):
        model = make_decoder(write(tmp_path, name, tensors | {key: wrong}))
        with pytest.raises(ModelFilesError, match="do not fit config.json: .*down_proj") as error:
            load_params(tmp_path, model, progress=False)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "kind"), [("compressed-tensors fp8 channel", "weight_scale"), ("awq", "scales")]
)
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_scales_that_are_no_numbers(tmp_path: Path, name: str, kind: str, value: float) -> None:
    tensors, _ = stored(name)
    key = f"model.layers.0.mlp.up_proj.{kind}"
    wrong = tensors[key].copy()
    wrong.flat[-1] = value
    model = make_decoder(write(tmp_path, name, tensors | {key: wrong}))
    with pytest.raises(ModelFilesError, match=f"{key} holds NaN or infinite scales") as error:
        load_params(tmp_path, model, progress=False)
    assert "\n" not in str(error.value)


def test_another_layout(tmp_path: Path) -> None:
    name = "gptq 4 desc_act zeros"
    tensors, _ = stored(name)
    orders = [f"model.layers.0.self_attn.{x}_proj.g_idx" for x in "qkv"]
    key = orders[1]
    model = make_decoder(write(tmp_path, name, tensors | {key: tensors[key][::-1].copy()}))
    with pytest.raises(ModelFilesError, match="g_idx differs between parts"):
        load_params(tmp_path, model, progress=False)
    write(tmp_path, name, tensors | {key: np.zeros_like(tensors[key]) for key in orders})
    with pytest.raises(ModelFilesError, match="q_proj: its g_idx makes groups of different"):
        load_params(tmp_path, model, progress=False)
    for kind, count in (("qweight", -1), ("scales", 0)):
        key = f"model.layers.0.mlp.down_proj.{kind}"
        write(tmp_path, name, tensors | {key: tensors[key][:count].copy()})
        with pytest.raises(ModelFilesError, match=r"do not fit config.json: .*down_proj.qwei"):
            load_params(tmp_path, model, progress=False)
