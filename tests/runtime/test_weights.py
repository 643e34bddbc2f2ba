from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny_models
from flax.traverse_util import flatten_dict
from paged_runner import make_decoder
from safetensors.numpy import save_file

from jaxpaged.model_files import ModelFilesError
from jaxpaged.parallel.mesh import make_mesh
from jaxpaged.runtime.weights import load_params

CONFIG = tiny_models.CONFIGS["llama-biases-linear"]  # 4 query heads, 1 KV head, untied
TIED = tiny_models.CONFIGS["llama3"]
Tensors = dict[str, np.ndarray]


def save(folder: Path, tensors: Tensors, config: dict[str, Any] = CONFIG) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def load(folder: Path, config: dict[str, Any] = CONFIG, **options: Any) -> Tensors:
    dtype = options.pop("dtype", jnp.float32)
    model = make_decoder(config, dtype=dtype).clone(mesh=options.pop("mesh", None))
    params = load_params(folder, model, progress=False, **options)
    return flatten_dict(params, sep="/")


def test_leaves_are_packed_as_the_decoder_wants_them(tmp_path: Path) -> None:
    tensors = tiny_models.tensors(CONFIG)
    params = load(save(tmp_path, tensors))
    layer, N, K, G, H, D = "model.layers.1", 4, 1, 4, 20, 48
    q = tensors[f"{layer}.self_attn.q_proj.weight"].reshape(N, H, D)
    k = tensors[f"{layer}.self_attn.k_proj.weight"]
    v_bias = tensors[f"{layer}.self_attn.v_proj.bias"]
    qkv = params["layers_1/attention/qkv/kernel"]
    assert qkv.shape == (D, K, G + 2, H)
    np.testing.assert_array_equal(qkv[:, 0, 2], q[2].T)
    np.testing.assert_array_equal(qkv[:, 0, G], k.T)
    np.testing.assert_array_equal(params["layers_1/attention/qkv/bias"][0, G + 1], v_bias)
    o = tensors[f"{layer}.self_attn.o_proj.weight"]
    np.testing.assert_array_equal(params["layers_1/attention/o/kernel"].reshape(N * H, D), o.T)
    up = tensors[f"{layer}.mlp.up_proj.weight"]
    np.testing.assert_array_equal(params["layers_1/mlp/gate_up/kernel"][:, 1], up.T)
    np.testing.assert_array_equal(params["lm_head/table"], tensors["lm_head.weight"])


def test_every_leaf_is_loaded_for_every_model(tmp_path: Path) -> None:
    for name, config in tiny_models.CONFIGS.items():
        params = load(tiny_models.write_model(tmp_path / name, config), config)
        count = sum(tensor.size for tensor in tiny_models.tensors(config).values())
        assert sum(leaf.size for leaf in params.values()) == count


@pytest.mark.parametrize("stored", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_any_float_converts_to_any_other(tmp_path: Path, stored: str, dtype: Any) -> None:
    tensors = {
        name: tensor.astype(ml_dtypes.bfloat16 if stored == "bfloat16" else stored)
        for name, tensor in tiny_models.tensors(CONFIG).items()
    }
    params = load(save(tmp_path, tensors), dtype=dtype)
    assert {leaf.dtype for leaf in params.values()} == {jnp.dtype(dtype)}
    expected = jnp.asarray(tensors["lm_head.weight"]).astype(dtype)
    np.testing.assert_array_equal(params["lm_head/table"], expected)


def test_shards_with_an_index(tmp_path: Path) -> None:
    tensors = tiny_models.tensors(CONFIG)
    files = {name: f"model-0000{i % 2 + 1}-of-00002.safetensors" for i, name in enumerate(tensors)}
    for file in set(files.values()):
        save_file({n: t for n, t in tensors.items() if files[n] == file}, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    sharded = load(tmp_path)
    whole = tmp_path / "whole"
    whole.mkdir()
    for name, leaf in load(save(whole, tensors)).items():
        np.testing.assert_array_equal(leaf, sharded[name])

    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelFilesError, match="model-00002-of-00002.safetensors is missing"):
        load(tmp_path)


def test_leaves_go_to_their_sharding(tmp_path: Path) -> None:
    mesh = make_mesh()
    params = load(save(tmp_path, tiny_models.tensors(CONFIG)), mesh=mesh)
    spec = params["layers_0/attention/qkv/kernel"].sharding.spec
    assert tuple(spec) == (None, "model", None, None)
    assert all(leaf.sharding.mesh == mesh for leaf in params.values())


class TestTiedEmbeddings:
    def test_head_may_be_stored_too(self, tmp_path: Path) -> None:
        tensors = tiny_models.tensors(TIED)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
        assert "lm_head/table" not in load(save(tmp_path, tensors, TIED), TIED)

    def test_a_different_head_is_an_error(self, tmp_path: Path) -> None:
        tensors = tiny_models.tensors(TIED)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
        with pytest.raises(ModelFilesError, match="lm_head.weight differs .*tie_word_embeddings"):
            load(save(tmp_path, tensors, TIED), TIED)


class TestErrors:
    """One line each, with the names that matter."""

    def expect(self, folder: Path, match: str, **options: Any) -> None:
        with pytest.raises(ModelFilesError, match=match) as error:
            load(folder, **options)
        assert "\n" not in str(error.value)

    def test_missing_and_unexpected_tensors(self, tmp_path: Path) -> None:
        tensors = tiny_models.tensors(CONFIG)
        tensors["model.layers.0.extra"] = tensors.pop("model.norm.weight")
        match = "lacks model.norm.weight; it has unexpected model.layers.0.extra"
        self.expect(save(tmp_path, tensors), match)

    def test_many_missing_tensors_are_counted(self, tmp_path: Path) -> None:
        tensors = tiny_models.tensors({**CONFIG, "num_hidden_layers": 1})
        self.expect(save(tmp_path, tensors), "lacks model.layers.1.* and 12 more")

    def test_shape(self, tmp_path: Path) -> None:
        tensors = tiny_models.tensors({**CONFIG, "intermediate_size": 57})
        self.expect(save(tmp_path, tensors), r"do not fit config.json: .*gate_proj.* \[57")

    def test_heads_that_do_not_come_out_even(self, tmp_path: Path) -> None:
        tensors = tiny_models.tensors(CONFIG)
        name = "model.layers.0.self_attn.q_proj.weight"
        tensors[name] = tensors[name][:-1].copy()
        self.expect(save(tmp_path, tensors), r"q_proj.weight \[79, 48\]")

    def test_integer_tensors(self, tmp_path: Path) -> None:
        tensors = tiny_models.tensors(CONFIG)
        tensors["model.norm.weight"] = np.ones(48, np.int8)
        self.expect(save(tmp_path, tensors), "model.norm.weight is I8, but .* to be F32 or")

    def test_eight_bit_floats(self, tmp_path: Path) -> None:
        tensors = tiny_models.tensors(CONFIG)
        tensors["model.norm.weight"] = np.ones(48, ml_dtypes.float8_e4m3fn)
        self.expect(save(tmp_path, tensors), "norm.weight is F8_E4M3, but .* F32 or BF16")

    def test_no_weights_at_all(self, tmp_path: Path) -> None:
        self.expect(tmp_path, "holds no weights: neither model.safetensors")
        self.expect(tmp_path, "model.safetensors is missing", load_format="safetensors")
        self.expect(tmp_path, "orbax is missing", load_format="orbax")

    def test_truncated_file(self, tmp_path: Path) -> None:
        file = save(tmp_path, tiny_models.tensors(CONFIG)) / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
        self.expect(tmp_path, "model.safetensors is unreadable")

    @pytest.mark.parametrize("weight_map", [[], None, "x", {"a": 1}, {"a": ["x"]}])
    def test_an_index_of_the_wrong_kind(self, tmp_path: Path, weight_map: object) -> None:
        self.index(tmp_path, {"weight_map": weight_map})
        self.expect(tmp_path, "index.json: weight_map must be an object of names of tensors to ")

    @pytest.mark.parametrize("content", [{}, {"weight_map": {}}])
    def test_an_index_of_nothing(self, tmp_path: Path, content: dict[str, Any]) -> None:
        self.index(tmp_path, content)
        self.expect(tmp_path, "index.json names no file")

    @pytest.mark.parametrize("name", ["../x", "a/../../x", "{}/x"])
    def test_an_index_that_leads_out_of_its_folder(self, tmp_path: Path, name: str) -> None:
        folder = tmp_path / "model"
        folder.mkdir()
        save_file(tiny_models.tensors(CONFIG), tmp_path / "x")
        self.index(folder, {"weight_map": {"a": name.format(tmp_path)}})
        self.expect(folder, "weight_map names '.*x.*', which is outside of the model's folder")

    def index(self, folder: Path, content: dict[str, Any]) -> None:
        (folder / "model.safetensors.index.json").write_text(json.dumps(content))


def test_rotary_buffers_of_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    tensors = tiny_models.tensors(CONFIG)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(10, np.float32)
    load(save(tmp_path, tensors))


def test_random_weights_need_no_files(tmp_path: Path) -> None:
    config = tiny_models.CONFIGS["gemma3-old"]
    first, again, other = (
        load(tmp_path, config, load_format="dummy", seed=seed, dtype=jnp.bfloat16)
        for seed in (1, 1, 2)
    )
    assert {leaf.dtype for leaf in first.values()} == {jnp.dtype(jnp.bfloat16)}
    assert not np.any(first["final_norm/scale"])  # stored as factor - 1
    kernel = "layers_0/mlp/down/kernel"
    np.testing.assert_array_equal(first[kernel], again[kernel])
    assert np.any(first[kernel] != other[kernel])
    assert np.any(first[kernel] != first["layers_1/mlp/down/kernel"])
    assert float(jnp.std(first[kernel].astype(jnp.float32))) == pytest.approx(0.02, rel=0.1)


def test_no_more_than_a_leaf_is_held_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each leaf is finished on the device before the one after the next is read."""
    folder = save(tmp_path, tiny_models.tensors(CONFIG))
    waited: list[Any] = []
    wait = jax.block_until_ready
    monkeypatch.setattr(jax, "block_until_ready", lambda x: waited.append(x) or wait(x))
    params = load(folder)
    assert len(waited) == len(params)
