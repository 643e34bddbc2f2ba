from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models
from flax.traverse_util import flatten_dict
from paged_runner import make_decoder

from jaxpaged.model_files import ModelFilesError
from jaxpaged.parallel.mesh import make_mesh
from jaxpaged.runtime.checkpoint import convert
from jaxpaged.runtime.weights import load_params

CONFIG = {**tiny_models.CONFIGS["gemma3-new"], "torch_dtype": "bfloat16"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_models.write_model(tmp_path_factory.mktemp("source"), CONFIG)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "generation_config.json").write_text('{"eos_token_id": 1}')
    return folder


@pytest.fixture(scope="module")
def converted(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("out") / "model"
    convert(source, folder, progress=False)
    return folder


def load(folder: Path, config: dict[str, Any] = CONFIG, **options: Any) -> dict[str, Any]:
    model = make_decoder(config, dtype=options.pop("dtype", jnp.bfloat16))
    model = model.clone(mesh=options.pop("mesh", None))
    return flatten_dict(load_params(folder, model, progress=False, **options), sep="/")


@pytest.mark.parametrize("load_format", ["auto", "orbax"])
def test_what_was_converted_loads_the_same(source: Path, converted: Path, load_format: str) -> None:
    expected, restored = load(source), load(converted, load_format=load_format)
    assert restored.keys() == expected.keys()
    for name, leaf in expected.items():
        assert restored[name].dtype == jnp.bfloat16
        np.testing.assert_array_equal(restored[name], leaf)


def test_leaves_restore_to_another_dtype_and_a_sharding(source: Path, converted: Path) -> None:
    mesh = make_mesh()
    restored = load(converted, dtype=jnp.float32, mesh=mesh)
    rounded = load(source)
    for name, leaf in restored.items():
        assert leaf.dtype == jnp.float32
        assert leaf.sharding.mesh == mesh
        np.testing.assert_array_equal(leaf, rounded[name].astype(jnp.float32))


def test_config_and_tokenizer_come_along(converted: Path) -> None:
    names = {file.name for file in converted.iterdir()}
    assert names == {"config.json", "generation_config.json", "tokenizer.json", "orbax"}


def test_a_checkpoint_of_another_model_is_refused(converted: Path) -> None:
    with pytest.raises(ModelFilesError, match="does not fit config.json.*layers_0/mlp") as error:
        load(converted, {**CONFIG, "intermediate_size": 64})
    assert "\n" not in str(error.value)


def test_nothing_is_overwritten(source: Path, converted: Path) -> None:
    with pytest.raises(ModelFilesError, match="orbax exists already"):
        convert(source, converted, progress=False)


def test_missing_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match=r"config\.json is missing"):
        convert(tmp_path, tmp_path / "out")
