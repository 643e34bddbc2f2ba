"""Reasoning before an answer, also before one that a grammar constrains."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from jaxpaged.engine.tokenizer import Tokenizer
from jaxpaged.sampling_params import StructuredOutputs
from jaxpaged.server.parsing import REASONING_FORMATS
from jaxpaged.server.parsing.reasoning import CLOSING, OPENING, Thoughts

# llguidance spells a tag that is a token of its own without quotes; no text matches such a token.
_TOKENS_CERTAIN = "before: <think>? text </think> BREAK\n"
_TOKENS_MAYBE = "before: (<think> text </think>)? BREAK\n"
_TOKENS_TEXT = "text: /(?s:.*)/\n"
_LETTERS_CERTAIN = "before: text BREAK\n"
_LETTERS_MAYBE = 'before: ("<think>" text)? BREAK\n'
_LETTERS_TEXT = 'text[suffix="</think>"]: /(?s:.*)/\n'
_BREAK = "BREAK: /\\n{0,2}/\n"


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
        if wanted.json is None and wanted.json_object is None:
            return None
        certain = self.parser().inside
        if self.tokens:
            before = (_TOKENS_CERTAIN if certain else _TOKENS_MAYBE) + _TOKENS_TEXT
        else:
            before = (_LETTERS_CERTAIN if certain else _LETTERS_MAYBE) + _LETTERS_TEXT
        return dataclasses.replace(wanted, before_json=before + _BREAK)
