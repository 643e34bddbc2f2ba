"""Answers that a grammar made calls: nothing but JSON."""

from __future__ import annotations

from collections.abc import Callable

from jaxpaged.server.parsing.calls import NotACallError, Pieces, ToolCall, call_id
from jaxpaged.server.parsing.json_text import read_calls, read_object


class EnforcedCalls:
    """The whole answer is a list of calls, or the arguments of the one function `name`.

    An answer that was cut off is content.

    Args:
        call_id: makes names for calls.
    """

    def __init__(self, name: str | None = None, call_id: Callable[[], str] = call_id) -> None:
        self._name, self._call_id = name, call_id
        self._text = ""

    def feed(self, text: str, *, final: bool = False) -> Pieces:
        """Everything once it is complete; nothing before."""
        self._text += text
        if not final:
            return []
        try:
            if self._name is None:
                return [*read_calls(self._text, self._call_id)]
            return [ToolCall(self._name, read_object(self._text), self._call_id())]
        except NotACallError:
            return [self._text] if self._text else []
