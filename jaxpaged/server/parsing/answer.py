"""An answer's text, told apart into reasoning, content and tool calls."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxpaged.server.parsing.calls import CallParser, ToolCall
from jaxpaged.server.parsing.reasoning import Thoughts


@dataclass(slots=True)
class Parts:
    """What is new of an answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)


class AnswerParser:
    """Parses one answer, whole or in deltas: what it gives joins to the same either way.

    Args:
        thoughts: None: there is no reasoning.
        calls: None: there are no calls.
        single: drop all calls but the first.
    """

    def __init__(
        self,
        thoughts: Thoughts | None = None,
        calls: CallParser | None = None,
        *,
        single: bool = False,
    ) -> None:
        self._thoughts, self._calls, self._single = thoughts, calls, single
        self.num_calls = 0  # given out so far

    def feed(self, text: str, *, final: bool = False) -> Parts:
        """What is settled by now; `final`: this text is the last."""
        parts = Parts(content=text)
        if self._thoughts is not None:
            parts.reasoning, parts.content = self._thoughts.feed(text, final=final)
        if self._calls is not None:
            pieces = self._calls.feed(parts.content, final=final)
            parts.content = "".join(piece for piece in pieces if isinstance(piece, str))
            parts.calls = [piece for piece in pieces if isinstance(piece, ToolCall)]
        if self._single:
            parts.calls = parts.calls[: max(0, 1 - self.num_calls)]
        self.num_calls += len(parts.calls)
        return parts
