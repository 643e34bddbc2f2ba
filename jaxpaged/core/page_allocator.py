"""Gives sequences their pages in every KV group."""

from __future__ import annotations

from itertools import islice, zip_longest

from jaxpaged.core.page_pool import PagePool
from jaxpaged.core.prefix_cache import PrefixCache, PrefixHit, first_needed_page
from jaxpaged.core.sequence import SequenceState


def peak_pages(
    num_tokens: int, chunk: int, window: int | None, page_size: int, start: int = 0
) -> int:
    """Most pages of a group that a sequence holds while [start, num_tokens) are computed.

    Args:
        chunk: most tokens of it in one step.
        window: of the group; None: all tokens are kept.
    """
    pages = -(-num_tokens // page_size) - first_needed_page(start, window, page_size)
    if window is None:
        return pages
    # What a chunk and the window before it touch, wherever they begin in a page.
    return min(pages, -(-(window + chunk - 2) // page_size) + 1)


class PageAllocator:
    """Block tables of the sequences over one pool.

    Full groups get pages for all known tokens at admission; groups with a window get them chunk
    by chunk and let go of what no later query sees.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        windows: tuple[int | None, ...],
        max_chunk: int,
        enable_prefix_caching: bool,
    ) -> None:
        self.pool = PagePool(num_pages)
        self.cache = PrefixCache(self.pool, windows, page_size) if enable_prefix_caching else None
        self._page_size = page_size
        self._windows = windows
        self._has_window = any(window is not None for window in windows)
        self._max_chunk = max_chunk

    def lookup(self, sequence: SequenceState) -> PrefixHit:
        """Cached pages that the sequence could begin with; takes nothing."""
        params = sequence.request.params
        rows_missing = sequence.num_prompt_logprobs < sequence.prompt_logprobs_wanted
        if self.cache is None or rows_missing or params.skip_reading_prefix_cache:
            if self.cache is not None:
                self.cache.begin(sequence)
            return PrefixHit(0, [[] for _ in self._windows])
        return self.cache.lookup(sequence)

    def admit(self, sequence: SequenceState, hit: PrefixHit | None) -> bool:
        """Take the pages of a hit if everything that is left of the known tokens fits now.

        Args:
            hit: None if the sequence holds pages already, from a fork.

        Returns:
            False, and nothing is changed, if too few pages are free.
        """
        tables = sequence.block_tables if hit is None else hit.tables
        start = sequence.num_computed if hit is None else hit.num_pages * self._page_size
        needed = 0
        chunk = min(self._max_chunk, sequence.num_tokens - start)
        for table, window in zip(tables, self._windows, strict=True):
            held = len(table) - first_needed_page(start, window, self._page_size)
            peak = peak_pages(sequence.num_tokens, chunk, window, self._page_size, start)
            needed += max(0, peak - held)
        if hit is None:
            return needed <= self.pool.num_free
        pages = [page for table in tables for page in table if page]
        if needed + self.pool.num_idle(pages) > self.pool.num_free:
            return False
        self.pool.share(pages)
        sequence.block_tables = tables
        sequence.num_computed = start
        sequence.num_published = hit.num_pages
        return True

    def extend(self, sequence: SequenceState, start: int, end: int) -> bool:
        """Make room for positions [start, end), the next to be computed.

        Returns:
            False if too few pages are free; at most pages that nobody reads were given back.
        """
        if self._has_window:
            self._release_behind(sequence, start)
        tables = sequence.block_tables
        last = -(-end // self._page_size)
        last_full = max(last, -(-sequence.num_tokens // self._page_size))
        missing = [
            max(0, (last_full if window is None else last) - len(table))
            for table, window in zip(tables, self._windows, strict=True)
        ]
        if sum(missing) > self.pool.num_free:
            return False
        pages = iter(self.pool.take(sum(missing)))
        for table, count in zip(tables, missing, strict=True):
            table += islice(pages, count)
        sequence.capacity = self._page_size * min(map(len, tables))
        return True

    def publish(self, sequence: SequenceState, num_tokens: int) -> None:
        """Offer full pages among the first `num_tokens` tokens to other sequences."""
        if self.cache is not None:
            self.cache.publish(sequence, num_tokens)

    def fork(self, parent: SequenceState, child: SequenceState) -> None:
        """Let the child hold the parent's full prompt pages; the last one it computes itself."""
        count = (parent.prompt_len - 1) // self._page_size
        if count == 0:
            return
        for group, window in enumerate(self._windows):
            first = first_needed_page(count * self._page_size, window, self._page_size)
            pages = parent.block_tables[group][first:count]
            self.pool.share(pages)
            child.block_tables[group] = [0] * first + pages
        child.num_computed = count * self._page_size
        child.num_published = count
        child.page_hashes = parent.page_hashes[:count]
        child.cache_epoch = parent.cache_epoch

    def release(self, sequence: SequenceState) -> None:
        """Give back all pages; it has to be computed anew unless the prefix cache helps."""
        # Tails of all groups go first: a cached page is worth nothing without those before it.
        columns = zip_longest(*sequence.block_tables, fillvalue=0)
        pages = [page for column in columns for page in column if page]
        self.pool.release(reversed(pages))
        sequence.block_tables = [[] for _ in self._windows]
        sequence.capacity = sequence.num_computed = sequence.num_published = 0

    def _release_behind(self, sequence: SequenceState, start: int) -> None:
        """Give back what no query from `start` on sees.

        This happens only when a page is added, so a fork, which begins at the page border
        before the prompt's end, still finds the pages that its first query sees.
        """
        gone = []
        for table, window in zip(sequence.block_tables, self._windows, strict=True):
            if window is None:
                continue
            at = first_needed_page(start, window, self._page_size) - 1
            while at >= 0 and table[at]:
                gone.append(table[at])
                table[at] = 0
                at -= 1
        self.pool.release(gone)
