"""Llama 3: {"name": ..., "parameters": {...}}, with or without <|python_tag|> before it.

Several calls are separated by a semicolon. Without the tag an answer that happens to be JSON looks
the same: only the name of a function that the request offers makes it a call.
"""

from __future__ import annotations

import functools

from jaxpaged.server.parsing.calls import MarkedCalls, NotACallError, Reading
from jaxpaged.server.parsing.json_text import JsonScanner, read_call


class _Reader:
    def __init__(self, start: int, names: frozenset[str] | None = None) -> None:
        self._scanner, self._names = JsonScanner(start), names

    def read(self, text: str) -> Reading | None:
        """One call; of those without a tag, only with a known name."""
        found = self._scanner.scan(text)
        if found is None:
            return None
        call = read_call(found)
        if self._names is not None and call.name not in self._names:
            raise NotACallError
        return Reading([call], self._scanner.end)


def llama3_json(names: frozenset[str]) -> MarkedCalls:
    """A parser for one answer of a request that offers functions of these names."""
    bare = functools.partial(_Reader, names=names)
    return MarkedCalls("<|python_tag|>", _Reader, closing=";", bare=bare)
