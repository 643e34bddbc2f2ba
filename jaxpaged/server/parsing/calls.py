"""Tool calls in the text of an answer."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol


def call_id() -> str:
    """A name for a call that no other has."""
    return f"chatcmpl-tool-{uuid.uuid4().hex}"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete call of a function.

    Args:
        arguments: text of a JSON object.
    """

    name: str
    arguments: str
    id: str = field(default_factory=call_id, compare=False)


Piece = str | ToolCall  # of an answer: content, or a call
Pieces = list[Piece]


class NotACallError(ValueError):
    """What looked like a call is none, however it goes on."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Calls that were read, and where the text behind them begins."""

    calls: list[ToolCall]
    end: int


class CallReader(Protocol):
    """Reads the calls behind one marker."""

    def read(self, text: str) -> Reading | None:
        """The calls; None: the text is too short yet. Each time it gets the text grown.

        Raises:
            NotACallError: whatever follows, this is no call.
        """
        ...


class CallParser(Protocol):
    """Tells content and calls apart."""

    def feed(self, text: str, *, final: bool = False) -> Pieces:
        """What is settled by now, in order; `final`: this text is the last."""
        ...


class MarkedCalls:
    """Calls behind a marker, with content around them.

    A call is given out once it is complete and valid, all at once: nobody could take it back.
    Until then it is held; if it turns out malformed it is content, from its marker on. Every
    decision rests on the text alone, never on how it was cut into deltas. White space around calls
    is dropped, except between content and content.

    Args:
        marker: what calls begin with.
        reader: makes what reads the calls, from where they begin in a text that begins with the
            marker.
        closing: what may stand behind calls and is dropped.
        bare: makes what reads calls without a marker; they begin with a brace at the beginning of
            the answer or behind calls.
    """

    def __init__(
        self,
        marker: str,
        reader: Callable[[int], CallReader],
        *,
        closing: str = "",
        bare: Callable[[int], CallReader] | None = None,
    ) -> None:
        self._marker, self._make, self._closing, self._bare = marker, reader, closing, bare
        self._rest = ""  # what is not settled
        self._reader: CallReader | None = None  # the rest may be calls
        self._skip = 0  # characters in the rest before those calls
        self._edge = bare is not None  # a bare call or a closing may follow
        self._space = ""  # white space that is kept if content follows
        self._any_call = self._any_content = False

    def feed(self, text: str, *, final: bool = False) -> Pieces:
        """What is settled by now, in order; `final`: this text is the last."""
        self._rest += text
        pieces: Pieces = []
        while self._advance(pieces, final):
            pass
        if final and self._space and not self._any_call:
            pieces.append(self._space)
        return pieces

    def _advance(self, pieces: Pieces, final: bool) -> bool:
        """Settle something; False if that needs more text."""
        if self._reader is not None:
            return self._read(self._reader, pieces, final)
        if self._edge:
            return self._pass_edge(final)
        at = self._rest.find(self._marker)
        found = at >= 0
        if found:
            self._open(self._make, len(self._marker))
        else:
            at = len(self._rest) - (0 if final else overlap(self._rest, self._marker))
        self._content(at, pieces)
        return found

    def _open(self, make: Callable[[int], CallReader], skip: int) -> None:
        self._reader, self._skip = make(skip), skip

    def _read(self, reader: CallReader, pieces: Pieces, final: bool) -> bool:
        try:
            reading = reader.read(self._rest)
            if reading is None and final:
                raise NotACallError
        except NotACallError:
            self._reader = None
            self._content(max(self._skip, 1), pieces)
            return True
        if reading is None:
            return False
        pieces += reading.calls
        self._rest = self._rest[reading.end :]
        self._reader, self._edge, self._any_call = None, True, True
        return True

    def _pass_edge(self, final: bool) -> bool:
        """Step over what may stand behind a call, or before the first."""
        text = self._rest.lstrip()
        closes = self._any_call and self._closing
        undecided = not text or (closes and len(text) < len(closes) and closes.startswith(text))
        if undecided and not final:
            return False
        if closes and text.startswith(closes):
            self._rest = text[len(closes) :]
            self._edge = self._bare is not None
        else:
            self._edge = False
            if self._bare is not None and text.startswith("{"):
                self._space += self._rest[: len(self._rest) - len(text)]
                self._rest = text
                self._open(self._bare, 0)
        return True

    def _content(self, length: int, pieces: Pieces) -> None:
        """Give out the rest's first characters."""
        text, self._rest = self._rest[:length], self._rest[length:]
        shown = text.rstrip()
        if shown:
            dropped = self._any_call and not self._any_content
            lead = "" if dropped else self._space
            pieces.append((lead + shown).lstrip() if dropped else lead + shown)
            self._any_content, self._space = True, ""
        self._space += text[len(shown) :]


def overlap(text: str, marker: str) -> int:
    """How many characters at the end of a text may be the beginning of a marker."""
    start = text.find(marker[0], max(0, len(text) - len(marker) + 1))
    while start >= 0:
        if marker.startswith(text[start:]):
            return len(text) - start
        start = text.find(marker[0], start + 1)
    return 0
