"""Reads what a GGUF file says of itself: its metadata, and where its tensors lie.

Every number in the file is checked before anything is reserved for it: a file may be cut off, or
made to do harm. Source of the format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxpaged.model_errors import ModelFilesError

SUFFIX = ".gguf"
VERSIONS = (2, 3)
# Far above what any model has: a header must not fill the memory.
MOST_ENTRIES = 1 << 16  # metadata
MOST_TENSORS = 1 << 20
MOST_ITEMS = 1 << 22  # of an array
MOST_DIMENSIONS = 4
MOST_BYTES = 1 << 24  # of a string
MOST_INTEGER = (1 << 31) - 1  # of sizes and token ids
SCALARS = {  # a value's type, and its format for `struct`
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
STRING, ARRAY = 8, 9
SPLIT_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: whole rows of blocks of one type."""

    name: str
    shape: tuple[int, ...]  # the fastest axis last
    kind: int  # the number of a gguf.GGMLQuantizationType
    file: Path
    offset: int  # in the file
    num_bytes: int


@dataclass(frozen=True)
class Gguf:
    """What a file, or a set of split ones, holds."""

    path: Path  # the first
    files: tuple[Path, ...]
    metadata: dict[str, Any]  # arrays are lists
    tensors: dict[str, StoredTensor]

    def integer(self, key: str, default: int | None = None, *, least: int = 0) -> int:
        """A number of the metadata.

        Raises:
            ModelFilesError: it is missing without a default, no integer or out of range.
        """
        value = self.metadata.get(key, default)
        if type(value) is not int or not least <= value <= MOST_INTEGER:
            raise self._unfit(key, f"an integer from {least} to {MOST_INTEGER}")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """A number of the metadata, above 0.

        Raises:
            ModelFilesError: it is missing without a default, or no such number.
        """
        value = self.metadata.get(key, default)
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self._unfit(key, "a number above 0")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        """A string of the metadata.

        Raises:
            ModelFilesError: it is missing without a default, or no string.
        """
        value = self.metadata.get(key, default)
        if not isinstance(value, str):
            raise self._unfit(key, "a string")
        return value

    def items(self, key: str, kind: type) -> list[Any]:
        """An array of the metadata, empty if there is none.

        Raises:
            ModelFilesError: it is no array of `kind`.
        """
        value = self.metadata.get(key, [])
        if not isinstance(value, list) or any(type(item) is not kind for item in value):
            raise self._unfit(key, f"an array of type {kind.__name__}")
        return value

    def tensor(self, name: str) -> StoredTensor:
        """A tensor's place.

        Raises:
            ModelFilesError: there is none of that name.
        """
        if name not in self.tensors:
            raise ModelFilesError(f"{self.path} lacks the tensor {name}: it is no whole model")
        return self.tensors[name]

    def _unfit(self, key: str, wanted: str) -> ModelFilesError:
        if key not in self.metadata:
            return ModelFilesError(f"{self.path}: its metadata lacks {key}")
        found = repr(self.metadata[key])[:40]
        return ModelFilesError(f"{self.path}: {key} is {found} and must be {wanted}")


def gguf_package() -> ModuleType:
    """The package that knows GGUF's types of blocks.

    Raises:
        ModelFilesError: it is not installed.
    """
    try:
        import gguf  # an extra, imported by who reads such a file
    except ImportError:
        raise ModelFilesError(
            "GGUF files need the package gguf: pip install 'jaxpaged[gguf]'"
        ) from None
    return gguf


def read_gguf(path: Path) -> Gguf:
    """Read the header of a file; of the first of a split set, those of all.

    Raises:
        ModelFilesError: a file is missing, cut off or no GGUF file; one line.
    """
    files = split_files(path)
    headers = [_read_header(file) for file in files]
    metadata = headers[0].metadata
    count = max(1, headers[0].integer("split.count", 1))
    if count != len(files):
        raise ModelFilesError(
            f"{path} is one of {count} files, and must be named NAME-00001-of-{count:05}{SUFFIX}"
        )
    tensors: dict[str, StoredTensor] = {}
    for header in headers:
        if again := tensors.keys() & header.tensors.keys():
            raise ModelFilesError(f"{header.path}: {min(again)} is there twice")
        tensors |= header.tensors
    return Gguf(path, files, metadata, tensors)


def split_files(path: Path) -> tuple[Path, ...]:
    """The files of a set, by the name of the first; any other file alone.

    Raises:
        ModelFilesError: `path` is in the middle of a set.
    """
    match = SPLIT_NAME.fullmatch(path.name)
    if match is None:
        return (path,)
    if int(match["number"]) != 1:
        first = f"{match['stem']}-00001-of-{match['count']}.gguf"
        raise ModelFilesError(f"{path} is in the middle of a set: name {first}")
    numbers = range(1, max(1, int(match["count"])) + 1)
    names = (f"{match['stem']}-{number:05}-of-{match['count']}.gguf" for number in numbers)
    return tuple(path.with_name(name) for name in names)


def _read_header(path: Path) -> Gguf:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(path, _Cursor(path, data))
    except FileNotFoundError:
        raise ModelFilesError(f"{path} is missing") from None
    except ModelFilesError:
        raise
    except ValueError:  # an empty file cannot be mapped
        raise ModelFilesError(f"{path} is empty: download it again") from None
    except OSError as error:
        raise ModelFilesError(f"{path} is unreadable: {error}") from error


class _Cursor:
    """Reads a file from its beginning, and never beyond its end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.size = path, len(data)
        self.at = 0
        self._data = data

    def error(self, what: str) -> ModelFilesError:
        return ModelFilesError(f"{self.path} is no sound GGUF file: {what}")

    def unpack(self, form: str) -> tuple[Any, ...]:
        """Numbers of these formats."""
        begin = self._advance(struct.calcsize("<" + form))
        return struct.unpack_from("<" + form, self._data, begin)

    def string(self) -> str:
        (length,) = self.unpack("Q")
        if length > MOST_BYTES:
            raise self.error(f"a string of {length} bytes")
        begin = self._advance(length)
        try:
            return self._data[begin : self.at].decode()
        except UnicodeDecodeError:
            raise self.error(f"the string at byte {begin} is not UTF-8") from None

    def value(self, kind: int) -> Any:
        """A value of the metadata."""
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            item, count = self.unpack("IQ")
            if count > MOST_ITEMS:
                raise self.error(f"an array of {count} items")
            if item == STRING:
                return [self.string() for _ in range(count)]
            return list(self.unpack(f"{count}{self._form(item)}"))
        (value,) = self.unpack(self._form(kind))
        return shortest_float(value) if kind == 6 else value

    def _form(self, kind: int) -> str:
        if kind not in SCALARS:
            raise self.error(f"a value of the unknown type {kind}")
        return SCALARS[kind]

    def _advance(self, count: int) -> int:
        begin = self.at
        if count > self.size - begin:
            raise ModelFilesError(f"{self.path} ends in the middle: download it again")
        self.at += count
        return begin


def _parse(path: Path, cursor: _Cursor) -> Gguf:
    magic, version, num_tensors, num_entries = cursor.unpack("4sIQQ")
    if magic != b"GGUF":
        raise ModelFilesError(f"{path} is no GGUF file: it begins with {magic!r}")
    if version not in VERSIONS:
        raise cursor.error(f"version {version}, and only 2 and 3 (little-endian) are read")
    if num_entries > MOST_ENTRIES or num_tensors > MOST_TENSORS:
        raise cursor.error(f"{num_entries} metadata entries and {num_tensors} tensors")
    metadata: dict[str, Any] = {}
    for _ in range(num_entries):
        key = cursor.string()
        (kind,) = cursor.unpack("I")
        metadata[key] = cursor.value(kind)
    found = [_tensor_entry(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= 1 << 20:
        raise cursor.error(f"general.alignment is {alignment!r}")
    begin = -(-cursor.at // alignment) * alignment
    tensors: dict[str, StoredTensor] = {}
    for name, shape, kind, offset in found:
        num_bytes = _num_bytes(cursor, name, shape, kind)
        if begin + offset + num_bytes > cursor.size:
            raise ModelFilesError(f"{path} ends before {name} does: download it again")
        if name in tensors:
            raise cursor.error(f"{name} is there twice")
        tensors[name] = StoredTensor(name, shape, kind, path, begin + offset, num_bytes)
    return Gguf(path, (path,), metadata, tensors)


def _tensor_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    (count,) = cursor.unpack("I")
    if not 1 <= count <= MOST_DIMENSIONS:
        raise cursor.error(f"{name} has {count} dimensions")
    shape = cursor.unpack(f"{count}Q")
    kind, offset = cursor.unpack("IQ")
    return name, shape[::-1], kind, offset


def _num_bytes(cursor: _Cursor, name: str, shape: tuple[int, ...], kind: int) -> int:
    """Of a tensor, whose rows are whole blocks."""
    types = gguf_package()
    if kind not in types.GGML_QUANT_SIZES:
        raise ModelFilesError(
            f"{cursor.path}: {name} is of the unknown type {kind}: a newer package gguf may know it"
        )
    block, block_bytes = types.GGML_QUANT_SIZES[kind]
    if 0 in shape or shape[-1] % block:
        raise cursor.error(f"{name} {list(shape)} is not made of blocks of {block}")
    return math.prod(shape) // block * block_bytes


def shortest_float(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-06 for 9.99999997e-07."""
    if not math.isfinite(value):
        return value
    candidates = (float(f"{value:.{digits}g}") for digits in range(6, 10))
    return next((x for x in candidates if struct.pack("<f", x) == struct.pack("<f", value)), value)
