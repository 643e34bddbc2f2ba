"""Which of several engines a request goes to: where it would be done first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jaxpaged.page_keys import page_keys

TYPICAL_OUTPUT = 256  # most tokens that a choice counts for: many ask for the longest there is


@dataclass
class Route:
    """Where a request went, and the tokens that it counts for there."""

    engine: int
    prompt: int  # not in that engine's cache, as far as is known
    output: int


class Router:
    """Weighs the tokens that lie before each engine, those of the prompt that it lacks included.

    So an engine that holds a long prefix gets the prompt, until it is busier than another by more
    tokens than the prefix saves; then the other computes it, and both hold it. What an engine holds
    is guessed from what was sent there: the keys of the latest pages, as many as its pool has.

    Args:
        num_pages: of each engine's pool; 0: it caches no prefixes.
        page_size: tokens a page.
        turn: the engine that is preferred among equals, at first; then it is the next one's turn.
    """

    def __init__(self, num_pages: Sequence[int], page_size: int, *, turn: int = 0) -> None:
        self._page_size, self._turn = page_size, turn
        self._num_pages = num_pages
        self._load = [0] * len(num_pages)  # tokens
        self._held: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in num_pages]

    @property
    def load(self) -> tuple[int, ...]:
        """Tokens that each engine has yet to compute."""
        return tuple(self._load)

    def route(
        self, engines: Iterable[int], token_ids: Sequence[int], salt: str | None, output: int
    ) -> Route:
        """Choose one of the engines for a prompt, and count it there.

        Args:
            engines: numbers of those that may get it, at least one.
            salt: prompts of another salt share no pages.
            output: tokens that it may make, over all choices.
        """
        keys: list[bytes] = []
        if len(self._load) > 1 and any(self._num_pages):
            keys = page_keys(token_ids, self._page_size, origin=salt)
        missing = {
            engine: len(token_ids) - self._page_size * self._num_held(engine, keys)
            for engine in engines
        }
        count = len(self._load)
        chosen = min(
            missing, key=lambda at: (self._load[at] + missing[at], (at - self._turn) % count)
        )
        self._turn = (chosen + 1) % count
        self._hold(chosen, keys)
        route = Route(chosen, missing[chosen], output)
        self._load[chosen] += route.prompt + route.output
        return route

    def prompt_done(self, route: Route) -> None:
        """The prompt has been computed: it counts no more."""
        self._load[route.engine] -= route.prompt
        route.prompt = 0

    def end(self, route: Route) -> None:
        """The request is over; nothing happens the second time."""
        self._load[route.engine] -= route.prompt + route.output
        route.prompt = route.output = 0

    def forget(self, engine: int) -> None:
        """The engine has lost its cached pages."""
        self._held[engine].clear()

    def _num_held(self, engine: int, keys: list[bytes]) -> int:
        """Leading pages that the engine should have."""
        held = self._held[engine]
        return next((at for at, key in enumerate(keys) if key not in held), len(keys))

    def _hold(self, engine: int, keys: list[bytes]) -> None:
        held = self._held[engine]
        for key in reversed(keys):  # the end of a prefix is of no use without its beginning
            held[key] = None
            held.move_to_end(key)
        while len(held) > self._num_pages[engine]:
            held.popitem(last=False)
