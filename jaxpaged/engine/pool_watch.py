"""Pictures of the page pool for those who look at it: one serves all of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from jaxpaged.engine.messages import AskPool, PoolSnapshot

FRESH_SECONDS = 0.2  # a picture that is younger is shown again
WAIT_SECONDS = 2.0  # for a core in the middle of a long step; then the old picture must do


class PoolWatch:
    """Asks the core for a picture only while somebody wants one.

    Args:
        ask: sends a message to the core.
    """

    def __init__(self, ask: Callable[[AskPool], None]) -> None:
        self._ask = ask
        self._picture: PoolSnapshot | None = None
        self._taken_at = float("-inf")  # time.monotonic()
        self._arrived: asyncio.Event | None = None  # of the picture that was asked for

    def take(self, picture: PoolSnapshot | None) -> None:
        """What the core sent with a step."""
        if picture is None:
            return
        self._picture, self._taken_at = picture, time.monotonic()
        if self._arrived is not None:
            self._arrived.set()
            self._arrived = None

    async def look(self) -> PoolSnapshot | None:
        """The latest picture; None if the core has sent none yet."""
        if time.monotonic() - self._taken_at > FRESH_SECONDS:
            if self._arrived is None:
                self._arrived = asyncio.Event()
                self._ask(AskPool())
            try:
                await asyncio.wait_for(self._arrived.wait(), WAIT_SECONDS)
            except TimeoutError:
                self._arrived = None
        return self._picture
