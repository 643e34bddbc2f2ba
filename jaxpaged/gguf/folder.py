"""Makes a model folder of a GGUF file: what else reads models reads it like any other.

The folder lies in the user's cache and holds links to the weights, and config.json,
generation_config.json and the tokenizer: links to those beside the file where there are any, else
made of its metadata. It is made once for each state of those files.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import platformdirs

import jaxpaged
from jaxpaged.gguf.config import make_config, make_generation_config
from jaxpaged.gguf.header import SPLIT_NAME, SUFFIX, Gguf, read_gguf, split_files
from jaxpaged.gguf.tokenizer import make_tokenizer
from jaxpaged.model_errors import ModelFilesError

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
BESIDE = (  # what may lie beside a file and is preferred to its metadata
    *(CONFIG, GENERATION_CONFIG, TOKENIZER, TOKENIZER_CONFIG, "tokenizer.model"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
)


def find_gguf(folder: Path) -> Path | None:
    """The GGUF file of a folder, the first if it is split; None: there is none.

    Raises:
        ModelFilesError: there are several.
    """
    found = [
        path
        for path in sorted(folder.glob(f"*{SUFFIX}"))
        if not path.name.startswith("mmproj")  # how images are read
        and ((match := SPLIT_NAME.fullmatch(path.name)) is None or int(match["number"]) == 1)
    ]
    if len(found) > 1:
        names = ", ".join(path.name for path in found[:4])
        raise ModelFilesError(f"{folder} holds several models ({names}): name one of the files")
    return found[0] if found else None


def model_folder(path: Path, cache: Path | None = None) -> Path:
    """The folder of a GGUF file.

    Args:
        path: the file; of a split one the first.
        cache: where such folders are kept; default: in the user's cache.

    Raises:
        ModelFilesError: the file is missing, cut off or not supported, or the folder cannot be
            written; one line.
    """
    sources = [file.absolute() for file in split_files(path)]
    beside = {name: file for name in BESIDE if (file := sources[0].with_name(name)).is_file()}
    try:
        states = [(str(file), *_state(file)) for file in (*sources, *beside.values())]
    except FileNotFoundError as error:
        raise ModelFilesError(f"{error.filename} is missing") from None
    key = hashlib.sha256(f"{jaxpaged.__version__} {states}".encode()).hexdigest()[:16]
    cache = cache or Path(platformdirs.user_cache_dir("jaxpaged")) / "gguf"
    folder = cache / f"{path.stem[:100]}-{key}"
    if folder.is_dir():
        return folder
    texts = _texts(read_gguf(path), beside)
    try:
        _write(folder, texts, sources, beside)
    except OSError as error:
        raise ModelFilesError(
            f"{cache}, where {path.name} is unpacked, cannot be written: {error.strerror}"
        ) from error
    return folder


def _state(file: Path) -> tuple[int, int]:
    found = file.stat()
    return found.st_size, found.st_mtime_ns


def _texts(gguf: Gguf, beside: Mapping[str, Path]) -> dict[str, str]:
    """The files to write, by name."""
    texts = {}
    if CONFIG not in beside:
        texts[CONFIG] = _json(make_config(gguf))
    if GENERATION_CONFIG not in beside:
        texts[GENERATION_CONFIG] = _json(make_generation_config(gguf))
    if not {TOKENIZER, "tokenizer.model"} & beside.keys() and (made := make_tokenizer(gguf)):
        tokenizer, settings = made
        texts |= {TOKENIZER: tokenizer.to_str(), TOKENIZER_CONFIG: _json(settings)}
    return texts


def _json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


def _write(
    folder: Path, texts: Mapping[str, str], sources: list[Path], beside: Mapping[str, Path]
) -> None:
    """All of it or nothing: other processes may do the same at this moment."""
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=".", dir=folder.parent))
    try:
        for name, text in texts.items():
            (made / name).write_text(text, encoding="utf-8")
        for name, file in beside.items():
            if name not in texts:
                (made / name).symlink_to(file)
        for file in sources:
            (made / file.name).symlink_to(file)
        os.rename(made, folder)
    except OSError:
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
