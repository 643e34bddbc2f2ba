"""Mistral: [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], or since version 11 of its
tokenizers [TOOL_CALLS]name[ARGS]{...}, once a call."""

from __future__ import annotations

import re
import secrets
import string

from jaxpaged.server.parsing.calls import MarkedCalls, NotACallError, Reading, ToolCall
from jaxpaged.server.parsing.json_text import JsonScanner, read_calls, read_object

ID_LETTERS = string.ascii_letters + string.digits
_NAMED = re.compile(
    r"\s*(?P<name>[\w.-]{1,256})\s*(?:\[CALL_ID\]\s*(?P<id>\w{1,64})\s*)?(?:\[ARGS\]\s*)?(?={)"
)
_LIST = re.compile(r"\s*\[\s*{")
_HEADER = re.compile(r"[\w.\-\s\[\]]*")  # what may stand between the marker and the first brace
_MAX_HEADER = 1024


def mistral_id() -> str:
    """A name for a call: Mistral's chat templates take nine letters or digits."""
    return "".join(secrets.choice(ID_LETTERS) for _ in range(9))


class _Reader:
    """Waits for the first brace, which tells the two forms apart."""

    def __init__(self, start: int) -> None:
        self._start = start
        self._scanner: JsonScanner | None = None
        self._name: str | None = None  # None: a list of calls
        self._id: str | None = None

    def read(self, text: str) -> Reading | None:
        """The calls of one marker."""
        if self._scanner is None:
            self._scanner = self._begin(text)
        if self._scanner is None:
            return None
        found = self._scanner.scan(text)
        if found is None:
            return None
        if self._name is None:
            calls = read_calls(found, mistral_id)
        else:
            calls = [ToolCall(self._name, read_object(found), self._id or mistral_id())]
        return Reading(calls, self._scanner.end)

    def _begin(self, text: str) -> JsonScanner | None:
        end = _HEADER.match(text, self._start).end()  # type: ignore[union-attr]
        if end - self._start > _MAX_HEADER:
            raise NotACallError
        if end == len(text):
            return None
        if _LIST.match(text, self._start):
            return JsonScanner(self._start, "[")
        named = _NAMED.match(text, self._start)
        if named is None:
            raise NotACallError
        self._name, self._id = named["name"], named["id"]
        return JsonScanner(named.end())


def mistral() -> MarkedCalls:
    """A parser for one answer."""
    return MarkedCalls("[TOOL_CALLS]", _Reader)
