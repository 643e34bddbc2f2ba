"""Whatever a file holds, reading its header ends soon, with one line if it is not sound."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny_tokenizer
from gguf_models import CONFIGS, write_gguf

from jaxpaged.gguf.config import make_config, make_generation_config
from jaxpaged.gguf.header import read_gguf, shortest_float
from jaxpaged.gguf.tokenizer import make_tokenizer
from jaxpaged.model_errors import ModelFilesError

HUGE = 1 << 62


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    tokenizer = tiny_tokenizer.write_byte_level(folder / "tokenizer")
    write_gguf(folder / "x.gguf", CONFIGS["qwen3"], tokenizer=tokenizer)
    return folder / "x.gguf"


def expect(path: Path, match: str) -> None:
    with pytest.raises(ModelFilesError, match=match) as error:
        read_gguf(path)
    assert "\n" not in str(error.value) and str(path) in str(error.value)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def header(tensors: int, entries: int, rest: bytes = b"", version: int = 3) -> bytes:
    return struct.pack("<4sIQQ", b"GGUF", version, tensors, entries) + rest


def tensor(*shape: int, kind: int = 0, offset: int = 0) -> bytes:
    form = f"<I{len(shape)}QIQ"
    return text(b"x") + struct.pack(form, len(shape), *shape, kind, offset) + bytes(64)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"GG", "ends in the middle"),
        (b"PK\3\4" + bytes(60), "is no GGUF file: it begins with b'PK"),
        (header(0, 0, version=1), "version 1, and only 2 and 3"),
        (header(0, 0, version=3 << 24), "little-endian"),
        (header(0, HUGE), "metadata entries"),
        (header(HUGE, 0), "tensors"),
        (header(0, 1, struct.pack("<Q", HUGE)), f"a string of {HUGE} bytes"),
        (header(0, 1, struct.pack("<Q", 1000)), "ends in the middle"),
        (header(0, 1, text(b"\xff") + bytes(99)), "not UTF-8"),
        (header(0, 1, text(b"k") + struct.pack("<I", 99)), "unknown type 99"),
        (header(0, 1, text(b"k") + struct.pack("<IIQ", 9, 6, HUGE)), "an array of"),
        (header(0, 1, text(b"k") + struct.pack("<IIQ", 9, 6, 1 << 20)), "ends in the middle"),
        (header(0, 1, text(b"k") + struct.pack("<IIQ", 9, 9, 1)), "unknown type 9"),
        (header(1, 0, tensor(HUGE, HUGE)), "ends before x does"),
        (header(1, 0, tensor(4, offset=HUGE)), "ends before x does"),
        (header(1, 0, tensor(0)), r"x \[0\] is not made of blocks"),
        (header(1, 0, tensor(33, kind=8)), r"x \[33\] is not made of blocks of 32"),
        (header(1, 0, tensor(4, kind=77)), "unknown type 77: a newer package gguf"),
        (header(1, 0, tensor(*[1] * 9)), "9 dimensions"),
        (header(2, 0, tensor(1)[:-64] + tensor(1)), "x is there twice"),
    ],
)  # fmt: skip
def test_unsound_files(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x.gguf").write_bytes(content)
    expect(tmp_path / "x.gguf", message)


def test_a_file_that_is_cut_off(tmp_path: Path, sound: Path) -> None:
    content = sound.read_bytes()
    for end in (*range(4, len(content), len(content) // 50), len(content) - 40):
        (tmp_path / "x.gguf").write_bytes(content[:end])
        expect(tmp_path / "x.gguf", r"ends (in the middle|before \S+ does): download it again")


def test_bytes_changed_at_random(tmp_path: Path, sound: Path) -> None:
    """The file is read all the same, or refused with the error that people see."""
    content = np.frombuffer(sound.read_bytes(), np.uint8)
    length = len(content) - sum(t.num_bytes for t in read_gguf(sound).tensors.values())
    refused = 0
    for seed in range(400):
        stream = np.random.RandomState(seed)
        changed = content.copy()
        places = stream.randint(24, length, stream.randint(1, 4))
        changed[places] = stream.choice([0, 1, 127, 255, stream.randint(256)], len(places))
        (tmp_path / "x.gguf").write_bytes(changed.tobytes())
        try:
            gguf = read_gguf(tmp_path / "x.gguf")
            make_config(gguf)
            make_generation_config(gguf)
            make_tokenizer(gguf)
        except ModelFilesError as error:
            refused += 1
            assert "\n" not in str(error)
    assert 40 < refused < 400


def test_files_of_a_set(tmp_path: Path) -> None:
    write_gguf(tmp_path / "x.gguf", CONFIGS["qwen3"], tensors_a_file=20)
    first, second = sorted(tmp_path.glob("*.gguf"))
    assert first.name == "x-00001-of-00002.gguf"
    assert len(read_gguf(first).tensors) == 25
    expect(second, "in the middle of a set: name x-00001-of-00002.gguf")
    alone = first.rename(tmp_path / "alone.gguf")
    expect(alone, "one of 2 files, and must be named NAME-00001-of-00002.gguf")
    alone.rename(first)
    second.unlink()
    with pytest.raises(ModelFilesError, match="x-00002-of-00002.gguf is missing"):
        read_gguf(first)


def test_without_the_package(sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelFilesError, match=r"pip install 'jaxpaged\[gguf\]'"):
        read_gguf(sound)


@pytest.mark.parametrize("value", [1e-6, 1e-5, 0.1, 5e5, 1e6, 3.4e38, 0.0, float("inf")])
def test_floats_are_as_they_were_written(value: float) -> None:
    assert shortest_float(float(np.float32(value))) == value
