"""JSON in a text that grows, and the calls that it spells."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

from jaxpaged.server.parsing.calls import NotACallError, ToolCall, call_id

_STRING = re.compile(r'[^"\\]*')
_BETWEEN = re.compile(r"[ \t\r\n:,0-9.+\-eEtrufalsn]*")  # what JSON has outside strings


class JsonScanner:
    """Finds where a JSON object or array ends. Each character is looked at once.

    Args:
        start: where it begins in the text, after white space perhaps.
        opening: what it may begin with.
    """

    def __init__(self, start: int, opening: str = "{") -> None:
        self._start = self._at = start
        self._opening = opening
        self._depth = 0
        self._in_string = False

    def scan(self, text: str) -> str | None:
        """The JSON, not yet validated, with white space before it; None: it goes on.

        Raises:
            NotACallError: this cannot be JSON.
        """
        while self._at < len(text):
            if self._in_string:
                self._at = _STRING.match(text, self._at).end()  # type: ignore[union-attr]
                if text[self._at : self._at + 1] == '"':
                    self._in_string = False
                    self._at += 1
                elif self._at + 1 < len(text):
                    self._at += 2  # an escape
                else:
                    return None
                continue
            if self._depth:
                self._at = _BETWEEN.match(text, self._at).end()  # type: ignore[union-attr]
            elif text[self._at] in " \t\r\n":
                self._at += 1
                continue
            character = text[self._at : self._at + 1]
            if not character:
                return None
            if not self._depth and character not in self._opening:
                raise NotACallError
            self._at += 1
            if character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return text[self._start : self._at]
            else:
                raise NotACallError
        return None

    @property
    def end(self) -> int:
        """Where the text behind the JSON begins."""
        return self._at


class _Written(msgspec.Struct):
    """A call as models write it."""

    name: str
    arguments: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    parameters: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET

    def call(self, call_id: Callable[[], str] = call_id) -> ToolCall:
        raw = self.parameters if self.arguments is msgspec.UNSET else self.arguments
        text = "" if raw is msgspec.UNSET else bytes(raw).decode().strip()
        if text.startswith('"'):  # an object inside a string
            text = _decode(text, str).strip()
        if not self.name:
            raise NotACallError
        return ToolCall(self.name, read_object(text or "{}"), call_id())


def read_object(text: str) -> str:
    """The arguments of a call: a JSON object as it was written; null is an empty one.

    Raises:
        NotACallError: it is something else.
    """
    written = _decode(text, dict[str, Any] | None)  # numbers too: 1e999 is none
    return "{}" if written is None else text.strip()


def read_call(text: str) -> ToolCall:
    """A call from {"name": ..., "arguments" or "parameters": ...}.

    Raises:
        NotACallError: it is something else.
    """
    return _decode(text, _Written).call()


def read_calls(text: str, call_id: Callable[[], str]) -> list[ToolCall]:
    """Calls from a list of such objects, at least one; `call_id` makes their names.

    Raises:
        NotACallError: it is something else.
    """
    calls = [written.call(call_id) for written in _decode(text, list[_Written])]
    if not calls:
        raise NotACallError
    return calls


def _decode(text: str, kind: Any) -> Any:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise NotACallError from error
