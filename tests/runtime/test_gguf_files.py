"""Weights from GGUF files are those that a safetensors checkpoint of the same values has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models
from flax.traverse_util import flatten_dict
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, quants
from gguf_models import CONFIGS, MISTRAL, write_gguf
from paged_runner import PagedRunner, make_decoder
from safetensors.numpy import save_file

from jaxpaged.gguf.folder import model_folder
from jaxpaged.model_files import ModelFilesError, read_config
from jaxpaged.runtime import gguf_files
from jaxpaged.runtime.checkpoint import convert
from jaxpaged.runtime.gguf_files import GgufFiles
from jaxpaged.runtime.weights import load_params

Kind = GGMLQuantizationType
KINDS = dict(
    zip(CONFIGS, (Kind.Q8_0, Kind.Q5_0, Kind.Q4_1, Kind.F16, Kind.Q4_0), strict=True)
)  # one a model
BLOCKS = (
    *(Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_XS, Kind.IQ2_XXS),
    *(Kind.IQ3_S, Kind.IQ1_M, Kind.Q5_1, Kind.BF16, Kind.TQ1_0, Kind.MXFP4),
)


@pytest.fixture
def model(tmp_path: Path) -> Any:
    """Writes a model: its folder, and one of safetensors with the same weights."""

    def write(config: dict[str, Any], kind: Kind, **options: Any) -> tuple[Path, Path]:
        (tmp_path / "files").mkdir()
        tensors = write_gguf(tmp_path / "files" / "tiny.gguf", config, kind, **options)
        (first, *_) = sorted((tmp_path / "files").iterdir())
        beside = tmp_path / "safetensors"
        beside.mkdir()
        (beside / "config.json").write_text(json.dumps(config))
        save_file(tensors, beside / "model.safetensors")
        return model_folder(first, tmp_path / "cache"), beside

    return write


def load(folder: Path, quantization: str | None = None, **options: Any) -> dict[str, np.ndarray]:
    decoder = make_decoder(read_config(folder), quantization=quantization)
    return flatten_dict(load_params(folder, decoder, progress=False, **options), sep="/")


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, leaf in expected.items():
        np.testing.assert_array_equal(found[name], leaf, err_msg=name)


@pytest.mark.parametrize("name", CONFIGS)
def test_leaves_are_those_of_the_widened_weights(model: Any, name: str) -> None:
    folder, beside = model(CONFIGS[name], KINDS[name])
    assert_same(load(folder), load(beside))


def test_logits_and_tokens_are_the_same(model: Any) -> None:
    folder, beside = model(CONFIGS["llama"], Kind.Q4_0)
    prompts = tiny_models.prompts()
    tokens, logits = PagedRunner.load(folder).generate(prompts, 8)
    expected_tokens, expected_logits = PagedRunner.load(beside).generate(prompts, 8)
    assert tokens == expected_tokens
    for found, expected in zip(logits, expected_logits, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_split_files_are_one_model(model: Any) -> None:
    folder, beside = model(CONFIGS["qwen3"], Kind.Q8_0, tensors_a_file=9)
    assert len(list(folder.glob("*.gguf"))) > 2
    assert_same(load(folder), load(beside))


def test_quantized_while_loading(model: Any) -> None:
    folder, beside = model(CONFIGS["qwen2"], Kind.Q8_0)
    scheme = "int8_per_channel_weight_only"
    assert_same(load(folder, scheme), load(beside, scheme))


def test_converted_to_orbax(model: Any, tmp_path: Path) -> None:
    folder, beside = model(CONFIGS["qwen3"], Kind.Q8_0)
    convert(folder, tmp_path / "out", progress=False)
    restored, expected = load(tmp_path / "out"), load(beside)
    for name, leaf in expected.items():  # convert keeps the checkpoint's dtype
        np.testing.assert_array_equal(restored[name], leaf.astype(jnp.bfloat16).astype(leaf.dtype))


def test_a_folder_with_config_json_beside_a_file(model: Any, tmp_path: Path) -> None:
    """Mistral, whose window no GGUF file tells."""
    _, beside = model(MISTRAL, Kind.Q8_0)
    (tmp_path / "files" / "tiny.gguf").rename(tmp_path / "tiny.gguf")
    (tmp_path / "config.json").write_text(json.dumps(MISTRAL))
    for load_format in ("gguf", "auto"):
        assert_same(load(tmp_path, load_format=load_format), load(beside))
    write_gguf(tmp_path / "other.gguf", MISTRAL)
    with pytest.raises(ModelFilesError, match=r"several models \(other.gguf, tiny.gguf\)"):
        load(tmp_path)


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
def test_blocks_of_every_type(tmp_path: Path, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random blocks, in several threads' shares, are what the gguf package makes of each row."""
    block, block_bytes = GGML_QUANT_SIZES[kind]
    rows, width = 7, 2 * block
    monkeypatch.setattr(gguf_files, "CHUNK", 3 * block_bytes)  # three blocks a thread
    blocks = np.random.RandomState(0).randint(0, 60, (rows, width // block * block_bytes), np.uint8)
    (tmp_path / "config.json").write_text("{}")
    writer = GGUFWriter(tmp_path / "x.gguf", "qwen2")
    writer.add_tensor("output_norm.weight", np.ones(5, np.float32))  # the next is not at the start
    writer.add_tensor("token_embd.weight", blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = GgufFiles(tmp_path).read("model.embed_tokens.weight")
    assert found.shape == (rows, width) and found.dtype == np.float32
    one_by_one = [quants.dequantize(row[None], kind) for row in blocks]
    np.testing.assert_array_equal(found, np.concatenate(one_by_one))


class TestErrors:
    """One line each, with the names that matter."""

    def expect(self, match: str, action: Any) -> None:
        with pytest.raises(ModelFilesError, match=match) as error:
            action()
        assert "\n" not in str(error.value)

    def test_a_tensor_is_missing_and_another_is_not_known(self, model: Any) -> None:
        renamed = {"blk.1.ffn_up.weight": "blk.1.ffn_gate_inp.weight"}
        folder, _ = model(CONFIGS["qwen3"], Kind.F32, renamed=renamed)
        lacks = r"lacks model.layers.1.mlp.up_proj.weight; it has unexpected blk.1.ffn_gate_inp"
        self.expect(lacks, lambda: load(folder))

    def test_a_type_that_the_package_does_not_widen(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{}")
        writer = GGUFWriter(tmp_path / "x.gguf", "qwen2")
        writer.add_tensor("token_embd.weight", np.ones((2, 8), np.int8))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        files = GgufFiles(tmp_path)
        read = "token_embd.weight is I8, which the package gguf does not widen: take .*Q4_K_M"
        self.expect(read, lambda: files.read("model.embed_tokens.weight"))

    def test_a_folder_without_such_a_file(self, tmp_path: Path) -> None:
        self.expect("holds no .gguf file", lambda: GgufFiles(tmp_path))
