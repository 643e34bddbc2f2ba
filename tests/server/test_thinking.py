from __future__ import annotations

import pytest
from llguidance import LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer

from jaxpaged.grammar import compile_grammar, grammar_text
from jaxpaged.sampling_params import StructuredOutputs
from jaxpaged.server.thinking import Thinking

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
ANSWER = '{"a": 1}'
ANSWERS = [
    (True, 'so {"a"\n</think>\n\n' + ANSWER, True),
    (True, f"</think>{ANSWER}", True),
    (True, f"<think>so</think>{ANSWER}", True),
    (True, ANSWER, False),
    (True, "so </think> no", False),
    (None, ANSWER, True),
    (None, f"<think>so</think>\n{ANSWER}", True),
    (None, f"so</think>{ANSWER}", False),
    (None, f"<think>{ANSWER}", False),
    (False, ANSWER, True),
    (False, f"so</think>{ANSWER}", False),
]


@pytest.fixture(scope="module", params=[True, False])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Bytes, and perhaps the tags."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [], BpeTrainer(special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False)
    )
    if request.param:
        made.add_tokens([AddedToken(tag, special=False) for tag in ("<think>", "</think>")])
    return made


@pytest.mark.parametrize(("left_open", "text", "fits"), ANSWERS)
def test_thoughts_before_json(tokenizer: Tokenizer, left_open: bool | None, text: str, fits: bool):
    tokens = tokenizer.token_to_id("<think>") is not None
    thinking = Thinking("qwen3", left_open, tokens)
    for wanted in (StructuredOutputs(json=SCHEMA), StructuredOutputs(json_object=True)):
        grammar = thinking.before(wanted)
        assert grammar is not None
        vocabulary = LLTokenizer(tokenizer.to_str(), eos_token=[0])
        matcher = compile_grammar(vocabulary, grammar_text(grammar))
        ids = tokenizer.encode(text).ids
        assert (matcher.consume_tokens(ids) and matcher.is_accepting()) is fits


def test_what_leaves_no_room():
    thinking = Thinking("deepseek_r1", None, True)
    for wanted in ({"regex": "a+"}, {"choice": ["a"]}, {"grammar": "start: A"}):
        assert thinking.before(StructuredOutputs(**wanted)) is None
