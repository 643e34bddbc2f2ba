"""The trained model as a Hugging Face folder: weights, configuration, tokenizer, card, notice."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from string import Template
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.flax import save_file
from tokenizers import Tokenizer

from demo_model.network import NetworkConfig
from demo_model.tokenizer import BOS, END, EOS

_HERE = Path(__file__).parent


def export(folder: Path, params: Any, config: NetworkConfig, tokenizer: Tokenizer) -> None:
    """Write what `transformers` loads as a LlamaForCausalLM in bfloat16. Creates `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(to_hugging_face(params), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # it is written for its owner alone
    tokenizer.save(str(folder / "tokenizer.json"))
    shutil.copy(_HERE / "chat_template.jinja", folder)
    bos, eos, end = (tokenizer.token_to_id(token) for token in (BOS, EOS, END))
    _write_json(
        folder / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": False,
            "bos_token_id": bos,
            "eos_token_id": eos,
            "head_dim": config.head_dim,
            "hidden_act": "silu",
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "max_position_embeddings": config.max_position_embeddings,
            "mlp_bias": False,
            "num_attention_heads": config.num_attention_heads,
            "num_hidden_layers": config.num_hidden_layers,
            "num_key_value_heads": config.num_key_value_heads,
            "rms_norm_eps": config.rms_norm_eps,
            "rope_theta": config.rope_theta,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "vocab_size": config.vocab_size,
        },
    )
    _write_json(
        folder / "generation_config.json",
        {
            "bos_token_id": bos,
            "eos_token_id": [eos, end],  # END ends an answer, EOS a scene
            "pad_token_id": eos,
            "do_sample": True,
            "temperature": 0.8,
            "top_p": 0.95,
        },
    )
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "pad_token": EOS,
            "clean_up_tokenization_spaces": False,
            "model_max_length": config.max_position_embeddings,
        },
    )


def write_card(folder: Path, report: dict[str, Any]) -> None:
    """README.md (the model card, with the numbers of `report`) and NOTICE beside the weights."""
    card = Template((_HERE / "card.md").read_text("utf-8"))
    shown = {k: f"{v:,}" if isinstance(v, int) else v for k, v in report.items()}
    (folder / "README.md").write_text(card.substitute(shown), "utf-8")
    shutil.copy(_HERE / "NOTICE", folder)


def to_hugging_face(params: Any) -> dict[str, jax.Array]:
    """Flax's tree -> {Hugging Face name: bfloat16 array}; kernels become [out, in]."""
    modules = {"q_proj", "k_proj", "v_proj", "o_proj"}
    tensors = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        *names, kind = (str(entry.key) for entry in path)
        name = ".".join(
            f"self_attn.{part}"
            if part in modules
            else f"mlp.{part}"
            if part.endswith("_proj")
            else part.replace("layers_", "layers.")
            for part in names
        )
        value = np.asarray(leaf, np.float32)
        value = value.T if kind == "kernel" else value
        tensors[f"model.{name}.weight"] = jnp.asarray(value, jnp.bfloat16)
    return tensors


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", "utf-8")
