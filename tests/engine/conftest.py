from __future__ import annotations

from pathlib import Path

import pytest
from tiny_tokenizer import write_byte_fallback, write_byte_level

from jaxpaged.engine.messages import EngineInfo
from jaxpaged.engine.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_level(tmp_path_factory.mktemp("byte_level"))


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer.load(tokenizer_folder)


@pytest.fixture(scope="session")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_byte_fallback(tmp_path_factory.mktemp("byte_fallback")))


@pytest.fixture(scope="session")
def info() -> EngineInfo:
    return EngineInfo(
        max_model_len=64, vocab_size=400, num_pages=8, page_size=16, max_logprobs=20,
        platform="cpu", attention_backend="xla", dtype="float32", lm_head_dtype="float32",
        buckets=[], startup_seconds={},
    )  # fmt: skip
