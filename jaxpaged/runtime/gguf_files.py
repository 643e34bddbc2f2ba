"""Reads the weights in GGUF files by the names that Hugging Face's checkpoints give them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from jaxpaged.gguf.config import ROPE_FACTORS, architecture
from jaxpaged.gguf.folder import find_gguf
from jaxpaged.gguf.header import StoredTensor, gguf_package, read_gguf
from jaxpaged.model_files import ModelFilesError

TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LAYER_TENSORS_OF = {  # where an architecture has other norms
    "gemma3": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}
PAIRED_HEADS = ("llama",)  # the converter put the two numbers that RoPE turns beside each other
NORM_PLUS_ONE = ("gemma3",)  # the converter added the one
CHUNK = 1 << 18  # bytes of blocks that a thread widens at once
THREADS = 8


class GgufFiles:
    """The tensors of the GGUF file in a model folder, with the names and the values of Hugging
    Face's layout.

    Raises:
        ModelFilesError: there is no such file, or it is none that is supported; one line.
    """

    def __init__(self, path: Path) -> None:
        file = find_gguf(path)
        if file is None:
            raise ModelFilesError(f"{path} holds no .gguf file")
        self.path = file
        self._gguf = read_gguf(file)
        self._arch = architecture(self._gguf)
        self._stored = {
            _name(tensor.name, self._arch): tensor
            for tensor in self._gguf.tensors.values()
            if tensor.name != ROPE_FACTORS  # config.json tells as much
        }
        self.num_bytes = 4 * sum(math.prod(tensor.shape) for tensor in self._stored.values())

    @property
    def names(self) -> set[str]:
        return set(self._stored)

    def read(self, name: str, types: Sequence[str] = ()) -> np.ndarray:
        """A tensor in float32, widened from whatever blocks it is stored in.

        Args:
            types: what a file of Hugging Face's might hold it in; none of them is asked for.

        Raises:
            ModelFilesError: nothing here widens blocks of its type, or it does not fit the heads.
        """
        stored = self._stored[name]
        values = _widen(self.path, stored)
        if self._arch in NORM_PLUS_ONE and name.endswith("norm.weight"):
            return values - np.float32(1)
        if self._arch in PAIRED_HEADS and (match := re.search(r"self_attn\.([qk])_proj", name)):
            return self._halves(values, stored, "" if match[1] == "q" else "_kv")
        return values

    def _halves(self, values: np.ndarray, stored: StoredTensor, kind: str) -> np.ndarray:
        """[heads · (H / 2) · 2, ...] -> [heads · 2 · (H / 2), ...]: RoPE turns a head's halves."""
        key = f"{self._arch}.attention.head_count"
        heads = self._gguf.integer(key + kind, self._gguf.integer(key))
        if heads == 0 or len(values) % (2 * heads):
            raise ModelFilesError(
                f"{self.path}: {stored.name} {list(stored.shape)} does not fit {heads} heads"
            )
        pairs = values.reshape(heads, -1, 2, *values.shape[1:])
        return pairs.swapaxes(1, 2).reshape(values.shape)


def _name(name: str, arch: str) -> str:
    """What Hugging Face calls a tensor; one that it has no name for keeps its own."""
    layers = LAYER_TENSORS | LAYER_TENSORS_OF.get(arch, {})
    stem, _, kind = name.rpartition(".")
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)", stem):
        found = layers.get(match[2])
        return name if found is None else f"model.layers.{match[1]}.{found}.{kind}"
    return f"{TENSORS[stem]}.{kind}" if stem in TENSORS else name


def _widen(path: Path, stored: StoredTensor) -> np.ndarray:
    """float32 values, some blocks of them at a time in every thread."""
    package = gguf_package()
    kind = package.GGMLQuantizationType(stored.kind)
    block, block_bytes = package.GGML_QUANT_SIZES[kind]
    shape = (stored.num_bytes // block_bytes, block_bytes)
    blocks = np.memmap(stored.file, np.uint8, "r", stored.offset, shape)
    values = np.empty((len(blocks), block), np.float32)
    step = max(1, CHUNK // block_bytes)

    def widen(begin: int) -> None:
        some = slice(begin, begin + step)
        with np.errstate(all="ignore"):  # blocks of nonsense are no numbers, and no warning helps
            # One long row: the package takes rows by the few, and threads would wait for Python.
            found = package.quants.dequantize(blocks[some].reshape(1, -1), kind)
            values[some] = found.reshape(-1, block)

    try:
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(widen, range(0, len(blocks), step)))
    except NotImplementedError:
        raise ModelFilesError(
            f"{path}: {stored.name} is {kind.name}, which the package gguf does not widen: take a "
            f"file in another quantization, such as Q4_K_M or Q8_0"
        ) from None
    return values.reshape(stored.shape)
