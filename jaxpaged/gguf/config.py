"""What a GGUF file's metadata says, in the words of Hugging Face's config.json.

Sizes are compared with the tensors' own, which the file's length bounds.
"""

from __future__ import annotations

import math
import re
import struct
from typing import Any

from jaxpaged.gguf.header import Gguf
from jaxpaged.model_errors import ModelFilesError

ARCHITECTURES = {  # general.architecture -> architectures, model_type
    "llama": ("LlamaForCausalLM", "llama"),  # Mistral, too
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
}
TOKEN_IDS = {
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}
# More ends of a text: by their ids, or by their spelling where a file names no ids.
MORE_ENDS = ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
ENDS = {
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_turn>",
}
SAMPLING = {  # generation_config.json -> general.sampling
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
YARN = {  # settings that a file need not have
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
    "attention_factor": "yarn_attn_factor",
}
F32 = 0
ROPE_FACTORS = (
    "rope_freqs.weight"  # Llama 3.1's stretching: what each pair's frequency is divided by
)
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}  # of all of Meta's models
LLAMA3_CONTEXT = 8192  # before the stretching
SOFTCAP = "gemma3.final_logit_softcapping"
GEMMA3_PERIOD = 6  # layers, of which the last has no window
GEMMA3_27B_LAYERS = 62  # the one whose scores are scaled by width / heads; others by head_dim


def architecture(gguf: Gguf) -> str:
    """The file's family, one of `ARCHITECTURES`.

    Raises:
        ModelFilesError: it is another.
    """
    found = gguf.text("general.architecture")
    if found not in ARCHITECTURES or f"{found}.expert_count" in gguf.metadata:
        experts = " with experts" if found in ARCHITECTURES else ""
        raise ModelFilesError(
            f"{gguf.path}: architecture {found!r}{experts} is not supported; "
            f"supported: {', '.join(ARCHITECTURES)}"
        )
    return found


def make_config(gguf: Gguf) -> dict[str, Any]:
    """config.json.

    Raises:
        ModelFilesError: the architecture or its RoPE is not supported, a value is missing or
            absurd, or tensors do not fit the metadata.
    """
    arch = architecture(gguf)
    width = gguf.integer(f"{arch}.embedding_length")
    heads = gguf.integer(f"{arch}.attention.head_count")
    kv_heads = gguf.integer(f"{arch}.attention.head_count_kv", heads)
    if heads == 0 or kv_heads == 0:
        raise ModelFilesError(f"{gguf.path}: no attention heads ({arch}.attention.head_count)")
    turned = gguf.integer(f"{arch}.rope.dimension_count", width // heads)
    head_dim = gguf.integer(f"{arch}.attention.key_length", turned)
    if f"{arch}.rope.dimension_count" in gguf.metadata and turned != head_dim:
        raise ModelFilesError(
            f"{gguf.path}: RoPE of {turned} of a head's {head_dim} dimensions is not supported"
        )
    layers, ffn = gguf.integer(f"{arch}.block_count"), gguf.integer(f"{arch}.feed_forward_length")
    _check_sizes(gguf, arch, width, layers, ffn, heads * head_dim, kv_heads * head_dim)
    names, model_type = ARCHITECTURES[arch]
    config = {
        "architectures": [names],
        "model_type": model_type,
        "dtype": "float32" if all(t.kind == F32 for t in gguf.tensors.values()) else "bfloat16",
        "vocab_size": gguf.tensor("token_embd.weight").shape[0],
        "hidden_size": width,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": gguf.integer(f"{arch}.context_length", least=1),
        "rms_norm_eps": gguf.real(f"{arch}.attention.layer_norm_rms_epsilon"),
        "rope_theta": gguf.real(f"{arch}.rope.freq_base", 10_000.0),
        "rope_scaling": _rope_scaling(gguf, arch, head_dim),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "attention_bias": "blk.0.attn_q.bias" in gguf.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in gguf.tensors,
        **{ours: _token_id(gguf, key) for ours, key in TOKEN_IDS.items()},
    }
    return config | (_gemma3(gguf, width, layers, heads, head_dim) if arch == "gemma3" else {})


def make_generation_config(gguf: Gguf) -> dict[str, Any]:
    """generation_config.json: every token that ends a text, and sampling where the file has any.

    Raises:
        ModelFilesError: a token id or a number is none.
    """
    keys = (TOKEN_IDS["eos_token_id"], *MORE_ENDS)
    ends = {token_id for key in keys if (token_id := _token_id(gguf, key)) is not None}
    tokens = gguf.items("tokenizer.ggml.tokens", str)
    ends |= {token_id for token_id, token in enumerate(tokens) if token in ENDS}
    sampling = {
        ours: gguf.metadata[f"general.sampling.{theirs}"]
        for ours, theirs in SAMPLING.items()
        if isinstance(gguf.metadata.get(f"general.sampling.{theirs}"), int | float)
    }
    return {"eos_token_id": sorted(ends), **sampling}


def _token_id(gguf: Gguf, key: str) -> int | None:
    return gguf.integer(key) if key in gguf.metadata else None


def _check_sizes(
    gguf: Gguf, arch: str, width: int, layers: int, ffn: int, queries: int, keys: int
) -> None:
    found = {int(m[1]) for name in gguf.tensors if (m := re.match(r"blk\.(\d{1,9})\.", name))}
    if len(found) != layers or (found and max(found) != layers - 1):
        raise ModelFilesError(
            f"{gguf.path}: {arch}.block_count is {layers}, but there are tensors of {len(found)} "
            f"layers"
        )
    shapes = {
        "token_embd.weight": (gguf.tensor("token_embd.weight").shape[0], width),
        "blk.0.attn_q.weight": (queries, width),
        "blk.0.attn_k.weight": (keys, width),
        "blk.0.ffn_gate.weight": (ffn, width),
    }
    for name, shape in shapes.items():
        if gguf.tensor(name).shape != shape:
            raise ModelFilesError(
                f"{gguf.path}: {name} is {list(gguf.tensor(name).shape)}, but its metadata "
                f"({arch}.*) wants {list(shape)}"
            )


def _rope_scaling(gguf: Gguf, arch: str, head_dim: int) -> dict[str, Any] | None:
    key = f"{arch}.rope.scaling"
    if ROPE_FACTORS in gguf.tensors:
        return _llama3_scaling(gguf, arch, head_dim)
    kind = gguf.text(f"{key}.type", "none")
    if kind == "none":
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": gguf.real(f"{key}.factor")}
    if kind == "yarn":
        context = gguf.integer(f"{key}.original_context_length", least=1)
        scaling["original_max_position_embeddings"] = context
        for ours, theirs in YARN.items():
            if f"{key}.{theirs}" in gguf.metadata:
                scaling[ours] = gguf.real(f"{key}.{theirs}")
    elif kind != "linear":
        raise ModelFilesError(f"{gguf.path}: {key}.type {kind!r} is not supported")
    return scaling


def _llama3_scaling(gguf: Gguf, arch: str, head_dim: int) -> dict[str, Any]:
    """The settings that make the factors in the file: those of Llama 3.1 and its successors."""
    stored = gguf.tensor(ROPE_FACTORS)
    if stored.kind != F32 or stored.shape != (head_dim // 2,):
        raise ModelFilesError(f"{gguf.path}: {ROPE_FACTORS} is not {head_dim // 2} float32 numbers")
    with stored.file.open("rb") as file:
        file.seek(stored.offset)
        factors = struct.unpack(f"<{head_dim // 2}f", file.read(stored.num_bytes))
    theta = gguf.real(f"{arch}.rope.freq_base", 10_000.0)
    context = gguf.integer(f"{arch}.rope.scaling.original_context_length", LLAMA3_CONTEXT)
    factor, low, high = max(factors), LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    for pair, found in enumerate(factors):
        turns = context * theta ** (-2 * pair / head_dim) / (2 * math.pi)
        keep = min(max((turns - low) / (high - low), 0), 1)
        if not (found > 0 and abs(1 / found - ((1 - keep) / factor + keep)) < 1e-3):
            raise ModelFilesError(
                f"{gguf.path}: {ROPE_FACTORS} is not Llama 3's stretching: put the model's "
                f"config.json beside the file"
            )
    return {
        "rope_type": "llama3",
        "factor": factor,
        **LLAMA3,
        "original_max_position_embeddings": context,
    }


def _gemma3(gguf: Gguf, width: int, layers: int, heads: int, head_dim: int) -> dict[str, Any]:
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": width // heads if layers == GEMMA3_27B_LAYERS else head_dim,
        "rope_local_base_freq": gguf.real("gemma3.rope.freq_base_swa", 10_000.0),
        "sliding_window": gguf.integer("gemma3.attention.sliding_window", least=1),
        "sliding_window_pattern": gguf.integer(
            "gemma3.attention.sliding_window_pattern", GEMMA3_PERIOD, least=1
        ),
        "final_logit_softcapping": gguf.real(SOFTCAP) if SOFTCAP in gguf.metadata else None,
    }
