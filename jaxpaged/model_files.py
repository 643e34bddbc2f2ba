"""Finds a model's folder: on this machine or on the Hugging Face hub."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from jaxpaged.config import EngineConfig
from jaxpaged.gguf.config import make_config
from jaxpaged.gguf.folder import find_gguf, model_folder
from jaxpaged.gguf.header import SUFFIX, read_gguf
from jaxpaged.model_errors import ModelFilesError

DEMO_MODEL = Path(__file__).parent / "assets" / "demo"  # what runs when no model is named
TOKENIZER_FILE = "tokenizer.json"
PATTERNS = ("*.safetensors", "*.json", "tokenizer*", "*.jinja")
CONFIG_FILE = "config.json"
DOWNLOAD = "of a hub's .gguf files download one (hf download org/repo x.gguf) and name its path"
QUANTIZATION_FILES = {  # where some say how they are quantized, and by which method unless told
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}


def resolve_model(
    name: str | Path | None, revision: str | None = None, download_dir: str | None = None
) -> Path:
    """The folder that holds `name`: itself if it is one, one made of a GGUF file, or a snapshot of
    the hub's repository.

    Args:
        name: a local folder, a GGUF file (of a split one the first) or a folder that lacks what its
            metadata tells, or a hub id such as "org/model"; None: the built-in demo model.
        revision: branch, tag or commit of a hub model.
        download_dir: where hub files are kept; default: Hugging Face's own cache.

    Raises:
        ModelFilesError: no such folder, and no such repository or no way to reach the hub; or a
            GGUF file that is missing or not supported.
    """
    if name is None:
        return DEMO_MODEL
    gguf = _gguf_file(name)
    return _folder(name, revision, download_dir, PATTERNS) if gguf is None else model_folder(gguf)


def _gguf_file(name: str | Path) -> Path | None:
    """The GGUF file that a model is, if it is one."""
    path = Path(name).expanduser()
    if path.is_dir():
        others = any(path.glob("*token*")) or any(path.glob("*.safetensors"))
        return None if others and (path / CONFIG_FILE).exists() else find_gguf(path)
    if path.suffix != SUFFIX:
        return None
    if len(path.parts) == 3 and not path.is_absolute() and not path.exists():  # org/repo/x.gguf
        raise ModelFilesError(f"{path} is missing; {DOWNLOAD}")
    return path


def _folder(
    name: str | Path, revision: str | None, download_dir: str | None, patterns: Sequence[str]
) -> Path:
    """A folder, or the files of a hub's repository that have such names."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    try:
        found = Path(
            snapshot_download(
                str(name), revision=revision, cache_dir=download_dir, allow_patterns=list(patterns)
            )
        )
    except HFValidationError:
        raise ModelFilesError(
            f"no folder {str(name)!r}, and not an id of the Hugging Face hub; {DOWNLOAD}"
        ) from None
    except HfHubHTTPError as error:
        reason = " ".join(str(error).split())
        raise ModelFilesError(
            f"cannot download {str(name)!r} from the Hugging Face hub: {reason}"
        ) from error
    except (LocalEntryNotFoundError, OSError) as error:
        raise ModelFilesError(
            f"no folder {str(name)!r} here, no copy in the cache, and the Hugging Face hub cannot "
            f"be reached"
        ) from error
    if not any(any(found.glob(pattern)) for pattern in patterns):
        raise ModelFilesError(
            f"{str(name)!r} on the Hugging Face hub has no config.json; {DOWNLOAD}"
        )
    return found


def tokenizer_file(config: EngineConfig) -> Path:
    """The tokenizer.json that goes with a model; it need not exist.

    Raises:
        ModelFilesError: the folder cannot be found.
    """
    if config.tokenizer is not None:
        return resolve_model(config.tokenizer) / TOKENIZER_FILE
    return resolve_model(config.model, config.revision, config.download_dir) / TOKENIZER_FILE


def read_config(path: Path) -> dict[str, Any]:
    """config.json of a model folder, with a quantization_config that stands in a file of its own.

    Raises:
        ModelFilesError: it is missing or is no JSON object.
    """
    config = read_json(path / CONFIG_FILE)
    for name, method in QUANTIZATION_FILES.items():
        told = config.get("quantization_config") or config.get("compression_config")
        if not told and (path / name).exists():
            config["quantization_config"] = {"quant_method": method} | read_json(path / name)
    return config


def find_config(
    name: str, revision: str | None = None, download_dir: str | None = None
) -> dict[str, Any]:
    """config.json of a folder, of a hub id (of which no weights are fetched) or under any name, or
    what stands for it in a GGUF file.

    Raises:
        ModelFilesError: there is none, or it is no JSON object.
    """
    gguf = _gguf_file(name)
    if gguf is not None:
        return make_config(read_gguf(gguf))
    path = Path(name).expanduser()
    if path.is_file():
        return read_json(path)
    return read_config(_folder(name, revision, download_dir, (CONFIG_FILE, *QUANTIZATION_FILES)))


def read_json(file: Path) -> dict[str, Any]:
    """An object from a JSON file.

    Raises:
        ModelFilesError: the file is missing or is no JSON object.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelFilesError(f"{file} is missing") from None
    except (OSError, ValueError) as error:
        raise ModelFilesError(f"{file} is unreadable: {error}") from error
    if not isinstance(value, dict):
        raise ModelFilesError(f"{file} holds no JSON object")
    return value
