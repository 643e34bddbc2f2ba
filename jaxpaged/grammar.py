"""Grammars as llguidance takes them: from what a request asks for to a matcher of tokens.

Both processes compile: the server's to refuse a bad grammar before it is scheduled, the core's to
follow it. So both use the same vocabulary, limits and words.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from
from llguidance.gbnf_to_lark import is_lark_syntax

from jaxpaged.sampling_params import StructuredOutputs

Result = TypeVar("Result")

MAX_BYTES = 128 * 1024  # of a grammar; OpenAI allows schemas of 120,000 characters
MAX_GBNF_BYTES = 32 * 1024  # its converter takes quadratic time
MASK_SECONDS = 2.0  # for what may come next: everybody's tokens wait for it
MAX_REASON = 300  # characters of a complaint that are repeated
# llguidance descends once for each rule of a chain: the deepest that MAX_BYTES can hold needs some
# 60 MiB. Pages of a stack that nobody touches cost nothing.
STACK_BYTES = 256 << 20
# At most one of these between two JSON tokens: a model that likes blanks must come to an end.
JSON_BLANKS = r"\x20|\r?\n[\x20\t]{0,20}"


class GrammarError(ValueError):
    """A grammar that cannot be followed; one line that says why."""


def grammar_text(wanted: StructuredOutputs) -> str:
    """What is wanted, in llguidance's own form.

    Raises:
        GrammarError: it is too large, no text, or no JSON schema.
    """
    try:
        return _translate(wanted)
    except GrammarError:
        raise
    except UnicodeEncodeError:
        raise GrammarError("it holds half of a surrogate pair, which is no text") from None
    except RecursionError:
        raise GrammarError("it is nested too deeply") from None
    except (TypeError, ValueError) as error:
        raise GrammarError(one_line(str(error))) from error


def _translate(wanted: StructuredOutputs) -> str:
    if wanted.regex is not None:
        return LLMatcher.grammar_from_regex(_small(wanted.regex))
    if wanted.choice is not None:
        # One terminal: a rule's alternatives are tried one by one, and llguidance takes few.
        spelled = (json.dumps(text, ensure_ascii=False) for text in wanted.choice)
        any_of = " | ".join(spelled).replace("\x7f", r"\u007f")
        return LLMatcher.grammar_from_lark(_small(f"start: CHOICE\nCHOICE: {any_of}"))
    if wanted.grammar is not None:
        lark = is_lark_syntax(wanted.grammar)
        text = _small(wanted.grammar, MAX_BYTES if lark else MAX_GBNF_BYTES)
        return grammar_from("grammar", text)
    schema = {"type": "object"} if wanted.json_object else wanted.json
    return LLMatcher.grammar_from_json_schema(
        _small(_schema_text(schema)), defaults={"whitespace_pattern": JSON_BLANKS}
    )


def read_vocabulary(file: Path) -> LLTokenizer:
    """The tokens of a tokenizer.json, as llguidance wants them.

    Takes a second for a large one, and keeps the GIL: to be called at start. Its `eos_token`, some
    special token that no text is likely to hold, stands for whatever ends the texts of this model.

    Raises:
        GrammarError: llguidance cannot read it.
    """
    try:
        definition = file.read_text(encoding="utf-8")
        added = msgspec.json.decode(definition, type=_Definition).added_tokens
        special = [token.id for token in added if token.special]
        if not special:
            raise ValueError("it has no special token")
        return LLTokenizer(definition, eos_token=special[-1])
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise GrammarError(
            f"structured_outputs cannot use this model's tokenizer: {one_line(str(error))}"
        ) from error


def compile_grammar(vocabulary: LLTokenizer, text: str) -> LLMatcher:
    """A matcher at the beginning of its text; may take seconds or for ever, without the GIL.

    Raises:
        GrammarError: the grammar is wrong, or too complex to follow.
    """
    limits = LLParserLimits(verbose_errors=False)
    matcher = LLMatcher(vocabulary, text, log_level=0, limits=limits)
    began = time.perf_counter()
    if not matcher.is_error():
        matcher.compute_bitmask()  # some limits are met only here
    if matcher.is_error():
        raise GrammarError(one_line(matcher.get_error()))
    if time.perf_counter() - began > MASK_SECONDS:
        raise GrammarError("it takes too long to find what may come first")
    return matcher


class _AddedToken(msgspec.Struct):
    id: int
    special: bool = False


class _Definition(msgspec.Struct):
    """What is read of a tokenizer.json here."""

    added_tokens: list[_AddedToken] = []


class CompilerThreads:
    """Threads whose stacks are deep enough for any grammar of at most MAX_BYTES."""

    def __init__(self, count: int) -> None:
        self._threads = ThreadPoolExecutor(count, "grammar")

    def submit(self, function: Callable[..., Result], *args: Any) -> Future[Result]:
        """Run a function in one of them."""
        before = threading.stack_size(STACK_BYTES)
        try:
            return self._threads.submit(function, *args)  # starts a thread, if one is missing
        finally:
            threading.stack_size(before)


def _schema_text(schema: Any) -> str:
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
    except ValueError as error:
        raise GrammarError(f"the schema is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise GrammarError("a JSON schema must be an object")
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _small(text: str, most: int = MAX_BYTES) -> str:
    size = len(text.encode())
    if size > most:
        raise GrammarError(f"it has {size} bytes, and at most {most} are allowed")
    return text


def one_line(reason: str) -> str:
    """A complaint of llguidance, short enough for an error message."""
    line = " ".join(reason.replace("<non-verbose/>", "").split())
    if line.startswith("NoExtension"):
        return "no text matches it"
    return line if len(line) <= MAX_REASON else line[:MAX_REASON] + " …"
