"""Hermes, Qwen: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, one call a pair."""

from __future__ import annotations

from jaxpaged.server.parsing.calls import MarkedCalls, Reading
from jaxpaged.server.parsing.json_text import JsonScanner, read_call


class _Reader:
    def __init__(self, start: int) -> None:
        self._scanner = JsonScanner(start)

    def read(self, text: str) -> Reading | None:
        """One call. It is complete with its JSON: some models forget the closing tag."""
        found = self._scanner.scan(text)
        return None if found is None else Reading([read_call(found)], self._scanner.end)


def hermes() -> MarkedCalls:
    """A parser for one answer."""
    return MarkedCalls("<tool_call>", _Reader, closing="</tool_call>")
