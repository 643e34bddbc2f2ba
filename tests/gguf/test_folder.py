"""A GGUF file becomes a model folder, once."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tiny_tokenizer
from gguf_models import CONFIGS, write_gguf

from jaxpaged.engine.llm import LLM
from jaxpaged.engine.tokenizer import Tokenizer
from jaxpaged.gguf.folder import model_folder
from jaxpaged.model_errors import ModelFilesError
from jaxpaged.model_files import resolve_model
from jaxpaged.sampling_params import SamplingParams

# Rows for every token of the tiny tokenizer.
CONFIG = {**CONFIGS["qwen2"], "vocab_size": 352}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    tokenizer = tiny_tokenizer.write_byte_level(tmp_path / "tokenizer")
    (tmp_path / "model").mkdir()
    write_gguf(tmp_path / "model" / "x.gguf", CONFIG, tokenizer=tokenizer)
    return tmp_path / "model" / "x.gguf"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "jaxpaged" / "gguf"


def test_it_generates_and_chats_from_the_file_alone(file: Path) -> None:
    settings = {"max_model_len": 128, "enforce_eager": True, "compile_cache_dir": "none"}
    with LLM(model=str(file), **settings) as llm:  # type: ignore[arg-type]
        (output,) = llm.generate("hello", SamplingParams(temperature=0, max_tokens=4))
        (answer,) = llm.chat(
            [{"role": "user", "content": "hello"}], SamplingParams(temperature=0, max_tokens=4)
        )
    assert output.prompt_token_ids[0] == tiny_tokenizer.BOS
    assert answer.prompt_token_ids[:2] == [tiny_tokenizer.BOS, tiny_tokenizer.USER]
    assert answer.outputs[0].token_ids


def test_it_is_made_once_for_each_state_of_the_file(file: Path, own_cache: Path) -> None:
    with ThreadPoolExecutor(4) as pool:  # as the server and its engines do
        folders = set(pool.map(resolve_model, [file] * 4))
    (folder,) = folders
    assert [path.name for path in own_cache.iterdir()] == [folder.name]
    assert {path.name for path in folder.iterdir()} == {
        *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
        "x.gguf",
    }
    assert (folder / "x.gguf").resolve() == file
    os.utime(file, (1, 1))
    assert resolve_model(str(file)) != folder


def test_a_folder_of_a_gguf_file_alone(file: Path) -> None:
    assert resolve_model(file.parent) == resolve_model(file)


def test_files_beside_it_are_preferred(file: Path, tmp_path: Path) -> None:
    beside = file.parent
    (beside / "config.json").write_text(json.dumps({**CONFIG, "eos_token_id": 5}))
    tiny_tokenizer.write_byte_fallback(beside)
    folder = resolve_model(file)
    assert (folder / "config.json").resolve() == beside / "config.json"
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode("hel") == Tokenizer.load(beside).encode("hel")
    assert resolve_model(beside) == beside  # a model folder like any other


def test_a_folder_without_a_tokenizer(file: Path) -> None:
    (file.parent / "config.json").write_text(json.dumps({**CONFIG, "eos_token_id": 5}))
    folder = resolve_model(file.parent)
    assert (folder / "config.json").resolve() == file.parent / "config.json"
    assert Tokenizer.load(folder).encode("hello")
    (file.parent / "model.safetensors").touch()  # then the file is no more than beside
    assert resolve_model(file.parent) == file.parent


def test_errors(file: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match=r"missing\.gguf is missing$"):
        resolve_model("missing.gguf")
    (tmp_path / "no-folder").touch()
    with pytest.raises(ModelFilesError, match="no-folder.* cannot be written"):
        model_folder(file, tmp_path / "no-folder")
