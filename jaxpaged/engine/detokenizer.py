"""Text of a growing list of tokens, without splitting a character or leaking a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

INCOMPLETE = "\ufffd"  # what the tokenizer gives for bytes that are no whole character (yet)
CONTEXT = 6  # tokens decoded along with new ones, since spacing depends on the token before
LONGEST_WINDOW = 24  # tokens after which the decoded window moves on
CHARACTER_TOKENS = 4  # a character has at most 4 bytes: more tokens than that are not one


class Detokenizer:
    """Incremental text of one choice.

    Args:
        decode: token ids -> text.
        prompt_token_ids: what comes before; only its end matters.
        stop: strings that end the text.
        include_stop: keep the stop string in the text.
        min_tokens: tokens before which no stop string counts.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        prompt_token_ids: Sequence[int],
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._decode = decode
        self._stop, self._include_stop, self._min_tokens = stop, include_stop, min_tokens
        self._window = list(prompt_token_ids[-CONTEXT:])  # the last few tokens
        self._window_text = decode(self._window)  # how much of them is text already
        self._undecoded = 0  # tokens at the end of the window without a text yet
        self._text = ""  # all that is decoded, up to the stop string
        self._released = 0  # characters handed out
        self._searched = 0  # characters before which no stop string can begin
        self._num_tokens = 0
        self.stop_string: str | None = None  # the one that ended the text

    @property
    def text(self) -> str:
        """What may be shown so far."""
        return self._text[: self._visible]

    @property
    def num_tokens(self) -> int:
        """Tokens taken; after a stop string, the one that completed it is the last."""
        return self._num_tokens

    def add(self, token_id: int) -> bool:
        """Take one token; True if it completes a stop string."""
        self._num_tokens += 1
        self._text += self._new_text(token_id)
        if not self._stop:
            return False
        if self._num_tokens <= self._min_tokens:
            self._searched = len(self._text)
            return False
        return self._find_stop()

    def take(self, *, final: bool = False) -> str:
        """What may be shown and was not taken yet; `final`: no token follows."""
        end = len(self._text) if final or self.stop_string is not None else self._visible
        piece = self._text[self._released : end]
        self._released = max(self._released, end)
        return piece

    def _new_text(self, token_id: int) -> str:
        """What the token adds; nothing while a character is incomplete."""
        self._window.append(token_id)
        self._undecoded += 1
        text = self._decode(self._window)
        if text.endswith(INCOMPLETE):
            if self._undecoded <= CHARACTER_TOKENS:
                return ""
            # Broken for good; only the last tokens may still become a character.
            ready = len(self._window) - CHARACTER_TOKENS + 1
            text = self._decode(self._window[:ready])
            self._undecoded = len(self._window) - ready
        else:
            self._undecoded = 0
        new = text[len(self._window_text) :]
        self._window_text = text
        if len(self._window) > LONGEST_WINDOW and not self._undecoded:
            self._window = self._window[-CONTEXT:]
            self._window_text = self._decode(self._window)
        return new

    def _find_stop(self) -> bool:
        found = [
            (at, string)
            for string in self._stop
            if (at := self._text.find(string, self._searched)) >= 0
        ]
        if found:
            # The first to be complete wins; of those, the one that begins first.
            at, self.stop_string = min(found, key=lambda hit: (hit[0] + len(hit[1]), hit[0]))
            self._text = self._text[: at + len(self.stop_string) * self._include_stop]
            return True
        longest = max(map(len, self._stop))
        self._searched = max(self._searched, len(self._text) - longest + 1)
        return False

    @property
    def _visible(self) -> int:
        """Characters that no stop string can reach back into."""
        if self.stop_string is not None:
            return len(self._text)
        held = 0
        for string in self._stop:
            for length in range(min(len(string) - 1, len(self._text) - self._searched), held, -1):
                if self._text.endswith(string[:length]):
                    held = length
                    break
        return len(self._text) - held
