"""config.json made of metadata says what a hand-written one does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType
from gguf_models import CONFIGS, write_gguf

from jaxpaged.gguf.config import make_config, make_generation_config
from jaxpaged.gguf.header import read_gguf
from jaxpaged.model_errors import ModelFilesError
from jaxpaged.model_files import find_config
from jaxpaged.models import load_spec


@pytest.mark.parametrize("name", CONFIGS)
def test_the_model_is_the_same(tmp_path: Path, name: str) -> None:
    write_gguf(tmp_path / "x.gguf", CONFIGS[name])
    config = {**CONFIGS[name], "eos_token_id": 2}  # metadata has one such id
    assert load_spec(find_config(str(tmp_path / "x.gguf"))) == load_spec(config)


def test_blocks_run_in_bfloat16_unless_told(tmp_path: Path) -> None:
    write_gguf(tmp_path / "x.gguf", CONFIGS["qwen3"], GGMLQuantizationType.Q4_0)
    assert make_config(read_gguf(tmp_path / "x.gguf"))["dtype"] == "bfloat16"


def test_ends_of_a_text_and_sampling(tmp_path: Path) -> None:
    metadata = {"tokenizer.ggml.eot_token_id": 7, "general.sampling.top_k": 20}
    write_gguf(tmp_path / "x.gguf", CONFIGS["qwen3"], metadata=metadata)
    made = make_generation_config(read_gguf(tmp_path / "x.gguf"))
    assert made == {"eos_token_id": [2, 7], "top_k": 20}


@pytest.mark.parametrize(
    ("name", "metadata", "message"),
    [
        ("qwen3", {"general.architecture": "mamba"}, "architecture 'mamba' is not supported; supp"),
        ("llama", {"llama.expert_count": 8}, "'llama' with experts is not supported"),
        ("qwen3", {"qwen3.block_count": 1 << 30}, "block_count is 1073741824, .* of 2 layers"),
        ("qwen3", {"qwen3.block_count": 1}, "block_count is 1, but there are tensors of 2"),
        ("qwen3", {"qwen3.attention.head_count": 0}, "no attention heads"),
        ("qwen3", {"qwen3.attention.head_count": 1 << 20}, r"attn_q.weight is \[128, 64\], but"),
        ("qwen3", {"qwen3.feed_forward_length": (1 << 31) - 1}, r"ffn_gate.* wants \[2147483647"),
        ("qwen3", {"qwen3.embedding_length": 32}, r"token_embd.* wants \[97, 32\]"),
        ("qwen3", {"qwen3.context_length": "long"}, "context_length is 'long' and must be an int"),
        ("qwen3", {"qwen3.context_length": 0}, "context_length is 0 and must be an integer from 1"),
        ("qwen2", {"qwen2.rope.scaling.original_context_length": 0}, "must be an integer from 1"),
        ("gemma3", {"gemma3.attention.sliding_window_pattern": 0}, "must be an integer from 1"),
        ("gemma3", {"gemma3.final_logit_softcapping": "x"}, "softcapping is 'x' and must be a num"),
        ("qwen3", {"qwen3.rope.scaling.type": "longrope"}, "lacks qwen3.rope.scaling.factor"),
        ("llama", {"llama.rope.dimension_count": 16}, "RoPE of 16 of a head's 32"),
        ("llama", {"llama.rope.scaling.original_context_length": 64}, "put .* config.json beside"),
    ],
)  # fmt: skip
def test_errors(tmp_path: Path, name: str, metadata: dict[str, Any], message: str) -> None:
    write_gguf(tmp_path / "x.gguf", CONFIGS[name], metadata=metadata)
    with pytest.raises(ModelFilesError, match=message) as error:
        make_config(read_gguf(tmp_path / "x.gguf"))
    assert "\n" not in str(error.value) and "x.gguf" in str(error.value)


def test_a_tensor_that_sizes_come_from_is_missing(tmp_path: Path) -> None:
    write_gguf(tmp_path / "x.gguf", CONFIGS["qwen3"], renamed={"token_embd.weight": "other.weight"})
    with pytest.raises(ModelFilesError, match="lacks the tensor token_embd.weight"):
        make_config(read_gguf(tmp_path / "x.gguf"))
