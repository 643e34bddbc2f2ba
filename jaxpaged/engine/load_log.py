"""A line for the log now and then: how much is done, and how much waits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from jaxpaged.engine.messages import EngineStats
from jaxpaged.engine.metrics import Totals

log = logging.getLogger(__name__)

STATS_SECONDS = 10.0  # between two lines


class LoadLog:
    """What happened between two lines.

    Args:
        num_pages: tells those of all engines that live.
    """

    def __init__(self, num_pages: Callable[[], int]) -> None:
        self._num_pages = num_pages
        self._stats, self._totals = EngineStats(), Totals()

    async def run(self, stats: Callable[[], EngineStats], totals: Callable[[], Totals]) -> None:
        """Log a line every ten seconds in which something happened, without end."""
        while True:
            await asyncio.sleep(STATS_SECONDS)
            line = self.line(stats(), totals(), STATS_SECONDS)
            if line is not None:
                log.info("%s", line)

    def line(self, stats: EngineStats, totals: Totals, seconds: float) -> str | None:
        """A line about the last `seconds`; None if nothing happened."""
        before, self._stats = self._stats, stats
        sums, self._totals = self._totals, totals
        prompt = totals.prompt_tokens - sums.prompt_tokens
        generated = totals.generation_tokens - sums.generation_tokens
        if not (prompt or generated or stats.num_running or stats.num_waiting):
            return None
        looked_up = stats.prefix_cache_queries - before.prefix_cache_queries
        hits = (stats.prefix_cache_hits - before.prefix_cache_hits) / max(1, looked_up)
        pages = self._num_pages()
        used = round(stats.kv_cache_usage * pages)
        return (
            f"running {stats.num_running}, waiting {stats.num_waiting}, pages {used} of "
            f"{pages} used ({stats.kv_cache_usage:.1%}), prefix cache hits {hits:.1%}, "
            f"preemptions {stats.num_preemptions - before.num_preemptions}, prompt "
            f"{prompt / seconds:.1f} tokens/s, generation {generated / seconds:.1f} tokens/s"
        )
