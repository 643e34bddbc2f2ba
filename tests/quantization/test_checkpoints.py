"""Checkpoints of every format, made by their own tools (scripts/make_quantized_fixtures.py)."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict
from paged_runner import PagedRunner, make_decoder
from quantized_checkpoints import CONFIG, settings, stored, write

from jaxpaged.model_files import ModelFilesError
from jaxpaged.models import load_spec
from jaxpaged.models.decoder import abstract_params
from jaxpaged.quantization.fp8 import Fp8
from jaxpaged.quantization.weight_only import WeightOnly
from jaxpaged.runtime.weights import load_params

NAMES = tuple(sorted(settings()))  # the file tells them in any order


@pytest.fixture(scope="module")
def dense() -> PagedRunner:
    """A decoder without quantization, compiled once for all formats."""
    return PagedRunner(make_decoder(CONFIG), None)


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_the_dequantized_references(
    tmp_path: Path, name: str, dense: PagedRunner
) -> None:
    tensors, expected = stored(name)
    model = make_decoder(write(tmp_path, name, tensors))
    first, second = (layer.quantization for layer in model.spec.layers)
    assert None not in (first.qkv, first.o, first.gate_up, first.down)
    assert second.qkv is None  # config.json leaves it out
    dense._params = widened(load_params(tmp_path, model, progress=False), first.qkv.scheme)
    np.testing.assert_allclose(rows_of(dense), expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("name", ["gptq 4 desc_act zeros", "compressed-tensors fp8 channel"])
def test_logits_are_the_dequantized_references(tmp_path: Path, name: str) -> None:
    tensors, expected = stored(name)
    model = make_decoder(write(tmp_path, name, tensors))
    found = rows_of(PagedRunner(model, load_params(tmp_path, model, progress=False)))
    if "fp8" in name:  # rounded activations move logits a bit
        assert np.corrcoef(found.ravel(), expected.ravel())[0, 1] > 0.98
    else:
        np.testing.assert_allclose(found, expected, atol=2e-4, rtol=0)


def test_a_quantized_head(tmp_path: Path) -> None:
    tensors, _ = stored("compressed-tensors int8")
    stream = np.random.default_rng(0)
    V, D = tensors.pop("lm_head.weight").shape
    kernel = stream.integers(-127, 128, (V, D)).astype(np.int8)
    scale = stream.uniform(0.001, 0.003, (V, 1)).astype(np.float32)
    ignored = {"ignore": ["re:.*layers\\.1\\..*"]}
    found = write(
        tmp_path,
        "compressed-tensors int8",
        tensors | {"lm_head.weight": kernel, "lm_head.weight_scale": scale},
        **ignored,
    )
    model = make_decoder(found)
    params = load_params(tmp_path, model, progress=False)
    assert "table" not in params["lm_head"]
    plain = make_decoder({**found, "quantization_config": settings()["compressed-tensors int8"]})
    table = {"lm_head": {"table": jnp.asarray(kernel * scale)}}
    expected = rows_of(PagedRunner(plain, params | table))
    np.testing.assert_allclose(rows_of(PagedRunner(model, params)), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "changes", "quantized"),
    [
        ("gptq 4", {}, False),
        ("gptq 4", {"lm_head": True}, True),
        ("awq", {"modules_to_not_convert": None}, False),
        ("fp8 block", {"modules_to_not_convert": None}, False),
        ("modelopt", {"ignore": None}, False),
    ],
)
def test_what_formats_say_of_the_head(name: str, changes: dict[str, Any], quantized: bool) -> None:
    found = settings()[name] | changes
    assert (load_spec({**CONFIG, "quantization_config": found}).head is not None) is quantized
    tied = {**CONFIG, "quantization_config": found, "tie_word_embeddings": True}
    assert load_spec(tied).head is None


def rows_of(runner: PagedRunner) -> np.ndarray:
    return np.concatenate(runner.generate(tiny_models.prompts(), 1)[1])


def widened(params: Any, scheme: Any) -> Any:
    """The same weights as kernels of a decoder without quantization."""
    flat = flatten_dict(params, sep="/")
    shapes = flatten_dict(make_shapes(), sep="/")
    for product in [leaf.removesuffix("_q") for leaf in flat if leaf.endswith("kernel_q")]:
        names = [leaf for leaf in flat if leaf.startswith(product + "_")]
        arrays = {name.split("/")[-1]: flat.pop(name) for name in names}
        if isinstance(scheme, Fp8):
            wide = arrays["kernel_q"].astype(jnp.float32) * arrays["kernel_scale"][..., None]
        else:
            wide = scheme.dequantize(arrays, jnp.float32)
        if "kernel_order" in arrays:
            wide = wide[..., jnp.argsort(arrays["kernel_order"])]
        flat[product] = jnp.moveaxis(wide, -1, 0).reshape(shapes[product].shape)
    return unflatten_dict(flat, sep="/")


@cache
def make_shapes() -> Any:
    return nn.meta.unbox(abstract_params(make_decoder(CONFIG)))


def test_calibrated_scales_of_pages_are_no_surprise(tmp_path: Path) -> None:
    tensors, _ = stored("modelopt")
    tensors["model.layers.0.self_attn.k_proj.k_scale"] = np.ones((), np.float32)
    tensors["model.layers.0.self_attn.v_scale"] = np.ones(1, np.float32)
    tensors["model.layers.0.self_attn.q_scale"] = np.ones(1, np.float32)
    model = make_decoder(write(tmp_path, "modelopt", tensors))
    load_params(tmp_path, model, progress=False)


def test_settings_in_other_places() -> None:
    def spec(**config: Any) -> Any:
        return load_spec({**CONFIG, **config})

    found = settings()["modelopt"]
    deeper = {"quant_method": "modelopt", "quantization": found, "producer": {"name": "modelopt"}}
    assert spec(quantization_config=deeper) == spec(quantization_config=found) != spec()
    pages = {"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "FP8"}}
    assert spec(quantization_config=pages) == spec()
    found = settings()["compressed-tensors int8"]
    assert spec(compression_config=found) == spec(quantization_config=found) != spec()


PLAIN = ["model.layers.1", "lm_head"]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("awq", {"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "zero_point": False}),
        (
            "compressed-tensors fp8 channel",
            {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        ),
        (
            "compressed-tensors fp8 channel",
            {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        ),
    ],
)
def test_other_writers_of_the_same(tmp_path: Path, name: str, found: dict[str, Any]) -> None:
    tensors, _ = stored(name)
    expected = load_params(tmp_path, make_decoder(write(tmp_path, name, tensors)), progress=False)
    where = "exclude_modules" if found["quant_method"] == "modelopt" else "modules_to_not_convert"
    config = {**CONFIG, "quantization_config": {**found, where: PLAIN}}
    loaded = load_params(tmp_path, make_decoder(config), progress=False)
    jax.tree.map(np.testing.assert_array_equal, loaded, expected)


def test_a_name_goes_before_a_class() -> None:
    found = settings()["compressed-tensors fp8 channel"]
    group = found["config_groups"]["group_0"]
    groups = {
        "a": group,
        "b": {**group, "targets": ["re:.*mlp.*"], "input_activations": None},
        "c": {**group, "targets": ["model.layers.0.self_attn.o_proj"], "weights": None},
    }
    changed = found | {"config_groups": groups}
    layer = load_spec({**CONFIG, "quantization_config": changed}).layers[0].quantization
    assert isinstance(layer.qkv.scheme, Fp8)
    assert layer.gate_up.scheme == layer.down.scheme == WeightOnly("float8_e4m3fn")
    assert layer.o is None


def test_compressed_tensors_whose_terms_have_an_order(tmp_path: Path) -> None:
    """As llm-compressor used to store them, which no compressed-tensors of today reads."""
    name, stream = "compressed-tensors int8", np.random.default_rng(0)
    tensors, _ = stored(name)
    plain = tensors.copy()
    for product in [key[:-13] for key in tensors if key.endswith(".weight_scale")]:
        rows, terms = tensors[f"{product}.weight"].shape
        group_I = np.random.RandomState(terms).permutation(np.arange(terms) // 32)
        scale = stream.uniform(0.001, 0.003, (rows, terms // 32)).astype(np.float32)
        zero = stream.integers(-9, 9, scale.shape).astype(np.int8)
        kernel = tensors[f"{product}.weight"] - zero[:, group_I].astype(np.int32)
        plain[f"{product}.weight"] = (kernel * scale[:, group_I]).astype(np.float32)
        del plain[f"{product}.weight_scale"]
        arrays = {"scale": scale, "zero_point": zero, "g_idx": group_I.astype(np.int32)}
        tensors |= {f"{product}.weight_{kind}": array for kind, array in arrays.items()}
    weights = {"num_bits": 8, "type": "int", "symmetric": False, "actorder": "group"}
    weights |= {"strategy": "group", "group_size": 32}
    groups = {"config_groups": {"a": {"targets": ["Linear"], "weights": weights}}}
    model = make_decoder(write(tmp_path, name, tensors, **groups))
    found = load_params(tmp_path, model, progress=False)
    found = widened(found, model.spec.layers[0].quantization.qkv.scheme)
    write(tmp_path, name, plain)
    expected = load_params(tmp_path, make_decoder(CONFIG), progress=False)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, expected)
    for same in ("dynamic", True):
        weights["actorder"] = same
        assert make_decoder(write(tmp_path, name, tensors, **groups)).spec == model.spec
    weights["actorder"] = "weight"
    model = make_decoder(write(tmp_path, name, tensors, **groups))
    with pytest.raises(ModelFilesError, match="unexpected .*weight_g_idx"):
        load_params(tmp_path, model, progress=False)


def test_biases_of_zeros_that_the_model_has_not(tmp_path: Path) -> None:
    tensors, _ = stored("gptq 4")
    bias = {f"model.layers.0.mlp.{x}_proj.bias": np.zeros(9, np.float16) for x in ("up", "down")}
    model = make_decoder(write(tmp_path, "gptq 4", tensors | bias))
    load_params(tmp_path, model, progress=False)
    bias["model.layers.0.mlp.up_proj.bias"][3] = 1
    write(tmp_path, "gptq 4", tensors | bias)
    with pytest.raises(ModelFilesError, match=r"up_proj.bias is not zero.*set attention_bias or"):
        load_params(tmp_path, model, progress=False)
