"""Text of a growing list of tokens, without splitting a character or leaking a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

INCOMPLETE = "\ufffd"  # what the tokenizer gives for bytes that are no whole character (yet)
CONTEXT = 6  # tokens decoded along with new ones, since spacing depends on the token before
LONGEST_WINDOW = 24  # tokens after which the decoded window moves on
CHARACTER_TOKENS = 4  # a character has at most 4 bytes: more tokens than that are not one


class TokenText:
    """What each token of one sequence adds to its text; its cost does not grow with the length.

    A window of the last few tokens is decoded before and after each new one; the difference is
    what the token adds. Text that ends in an incomplete character waits for the next token.

    Args:
        decode: token ids -> text; bytes that are no whole character become U+FFFD.
        prompt_token_ids: what comes before; only its end matters.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], prompt_token_ids: Sequence[int] = ()
    ) -> None:
        self._decode = decode
        self._undecoded = 0  # tokens at the end of the window without a text yet
        self._window: list[int] = []
        self._text = ""  # of the window, as far as it was handed out
        # The context begins where a character does, so that it reads the same in any window.
        for length in range(CONTEXT, CONTEXT + CHARACTER_TOKENS):
            self._window = list(prompt_token_ids[-length:])
            self._text = decode(self._window)
            if not self._text.startswith(INCOMPLETE):
                break
        # A character that the prompt began and the output completes belongs to the output.
        self._text = self._text.rstrip(INCOMPLETE)

    def add(self, token_id: int) -> str:
        """What the token adds; nothing while a character is incomplete."""
        self._window.append(token_id)
        self._undecoded += 1
        text = self._decode(self._window)
        unready = 0
        if text.endswith(INCOMPLETE):
            if self._undecoded < CHARACTER_TOKENS:
                return ""
            # Broken for good; only the last tokens may still become a character.
            unready = CHARACTER_TOKENS - 1
            text = self._decode(self._window[:-unready])
        if text.startswith(self._text):
            new = text[len(self._text) :]
        else:
            # Byte-fallback tokenizers spoil a whole run of byte tokens for one bad byte in it;
            # what was handed out stays, and the new tokens are read alone.
            new = self._decode(self._window[-self._undecoded : len(self._window) - unready])
        self._text, self._undecoded = text, unready
        if len(self._window) > LONGEST_WINDOW and not unready:
            self._move_window()
        return new

    def _move_window(self) -> None:
        """Forget old tokens, up to a place from where the rest reads the same."""
        for length in range(CONTEXT, CONTEXT + CHARACTER_TOKENS):
            text = self._decode(self._window[-length:])
            if self._text.endswith(text):
                self._window, self._text = self._window[-length:], text
                return


class Detokenizer:
    """Incremental text of one choice, up to the first stop string.

    Args:
        decode, prompt_token_ids: see `TokenText`.
        stop: strings that end the text.
        include_stop: keep the stop string in the text.
        min_tokens: tokens before which no stop string counts.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        prompt_token_ids: Sequence[int] = (),
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._tokens = TokenText(decode, prompt_token_ids)
        self._stop, self._include_stop, self._min_tokens = stop, include_stop, min_tokens
        self._pending = ""  # decoded, not taken: no more than what a stop string may begin with
        self._searched = 0  # characters of it in which no stop string may begin
        self._num_tokens = 0
        self.stop_string: str | None = None  # the one that ended the text

    @property
    def num_tokens(self) -> int:
        """Tokens taken; after a stop string, the one that completed it is the last."""
        return self._num_tokens

    def add(self, token_id: int) -> bool:
        """Take one token; True if it completes a stop string."""
        self._num_tokens += 1
        self._pending += self._tokens.add(token_id)
        if not self._stop:
            return False
        if self._num_tokens <= self._min_tokens:
            self._searched = len(self._pending)
            return False
        return self._find_stop()

    def take(self, *, final: bool = False) -> str:
        """What may be shown and was not taken yet; `final`: no token follows."""
        held = 0 if final or self.stop_string is not None else self._held_back()
        end = len(self._pending) - held
        piece, self._pending = self._pending[:end], self._pending[end:]
        self._searched = max(0, self._searched - end)
        return piece

    def _find_stop(self) -> bool:
        found = [
            (at, string)
            for string in self._stop
            if (at := self._pending.find(string, self._searched)) >= 0
        ]
        if not found:
            return False
        # The first to be complete wins; of those, the one that begins first.
        at, self.stop_string = min(found, key=lambda hit: (hit[0] + len(hit[1]), hit[0]))
        self._pending = self._pending[: at + len(self.stop_string) * self._include_stop]
        return True

    def _held_back(self) -> int:
        """Length of the longest end of the pending text that could begin a stop string."""
        longest = 0
        for string in self._stop:
            start = min(len(string) - 1, len(self._pending) - self._searched)
            for length in range(start, longest, -1):
                if self._pending.endswith(string[:length]):
                    longest = length
                    break
        return longest
