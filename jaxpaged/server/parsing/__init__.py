"""Formats of tool calls and reasoning. A new one: its file here and one line in a table below.

The names are those of `--tool-call-parser` and `--reasoning-parser`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jaxpaged.server.parsing import reasoning
from jaxpaged.server.parsing.calls import CallParser, call_id
from jaxpaged.server.parsing.hermes import hermes
from jaxpaged.server.parsing.llama3 import llama3_json
from jaxpaged.server.parsing.mistral import mistral, mistral_id

__all__ = ["CALL_FORMATS", "REASONING_FORMATS", "CallFormat"]


class CallFormat(NamedTuple):
    """How a family of models writes calls.

    Args:
        parser: makes a parser for one answer, from the names of the functions on offer.
        call_id: makes names for calls, as the family's chat templates take them.
    """

    parser: Callable[[frozenset[str]], CallParser]
    call_id: Callable[[], str] = call_id


CALL_FORMATS: dict[str, CallFormat] = {
    "hermes": CallFormat(lambda names: hermes()),
    "qwen": CallFormat(lambda names: hermes()),
    "llama3_json": CallFormat(llama3_json),
    "mistral": CallFormat(lambda names: mistral(), mistral_id),
}

# From whether the prompt ends inside of thoughts (`left_open`) to a parser for one answer.
REASONING_FORMATS: dict[str, Callable[[bool | None], reasoning.Thoughts]] = {
    "deepseek_r1": reasoning.deepseek_r1,
    "qwen3": reasoning.qwen3,
}
