"""Reasoning before an answer, also before one that a grammar constrains."""

from __future__ import annotations

import json
from dataclasses import dataclass

from jaxpaged.engine.tokenizer import Tokenizer
from jaxpaged.grammar import json_answer
from jaxpaged.sampling_params import StructuredOutputs
from jaxpaged.server.parsing import REASONING_FORMATS
from jaxpaged.server.parsing.reasoning import CLOSING, OPENING, Thoughts

# llguidance spells a tag that is a token of its own without quotes; no text matches such a token.
_TOKENS_CERTAIN = "start: <think>? text </think> BREAK answer\ntext: /(?s:.*)/\n"
_TOKENS_MAYBE = "start: (<think> text </think>)? BREAK answer\ntext: /(?s:.*)/\n"
_TEXT_CERTAIN = 'start: text BREAK answer\ntext[suffix="</think>"]: /(?s:.*)/\n'
_TEXT_MAYBE = 'start: ("<think>" text)? BREAK answer\ntext[suffix="</think>"]: /(?s:.*)/\n'
_ANSWER = "BREAK: /\\n{0,2}/\nanswer: %json "


@dataclass(frozen=True)
class Thinking:
    """How the answers to one prompt begin.

    Args:
        format: a name of `REASONING_FORMATS`.
        left_open: whether the prompt ends inside of thoughts; None: it says nothing of it.
        tokens: whether each tag is one token.
    """

    format: str
    left_open: bool | None
    tokens: bool

    @classmethod
    def of(cls, format: str, left_open: bool | None, tokenizer: Tokenizer) -> Thinking:
        """With a model's tokenizer."""
        lengths = [len(tokenizer.encode(tag, False)) for tag in (OPENING, CLOSING)]
        return cls(format, left_open, tokens=lengths == [1, 1])

    def parser(self) -> Thoughts:
        """A parser for one answer."""
        return REASONING_FORMATS[self.format](self.left_open)

    def before(self, wanted: StructuredOutputs) -> StructuredOutputs | None:
        """A constraint with room for thoughts before it; None: there can be none.

        Only JSON can stand inside of another grammar.
        """
        if self.left_open is False:
            return wanted
        schema = {"type": "object"} if wanted.json_object else wanted.json
        try:
            schema = json.loads(schema) if isinstance(schema, str) else schema
            if not isinstance(schema, dict):
                return None
            written = json_answer(schema)
        except (ValueError, RecursionError):  # whoever compiles it says what is wrong
            return None
        certain = self.parser().inside
        if self.tokens:
            before = _TOKENS_CERTAIN if certain else _TOKENS_MAYBE
        else:
            before = _TEXT_CERTAIN if certain else _TEXT_MAYBE
        return StructuredOutputs(grammar=before + _ANSWER + written)
