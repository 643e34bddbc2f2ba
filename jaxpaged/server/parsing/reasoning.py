"""Thoughts between <think> and </think>, before the answer."""

from __future__ import annotations

from jaxpaged.server.parsing.calls import overlap

OPENING, CLOSING = "<think>", "</think>"


class Thoughts:
    """Tells reasoning and content apart. Line breaks at the edges of either tag are dropped.

    Args:
        inside: the answer begins with reasoning, whether or not a tag says so.
    """

    def __init__(self, inside: bool) -> None:
        self.inside = inside
        self._rest = ""  # what is not settled
        self._begun = False  # whether the text began with a tag is known
        self._edge = False  # behind a tag: line breaks are dropped
        self._breaks = ""  # line breaks that are kept if more reasoning follows

    def feed(self, text: str, *, final: bool = False) -> tuple[str, str]:
        """Reasoning and content that are settled by now; `final`: this text is the last."""
        self._rest += text
        if not self._begun and not self._begin(final):
            return "", ""
        reasoning = self._think(final) if self.inside else ""
        return reasoning, "" if self.inside else self._answer()

    def _begin(self, final: bool) -> bool:
        text = self._rest.lstrip()
        if not final and len(text) < len(OPENING) and OPENING.startswith(text):
            return False
        self._begun = True
        if text.startswith(OPENING):
            self._rest = text[len(OPENING) :]
            self.inside = True
        self._edge = self.inside
        return True

    def _think(self, final: bool) -> str:
        end = self._rest.find(CLOSING)
        found = end >= 0
        if not found:
            end = len(self._rest) - (0 if final else overlap(self._rest, CLOSING))
        text = self._rest[:end]
        if self._edge:
            text = text.lstrip("\n")
            self._edge = not text
        self._rest = self._rest[end:]
        if found:
            self._rest = self._rest[len(CLOSING) :]
            self.inside, self._edge = False, True
        shown = text.rstrip("\n")
        breaks, trailing = self._breaks, text[len(shown) :]
        self._breaks = trailing if shown else breaks + trailing
        return breaks + shown if shown else ""

    def _answer(self) -> str:
        text, self._rest = self._rest, ""
        if self._edge:
            text = text.lstrip("\n")
            self._edge = not text
        return text


def left_open(prompt: str, continued: str | None) -> bool | None:
    """Whether a prompt ends inside of thoughts, behind them, or (None) tells neither.

    Args:
        continued: the text of the last message if the answer continues it.
    """
    if continued:
        return continued.rfind(OPENING) > continued.rfind(CLOSING)
    prompt = prompt.rstrip()
    if prompt.endswith(OPENING):
        return True
    return False if prompt.endswith(CLOSING) else None


def deepseek_r1(left_open: bool | None) -> Thoughts:
    """A parser for models that always think, unless their prompt has done it for them."""
    return Thoughts(inside=left_open is not False)


def qwen3(left_open: bool | None) -> Thoughts:
    """A parser for models that think if they or their prompt write the first tag."""
    return Thoughts(inside=left_open is True)
