"""Scales of keys and values: their names, their files, and how they are measured."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny_models
from flax.traverse_util import flatten_dict
from jax.sharding import SingleDeviceSharding
from paged_runner import make_decoder
from safetensors.numpy import save_file

from jaxpaged.cli import main
from jaxpaged.config import EngineConfig
from jaxpaged.model_files import DEMO_MODEL, ModelFilesError
from jaxpaged.models.decoder import Decoder
from jaxpaged.models.spread import spread_spec
from jaxpaged.runtime.calibration import LARGEST_STORED, calibrate
from jaxpaged.runtime.checkpoint import convert
from jaxpaged.runtime.kv_scales import (
    is_kv_scale,
    layer_scales,
    load_kv_scales,
    read_scales,
    write_scales,
)
from jaxpaged.runtime.teacher_forcing import TeacherForced
from jaxpaged.runtime.weights import load_params

CONFIG = tiny_models.CONFIGS["qwen3"]
LAYER = "model.layers.1.self_attn"


def decoder(dtype: str = "float8_e4m3fn") -> Decoder:
    model = make_decoder(CONFIG)
    return model.clone(kv=replace(model.kv, dtype=jnp.dtype(dtype)))


def scales_of(folder: Path, **options) -> dict[str, np.ndarray]:
    params = flatten_dict(load_params(folder, decoder(), progress=False, **options), sep="/")
    return {name: leaf for name, leaf in params.items() if name.endswith("kv_scale")}


@pytest.mark.parametrize(
    ("name", "sides"),
    [
        ("self_attn.k_scale", [2, 1]),
        ("self_attn.attn.v_scale", [1, 2]),
        ("self_attn.v_proj.v_scale", [1, 2]),
        ("self_attn.k_proj.output_scale", [2, 1]),
        ("self_attn.kv_scale", [2, 2]),
    ],
)
def test_names_that_checkpoints_use(name: str, sides: list[int]) -> None:
    found = layer_scales({f"model.layers.1.{name}": np.float32(2)}, decoder().spec, "x")
    assert list(found) == [1]
    np.testing.assert_array_equal(found[1][:, 0], sides)


def test_minus_one_is_no_scale() -> None:
    scales = {f"{LAYER}.k_scale": np.float32(-1), f"{LAYER}.v_scale": np.float32(2)}
    np.testing.assert_array_equal(layer_scales(scales, decoder().spec, "x")[1][:, 0], [1, 2])
    assert layer_scales({f"{LAYER}.k_scale": np.float32(-1)}, decoder().spec, "x") == {}


def test_other_names_are_not_taken() -> None:
    assert not is_kv_scale("model.layers.1.self_attn.k_proj.weight_scale")
    assert not is_kv_scale("model.layers.1.self_attn.q_scale")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("model.layers.99.self_attn.k_scale", 1.0, "no scale of this model's"),
        ("model.embed_tokens.weight", 1.0, "no scale of this model's"),
        (f"{LAYER}.k_scale", 0.0, "positive number"),
        (f"{LAYER}.k_scale", -2.0, "positive number"),
        (f"{LAYER}.k_scale", [], "positive number"),
        (f"{LAYER}.k_scale", float("nan"), "k_scale must be a positive number"),
        (f"{LAYER}.v_scale", [1.0, float("inf")], "v_scale must be a positive number"),
        (f"{LAYER}.k_scale", [1.0] * 7, "positive number or 2"),
    ],
)
def test_scales_that_cannot_be(name: str, value: object, words: str) -> None:
    with pytest.raises(ModelFilesError, match=f"here: .*{words}"):
        layer_scales({name: np.asarray(value)}, decoder().spec, "here")


def test_the_checkpoints_scales_are_loaded_and_converted_and_a_file_beats_them(
    tmp_path: Path,
) -> None:
    folder = tiny_models.write_model(tmp_path / "plain", CONFIG)
    assert all((leaf == 1).all() for leaf in scales_of(folder).values())
    tensors = tiny_models.tensors(CONFIG) | {f"{LAYER}.k_scale": np.asarray([3.0], np.float32)}
    save_file(tensors, folder / "model.safetensors")
    got = scales_of(folder)
    np.testing.assert_array_equal(got["layers_1/attention/kv_scale"], [[3, 3], [1, 1]])
    np.testing.assert_array_equal(got["layers_0/attention/kv_scale"], np.ones((2, 2)))
    convert(folder, tmp_path / "converted", progress=False)
    kept = scales_of(tmp_path / "converted")
    np.testing.assert_array_equal(kept["layers_1/attention/kv_scale"], [[3, 3], [1, 1]])
    file = tmp_path / "scales.json"
    file.write_text(f'{{"{LAYER}.v_scale": [0.5, 2]}}')
    for load_format in ("safetensors", "dummy"):
        got = scales_of(folder, kv_scales=file, load_format=load_format)
        np.testing.assert_array_equal(got["layers_1/attention/kv_scale"], [[1, 1], [0.5, 2]])


def test_wide_pages_leave_a_checkpoints_scales_alone(tmp_path: Path) -> None:
    folder = tiny_models.write_model(tmp_path, CONFIG)
    scale = {f"{LAYER}.k_scale": np.asarray([-1.0], np.float32)}  # "none", as some tools say it
    save_file(tiny_models.tensors(CONFIG) | scale, folder / "model.safetensors")
    params = load_params(folder, decoder("float32"), progress=False)
    assert not any(name.endswith("kv_scale") for name in flatten_dict(params, sep="/"))


def test_copied_heads_have_their_originals_scales() -> None:
    spec = spread_spec(make_decoder(tiny_models.CONFIGS["llama-biases-linear"]).spec, 2)
    assert (spec.stored.num_kv_heads, spec.num_kv_heads) == (1, 2)
    leaf, where = "layers_1/attention/kv_scale", SingleDeviceSharding(jax.devices()[0])
    leaves = {leaf: jax.ShapeDtypeStruct((2, 2), jnp.float32, sharding=where)}
    loaded = load_kv_scales(leaves, spec, {f"{LAYER}.k_scale": np.asarray(2.0)}, "x")
    np.testing.assert_array_equal(loaded[leaf], [[2, 2], [1, 1]])


@pytest.mark.parametrize("name", ["scales.json", "scales.safetensors"])
def test_files_hold_what_was_written(tmp_path: Path, name: str) -> None:
    scales = {f"{LAYER}.k_scale": np.asarray([0.1, 2.5], np.float32)}
    write_scales(tmp_path / name, scales)
    np.testing.assert_array_equal(
        read_scales(tmp_path / name)[f"{LAYER}.k_scale"], scales[f"{LAYER}.k_scale"]
    )


@pytest.mark.parametrize("name", ["scales.json", "scales.safetensors"])
def test_files_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelFilesError, match=rf"^\S*{name} is missing$"):
        read_scales(tmp_path / name)
    (tmp_path / name).write_text("[")
    with pytest.raises(ModelFilesError, match=name):
        read_scales(tmp_path / name)


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
def test_scales_that_are_eight_bit_floats_themselves(tmp_path: Path, dtype: type) -> None:
    file = tmp_path / "scales.safetensors"
    save_file({f"{LAYER}.k_scale": np.ones(2, dtype)}, file)
    with pytest.raises(ModelFilesError, match=r"scales cannot have .*: store them as float32"):
        read_scales(file)


def test_a_number_beyond_all_floats(tmp_path: Path) -> None:
    file = tmp_path / "scales.json"
    file.write_text(f'{{"{LAYER}.k_scale": 1{"0" * 400}}}')
    with pytest.raises(ModelFilesError, match="must hold a number"):
        read_scales(file)


def test_a_file_of_something_else(tmp_path: Path) -> None:
    file = tmp_path / "scales.json"
    file.write_text('{"model_type": "llama", "kv_cache": {"scaling_factor": {"0": {"0": 0.1}}}}')
    with pytest.raises(ModelFilesError, match="by names such as model.layers.0.self_attn.k_scale"):
        read_scales(file)


def test_calibrated_scales_leave_room_above_the_largest(tmp_path: Path) -> None:
    folder = tiny_models.write_model(tmp_path, CONFIG)
    model = decoder("float32")
    forced = TeacherForced(model, load_params(folder, model, progress=False), 16)
    texts = [[5, 9, 2, 44], [7] * 16]
    scales = calibrate(forced, texts)
    assert sorted(layer_scales(scales, model.spec, "x")) == list(range(len(model.spec.layers)))
    _, pages = forced.run(texts[1])
    # Layer 0 is the first of its group, and groups hold their pages one after the other.
    group, array = model.kv.place(0)
    page = 1 + group * -(-16 // model.kv.page_size)
    largest = jnp.abs(pages[array].values_P2KSH[page:][: -(-16 // model.kv.page_size)])
    for side, letter in enumerate("kv"):
        got = scales[f"model.layers.0.self_attn.{letter}_scale"] * LARGEST_STORED
        assert (got >= largest[:, side].max(axis=(0, 2, 3)) * 0.999).all()
        assert (got <= 10 * largest[:, side].max()).all()


def test_the_command_writes_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, out = tmp_path / "text", tmp_path / "scales.json"
    text.write_text("To be, or not to be")
    assert main(["calibrate-kv", str(DEMO_MODEL), str(out), "--text", str(text)]) == 0
    assert str(out) in capsys.readouterr().out
    assert len(read_scales(out)) == 10
    text.write_text("")
    assert main(["calibrate-kv", str(DEMO_MODEL), str(out), "--text", str(text)]) == 2


def test_the_command_takes_a_model_of_few_positions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []

    def load(config: EngineConfig, num_tokens: int) -> None:
        given.append(num_tokens)
        raise ValueError("enough")

    monkeypatch.setattr(TeacherForced, "load", load)
    model, text = tmp_path / "model", tmp_path / "text"
    shutil.copytree(DEMO_MODEL, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    text.write_text("To be, or not to be")
    assert main(["calibrate-kv", str(model), "x.json", "--text", str(text)]) == 2
    assert given == [64]
