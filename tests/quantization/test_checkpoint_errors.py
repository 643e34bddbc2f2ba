"""What of quantized checkpoints cannot be read: one line each."""

from __future__ import annotations

import copy
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

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64}


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
        ({"load_in_8bit": True}, "'bitsandbytes' .* ordinary weights with --quantization"),
        ({"quant_method": "fp8", "ignored_layers": 3}, "ignored_layers 3 is .* a list of names"),
        (AWQ | {"modules_to_not_convert": "mlp"}, "modules_to_not_convert 'mlp' is not"),
        ({"quant_method": "modelopt", "ignore": "lm_head"}, "ignore 'lm_head' is not"),
        ({"quant_method": "compressed-tensors", "ignore": "re:.*mlp.*"}, "'re:.* a list of names"),
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


@pytest.mark.parametrize(
    ("name", "changes", "match"),
    [
        ("awq", {"group_size": -1}, "do not fit config.json"),
        ("gptq 4", {"group_size": -1}, "g_idx contradicts desc_act false"),
        ("gptq 4 desc_act zeros", {"desc_act": False}, "g_idx contradicts desc_act false"),
        ("gptq 4 desc_act zeros", {"sym": True}, "qzeros contradicts sym true"),
        ("gptq 8 v2 zeros", {"sym": True}, "qzeros contradicts sym true"),
        ("fp8 block", {"weight_block_size": [128, 128]}, "do not fit config.json"),
        ("fp8 block", {"weight_block_size": [64, 64]}, "do not fit config.json"),
        ("compressed-tensors int4 zeros", {"symmetric": True}, "_zero_point contradicts symm"),
        ("compressed-tensors int8 zeros", {"symmetric": True}, "_zero_point contradicts symm"),
        ("compressed-tensors fp8 block", {"block_structure": [128, 128]}, "do not fit config.json"),
        (
            "compressed-tensors fp8 channel",
            {"strategy": "block", "block_structure": [128, 128]},
            "do not fit config.json",
        ),
    ],
)
def test_settings_that_the_tensors_contradict(
    tmp_path: Path, name: str, changes: dict[str, Any], match: str
) -> None:
    """The checkpoint is right, config.json is not; read so, the weights would be others."""
    tensors, _ = stored(name)
    if name.startswith("compressed"):
        groups = copy.deepcopy(settings()[name]["config_groups"])
        for group in groups.values():
            group["weights"] |= changes
        changes = {"config_groups": groups}
    model = make_decoder(write(tmp_path, name, tensors, **changes))
    with pytest.raises(ModelFilesError, match=match) as error:
        load_params(tmp_path, model, progress=False)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["compressed-tensors int8", "compressed-tensors int4"])
def test_what_the_settings_imply_may_be_stored(tmp_path: Path, name: str) -> None:
    """Zero points of symmetric weights; GPTQ's tools write such with every checkpoint."""
    tensors, _ = stored(name)
    for key in [key for key in tensors if key.endswith(".weight_scale")]:
        rows = len(tensors[key])
        none = np.zeros((rows, 1), np.int8)
        if name.endswith("int4"):
            none = np.full((rows // 8, 1), 0x88888888, np.uint32).view(np.int32)
        tensors[key.replace("scale", "zero_point")] = none
    load_params(tmp_path, make_decoder(write(tmp_path, name, tensors)), progress=False)


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
