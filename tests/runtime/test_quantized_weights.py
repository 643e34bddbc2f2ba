"""Weights that are quantized while they are loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models
from flax.traverse_util import flatten_dict
from paged_runner import PagedRunner, make_decoder

from jaxpaged.model_files import ModelFilesError
from jaxpaged.models.spread import spread_leaf, spread_spec
from jaxpaged.parallel.mesh import make_mesh
from jaxpaged.quantization import KERNEL, ON_THE_FLY
from jaxpaged.runtime.weights import abstract_leaves, load_params

TWO = ("fp8_per_tensor", "int4_per_group_weight_only")  # that have least in common
CONFIG = tiny_models.CONFIGS["llama-biases-linear"]  # 4 query heads, 1 KV head, untied
Params = dict[str, jax.Array]


def load(
    folder: Path, quantization: str | None = None, quantize_lm_head: bool = False, **options: str
) -> Params:
    model = make_decoder(CONFIG, quantization=quantization, quantize_lm_head=quantize_lm_head)
    return flatten_dict(load_params(folder, model, progress=False, **options), sep="/")


@pytest.mark.parametrize("name", TWO)
def test_a_checkpoint_becomes_what_the_scheme_makes_of_each_tensor(
    tmp_path: Path, name: str
) -> None:
    folder = tiny_models.write_model(tmp_path, CONFIG)
    quantize = jax.jit(ON_THE_FLY[name].scheme.quantize)
    tensors, params = tiny_models.tensors(CONFIG), load(folder, name)
    dense = load(folder)
    for leaf in params.keys() & dense.keys():  # biases, norms, embeddings, the head
        np.testing.assert_array_equal(params[leaf], dense[leaf])
    for layer in range(2):
        parts = {
            kind: {
                array: np.asarray(x)
                for array, x in quantize(tensors[f"model.layers.{layer}.{kind}.weight"]).items()
            }
            for kind in (
                *(f"self_attn.{x}_proj" for x in "qkvo"),
                *(f"mlp.{x}_proj" for x in ("gate", "up", "down")),
            )
        }
        q, k, v, o, gate, up, down = (part[KERNEL] for part in parts.values())
        kernel = {p: params[f"layers_{layer}/{p}/{KERNEL}"] for p in (
            "attention/qkv", "attention/o", "mlp/gate_up", "mlp/down"
        )}  # fmt: skip
        qkv = np.concatenate((q.reshape(1, 4, 20, -1), k[None, None], v[None, None]), 1)
        np.testing.assert_array_equal(kernel["attention/qkv"], qkv)
        np.testing.assert_array_equal(kernel["attention/o"], o)
        np.testing.assert_array_equal(kernel["mlp/gate_up"], np.stack((gate, up)))
        np.testing.assert_array_equal(kernel["mlp/down"], down)
        scale = params[f"layers_{layer}/mlp/gate_up/kernel_scale"]
        expected = np.stack([parts[f"mlp.{x}_proj"]["kernel_scale"] for x in ("gate", "up")])
        if expected.ndim == 3:
            expected = np.moveaxis(expected, -1, 0)
        np.testing.assert_array_equal(scale, expected)


def test_the_model_still_says_about_the_same(tmp_path: Path) -> None:
    folder, rows = tiny_models.write_model(tmp_path, CONFIG), []
    for quantization in (None, *TWO):
        model = make_decoder(CONFIG, quantization=quantization)
        runner = PagedRunner(model, load_params(folder, model, progress=False))
        rows.append(np.concatenate(runner.generate(tiny_models.prompts()[:1], 1)[1]).ravel())
    _, fp8, int4 = np.corrcoef(rows)[0]
    assert 0.98 < fp8 < 1 - 1e-7
    assert 0.9 < int4 < 1 - 1e-7


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_of_its_own_is_quantized_if_asked(tmp_path: Path, tied: bool) -> None:
    """The tokens are those of the same weights, widened; what is looked up stays as it was."""
    config, name = CONFIG | {"tie_word_embeddings": tied}, "int4_per_group_weight_only"
    folder = tiny_models.write_model(tmp_path, config)
    model = make_decoder(config, quantization=name, quantize_lm_head=True)
    params = load_params(folder, model, progress=False)
    embedding = tiny_models.tensors(config)["model.embed_tokens.weight"]
    np.testing.assert_array_equal(params["embed"]["table"], embedding)
    scheme: Any = ON_THE_FLY[name].scheme
    head = {"table": scheme.dequantize(params["lm_head"], jnp.float32)}
    untied = make_decoder(CONFIG, quantization=name)
    (tokens, logits), (wide_tokens, wide_logits) = (
        PagedRunner(decoder, own).generate(tiny_models.prompts(), 8)
        for decoder, own in ((model, params), (untied, params | {"lm_head": head}))
    )
    assert tokens == wide_tokens
    for found, wide in zip(logits, wide_logits, strict=True):
        np.testing.assert_allclose(found, wide, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("name", TWO)
def test_random_weights_are_made_quantized(tmp_path: Path, name: str) -> None:
    asked: Any = {"load_format": "dummy", "quantize_lm_head": True}
    params, again = (load(tmp_path, name, **asked) for _ in range(2))
    wanted = abstract_leaves(make_decoder(CONFIG, quantization=name, quantize_lm_head=True))
    assert {n: (x.shape, x.dtype) for n, x in params.items()} == {
        n: (x.shape, x.dtype) for n, x in wanted.items()
    }
    for leaf, value in params.items():
        np.testing.assert_array_equal(np.asarray(value), np.asarray(again[leaf]))
    first, second = (np.asarray(params[f"layers_{i}/mlp/down/{KERNEL}"]) for i in range(2))
    assert (first != second).mean() > 0.5


@pytest.mark.parametrize("name", TWO)
def test_leaves_of_copied_heads_and_their_shardings(tmp_path: Path, name: str) -> None:
    """As two devices would have them; one device says the rest."""
    folder = tiny_models.write_model(tmp_path, CONFIG)
    whole = make_decoder(CONFIG, quantization=name, quantize_lm_head=True)
    spec = spread_spec(whole.spec, 2)
    kv = replace(whole.kv, num_kv_heads=spec.num_kv_heads)
    shared = whole.clone(spec=spec, kv=kv, mesh=make_mesh())
    for load_format in ("auto", "dummy"):
        one, many = (
            flatten_dict(load_params(folder, m, load_format=load_format, progress=False), sep="/")
            for m in (whole, shared)
        )
        for leaf, value in many.items():
            expected = np.asarray(spread_leaf(spec, leaf, one[leaf]))
            np.testing.assert_array_equal(np.asarray(value), expected)
    axes = {
        leaf.removeprefix("layers_0/"): tuple(value.sharding.spec)
        for leaf, value in many.items()
        if "kernel_" in leaf
    }
    assert axes["attention/qkv/kernel_q"] == ("model", None, None, None)
    assert axes["attention/o/kernel_q"] == (None, "model")
    assert axes["mlp/gate_up/kernel_q"] == (None, "model", None)
    assert axes["mlp/down/kernel_q"] == (None, "model")
    assert axes["attention/qkv/kernel_scale"][-3:] == ("model", None, None)
    assert axes["lm_head/kernel_q"] == ("model", None)
    assert axes["lm_head/kernel_scale"][-1] == "model"


def test_orbax_is_not_quantized_while_loading(tmp_path: Path) -> None:
    with pytest.raises(
        ModelFilesError,
        match="--quantization reads safetensors or GGUF, and .* is Orbax: name the folder",
    ):
        load(tmp_path, "fp8_per_channel", load_format="orbax")
