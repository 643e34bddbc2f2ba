"""Finds pages that already hold the beginning of a sequence."""

from __future__ import annotations

from dataclasses import dataclass

from jaxpaged.core.page_pool import PagePool
from jaxpaged.core.sequence import SequenceState
from jaxpaged.page_keys import page_keys


def first_needed_page(position: int, window: int | None, page_size: int) -> int:
    """First page that a query at `position` reads; a window counts the query itself."""
    if window is None:
        return 0
    return max(0, position - window + 1) // page_size


@dataclass(frozen=True)
class PrefixHit:
    """Leading pages of a sequence that are there already, and a block table for each group."""

    num_pages: int
    tables: list[list[int]]


class PrefixCache:
    """Full pages of all groups by the key of their place in a sequence.

    Keys are those of `page_keys`; their origin is the salt and the version of the weights. A hit
    of n pages needs, of a full group, all of them and, of a group with a window, those that a query
    just behind them can see.
    """

    def __init__(self, pool: PagePool, windows: tuple[int | None, ...], page_size: int) -> None:
        self.epoch = 0  # pages begun in another epoch are never published
        self._pool = pool
        self._page_size = page_size
        self._windows = windows
        self._pages: dict[bytes, list[int]] = {}  # one page a group; 0 = none
        self._keys: dict[int, bytes] = {}  # of every page above
        self._weight_version: object = 0
        pool.on_evict = self._forget

    def begin(self, sequence: SequenceState) -> None:
        """The sequence is about to compute its first page."""
        if sequence.cache_epoch != self.epoch:
            sequence.cache_epoch = self.epoch
            sequence.page_hashes.clear()

    def lookup(self, sequence: SequenceState) -> PrefixHit:
        """The longest prefix that every group can serve; one token at least is left to compute."""
        self.begin(sequence)
        limit = (len(sequence.token_ids) - 1) // self._page_size
        self._hash_pages(sequence, limit)
        nothing = [0] * len(self._windows)
        columns = [self._pages.get(key, nothing) for key in sequence.page_hashes[:limit]]
        count = self._longest(columns)
        tables = []
        for group, window in enumerate(self._windows):
            first = first_needed_page(count * self._page_size, window, self._page_size)
            tables.append([0] * first + [column[group] for column in columns[first:count]])
        return PrefixHit(count, tables)

    def publish(self, sequence: SequenceState, num_tokens: int) -> None:
        """Offer the full pages among the first `num_tokens` tokens, all known and scheduled."""
        count = num_tokens // self._page_size
        if count <= sequence.num_published or sequence.cache_epoch != self.epoch:
            return
        self._hash_pages(sequence, count)
        for at in range(sequence.num_published, count):
            key = sequence.page_hashes[at]
            column = self._pages.setdefault(key, [0] * len(self._windows))
            for group, table in enumerate(sequence.block_tables):
                page = table[at]
                if page and not column[group]:
                    column[group] = page
                    self._keys[page] = key
                    self._pool.keep(page)
        sequence.num_published = count

    def set_weight_version(self, version: object) -> None:
        """Pages computed from now on have other keys."""
        self._weight_version = version
        self.epoch += 1

    def reset(self) -> None:
        """Forget everything; sequences that have begun publish nothing more."""
        self.epoch += 1
        self._pages.clear()
        self._keys.clear()
        self._pool.forget_kept()

    def _forget(self, page: int) -> None:
        key = self._keys.pop(page)
        column = self._pages[key]
        column[column.index(page)] = 0
        if not any(column):
            del self._pages[key]

    def _hash_pages(self, sequence: SequenceState, count: int) -> None:
        """Extend the sequence's page hashes to at least `count` pages."""
        hashes, size = sequence.page_hashes, self._page_size
        if len(hashes) >= count:
            return
        parent = hashes[-1] if hashes else None
        origin = (sequence.request.cache_salt, self._weight_version)
        new = sequence.token_ids[len(hashes) * size : count * size]
        hashes += page_keys(new, size, parent, origin)

    def _longest(self, columns: list[list[int]]) -> int:
        """The largest number of leading pages that serves every group."""
        count = len(columns)
        for group, window in enumerate(self._windows):
            if window is None:
                count = next((at for at in range(count) if not columns[at][group]), count)
        settled = False
        while not settled:
            settled = True
            for group, window in enumerate(self._windows):
                if window is not None:
                    shorter = self._longest_in_window(columns, group, window, count)
                    settled, count = settled and shorter == count, shorter
        return count

    def _longest_in_window(
        self, columns: list[list[int]], group: int, window: int, count: int
    ) -> int:
        """The largest n <= count such that the window before token n * page_size is there."""
        at = count - 1
        while at >= first_needed_page(count * self._page_size, window, self._page_size):
            if not columns[at][group]:
                count = at
            at -= 1
        return count
