from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import jaxpaged.model_files
from jaxpaged.model_files import ModelFilesError, find_config, read_config, resolve_model


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert resolve_model(tmp_path) == tmp_path
    assert resolve_model(str(tmp_path)) == tmp_path


def test_hub_model_without_network_or_copy(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match="'some/model'.*cannot be reached") as error:
        resolve_model("some/model", download_dir=str(tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["./no-such-folder/at/all", "/no/such/folder"])
def test_missing_folder_is_named(name: str) -> None:
    with pytest.raises(ModelFilesError, match=f"no folder '{name}'"):
        resolve_model(name)


def cached(tmp_path: Path, file: str) -> Path:
    """A hub's copy of some/model that holds one file."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repo = tmp_path / "models--some--model"
    snapshot = repo / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / file).write_text("{}")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    return snapshot


def test_cached_snapshot_is_found_offline(tmp_path: Path) -> None:
    snapshot = cached(tmp_path, "config.json")
    assert resolve_model("some/model", download_dir=str(tmp_path)) == snapshot


@pytest.mark.parametrize("name", ["some/model", "some/model:Q8_0", "some/model/x.gguf"])
@pytest.mark.parametrize("find", [resolve_model, find_config])
def test_gguf_files_of_the_hub(tmp_path: Path, name: str, find: Callable[..., Any]) -> None:
    cached(tmp_path, "x.gguf")
    with pytest.raises(ModelFilesError, match=r"download one .* and name its path$") as error:
        find(name, download_dir=str(tmp_path))
    assert "\n" not in str(error.value)


def test_of_a_hub_model_no_weights_are_fetched_for_its_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text('{"found": true}')
    asked: list[tuple[str, str, list[str]]] = []

    def download(name: str, *, revision: str, cache_dir: str, allow_patterns: list[str]) -> Path:
        asked.append((name, revision, allow_patterns))
        return tmp_path

    monkeypatch.setattr(jaxpaged.model_files, "snapshot_download", download)
    assert find_config("some/model", "v2") == {"found": True}
    quantization = ["hf_quant_config.json", "quantize_config.json", "quant_config.json"]
    assert asked == [("some/model", "v2", ["config.json", *quantization])]
    (tmp_path / "other.json").write_text('{"other": 1}')
    assert find_config(str(tmp_path / "other.json")) == {"other": 1}


def test_quantization_in_a_file_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"quantization_config": null}')
    for name, method in (("quant", "awq"), ("quantize", "gptq"), ("hf_quant", "modelopt")):
        (tmp_path / f"{name}_config.json").write_text('{"bits": 4}')
        for config in (read_config(tmp_path), find_config(str(tmp_path))):
            assert config["quantization_config"] == {"quant_method": method, "bits": 4}
    (tmp_path / "config.json").write_text('{"quantization_config": {"bits": 8}}')
    assert read_config(tmp_path)["quantization_config"] == {"bits": 8}


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "is missing"), ("{", "is unreadable"), ("[1]", "holds no JSON object")],
)
def test_bad_config(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelFilesError, match=rf"config\.json {message}") as error:
        read_config(tmp_path)
    assert "\n" not in str(error.value)


def test_finding_files_needs_no_jax() -> None:
    check = "import sys, jaxpaged.model_files; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)
