"""Tokenizers made of metadata do what those that the metadata was made of do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_tokenizer
from gguf_models import CONFIGS, write_gguf
from tokenizers import Tokenizer

from jaxpaged.gguf.header import Gguf, read_gguf
from jaxpaged.gguf.tokenizer import make_tokenizer
from jaxpaged.model_errors import ModelFilesError

TEXTS = [
    "hello world, how are you today?",
    "  the quick   brown\n\tfox 12345 ",
    "<|user|>Alpha<|end|>",
    "日本語 🙂 naïve",
    "",
]
PRE, MODEL = "tokenizer.ggml.pre", "tokenizer.ggml.model"


def gguf(metadata: dict[str, Any], arch: str = "llama") -> Gguf:
    return Gguf(Path("x.gguf"), (), {"general.architecture": arch, **metadata}, {})


def made(gguf: Gguf) -> Tokenizer:
    found = make_tokenizer(gguf)
    assert found is not None
    return found[0]


def test_byte_level(tmp_path: Path) -> None:
    folder = tiny_tokenizer.write_byte_level(tmp_path / "tokenizer")
    write_gguf(tmp_path / "x.gguf", CONFIGS["qwen3"], tokenizer=folder)
    found = make_tokenizer(read_gguf(tmp_path / "x.gguf"))
    assert found is not None
    tokenizer, settings = found
    original = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in TEXTS:
        expected = original.encode(text)
        assert tokenizer.encode(text).ids == expected.ids
        assert tokenizer.decode(expected.ids) == original.decode(expected.ids)
    expected_settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert settings == {**expected_settings, "pad_token": "<|bos|>"}


def sentence_piece(folder: Path) -> tuple[Tokenizer, dict[str, Any]]:
    """A tokenizer, and the metadata of it; its scores are the order of its merges."""
    tiny_tokenizer.write_byte_fallback(folder)
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    merged = ["".join(merge) for merge in model["merges"]]
    metadata = {
        MODEL: "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [
            -float(merged.index(token)) if token in merged else -1e6 for token in tokens
        ],
        "tokenizer.ggml.token_type": [
            3 if token in tiny_tokenizer.SPECIAL else 6 if token.startswith("<0x") else 1
            for token in tokens
        ],
        "tokenizer.ggml.add_bos_token": False,
    }
    return Tokenizer.from_file(str(folder / "tokenizer.json")), metadata


def test_sentence_piece(tmp_path: Path) -> None:
    original, metadata = sentence_piece(tmp_path)
    tokenizer = made(gguf(metadata))
    for text in (*TEXTS, "hello hello  held"):
        ids = original.encode(text).ids
        assert tokenizer.encode(text).ids == ids
        assert tokenizer.decode(ids) == original.decode(ids)


def test_sentence_piece_begins_with_bos_and_a_space_unless_told(tmp_path: Path) -> None:
    _, metadata = sentence_piece(tmp_path)
    del metadata["tokenizer.ggml.add_bos_token"]
    metadata["tokenizer.ggml.bos_token_id"] = tiny_tokenizer.BOS
    assert made(gguf(metadata)).encode("hel").tokens == ["<|bos|>", "▁hel"]
    metadata |= {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}
    assert made(gguf(metadata)).encode("hel").tokens == ["h", "e", "l"]


def test_gemma_spells_spaces_and_orders_merges_in_its_own_way() -> None:
    tokens = ["<pad>", "▁", "a", "b", "  ", "ab", "▁a"]
    metadata = {
        MODEL: "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 9.0],  # would put ▁a first
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_space_prefix": False,
    }
    tokenizer = made(gguf(metadata, "gemma3"))
    assert tokenizer.encode("ab  ab ab").tokens == ["ab", "▁▁", "ab", "▁", "ab"]


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        ("llama-bpe", ["It", "'S", "Ġ", "123", "45", "!!Ċ", "Ġok"]),
        ("qwen2", ["It", "'S", "Ġ", "1", "2", "3", "4", "5", "!!Ċ", "Ġok"]),
        ("tekken", ["It", "'S", "Ġ", "1", "2", "3", "4", "5", "!!Ċ", "Ġok"]),
        ("gpt-2", ["It", "'", "S", "Ġ12345", "!!", "Ċ", "Ġok"]),
    ],
)
def test_how_a_text_is_split(name: str, pieces: list[str]) -> None:
    metadata = {MODEL: "gpt2", PRE: name, "tokenizer.ggml.tokens": ["a"]}
    split = made(gguf(metadata)).pre_tokenizer
    assert [piece for piece, _ in split.pre_tokenize_str("It'S 12345!!\n ok")] == pieces


def test_words_of_the_vocabulary_are_whole_where_the_model_has_them_so() -> None:
    metadata = {MODEL: "gpt2", "tokenizer.ggml.tokens": ["a", "b", "ab"]}  # and no merges
    assert made(gguf({**metadata, PRE: "llama-bpe"})).encode("ab").tokens == ["ab"]
    assert made(gguf({**metadata, PRE: "qwen2"})).encode("ab").tokens == ["a", "b"]


def test_kinds_of_tokens() -> None:
    metadata = {
        MODEL: "gpt2",
        "tokenizer.ggml.tokens": ["a", "<unk>", "<s>", "<think>", "<", "s", ">"],
        "tokenizer.ggml.token_type": [1, 2, 3, 4, 1, 1, 1],
    }
    tokenizer = made(gguf(metadata))
    ids = tokenizer.encode("a<unk><s><think>a").ids
    assert ids == [0, 1, 2, 3, 0]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<think>a"


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({MODEL: "rwkv"}, "tokenizer 'rwkv' is not supported .*tokenizer.json beside the file"),
        ({MODEL: "gpt2", PRE: "viking"}, "tokenizer.ggml.pre 'viking' is not supported"),
        ({MODEL: "gpt2", "tokenizer.ggml.merges": ["a b"]}, "its tokenizer is not sound"),
        ({MODEL: "gpt2", "tokenizer.ggml.tokens": ["a" * 5000]}, "a token above 4096"),
        ({MODEL: "gpt2", "tokenizer.ggml.tokens": [1]}, "must be an array of type str"),
        ({MODEL: "gpt2", "tokenizer.ggml.bos_token_id": 3}, "bos_token_id is 3, of 0 tokens"),
        ({MODEL: "llama", "tokenizer.ggml.tokens": ["a"]}, "0 scores of 1 tokens"),
    ],
)  # fmt: skip
def test_errors(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFilesError, match=message) as error:
        make_tokenizer(gguf(metadata))
    assert "\n" not in str(error.value)


def test_a_file_may_have_no_vocabulary() -> None:
    assert make_tokenizer(gguf({})) is None
