"""An answer as a row of runs, each all reasoning, all content or one call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from jaxpaged.server.parsing.answer import Parts
from jaxpaged.server.parsing.calls import ToolCall


@dataclass(slots=True)
class Run:
    """A part of an answer.

    Args:
        call: of a call, which comes in one piece.
        extra: whatever the reader keeps of it.
    """

    kind: Literal["reasoning", "content", "call"]
    text: str = ""
    call: ToolCall | None = None
    extra: Any = None


class Change(NamedTuple):
    """What happens to a run: it begins, its text grows, it ends."""

    what: Literal["begin", "add", "end"]
    place: int  # of the run among all
    run: Run
    text: str = ""


@dataclass(slots=True)
class Runs:
    """Makes runs of an answer's parts, as they come or all at once."""

    runs: list[Run] = field(default_factory=list)
    _open: bool = False  # the last run may grow

    def feed(self, parts: Parts) -> Iterator[Change]:
        """Take what is new; reasoning comes before content, and calls come last."""
        if parts.reasoning:
            yield from self._grow("reasoning", parts.reasoning)
        if parts.content:
            yield from self._grow("content", parts.content)
        for call in parts.calls:
            yield from self._begin(Run("call", call=call))
            yield from self.close()

    def close(self) -> Iterator[Change]:
        """End the last run."""
        if self._open:
            self._open = False
            yield Change("end", len(self.runs) - 1, self.runs[-1])

    def _grow(self, kind: Literal["reasoning", "content"], text: str) -> Iterator[Change]:
        if not self._open or self.runs[-1].kind != kind:
            yield from self._begin(Run(kind))
        run = self.runs[-1]
        run.text += text
        yield Change("add", len(self.runs) - 1, run, text)

    def _begin(self, run: Run) -> Iterator[Change]:
        yield from self.close()
        self.runs.append(run)
        self._open = True
        yield Change("begin", len(self.runs) - 1, run)
