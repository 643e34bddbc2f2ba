"""Reference-counted pages of KV memory."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence, Set


class PagePool:
    """Hands out page ids 1 .. num_pages - 1; page 0, the null page, belongs to nobody.

    A free page whose content may serve again (`keep`) is taken only when no other is left, the
    least recently used first; `on_evict` is told of it.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.on_evict: Callable[[int], None] = lambda page: None
        self._refs = [0] * num_pages
        self._kept: set[int] = set()
        self._blank = list(range(num_pages - 1, 0, -1))  # free, content worthless
        self._idle: OrderedDict[int, None] = OrderedDict()  # free and kept, oldest first

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._idle)

    @property
    def references(self) -> Sequence[int]:
        """How many hold each page."""
        return self._refs

    @property
    def kept(self) -> Set[int]:
        """Pages whose content may serve again."""
        return self._kept

    @property
    def usage(self) -> float:
        """Share of the pages that sequences hold, 0-1."""
        return 1 - self.num_free / max(1, self.num_pages - 1)

    def take(self, count: int) -> list[int]:
        """Pages with one reference each and stale content.

        Raises:
            MemoryError: fewer than `count` pages are free; none was taken.
        """
        if count > self.num_free:
            raise MemoryError(f"{count} pages wanted, {self.num_free} are free")
        pages = []
        for _ in range(count):
            if self._blank:
                page = self._blank.pop()
            else:
                page, _ = self._idle.popitem(last=False)
                self._kept.discard(page)
                self.on_evict(page)
            self._refs[page] = 1
            pages.append(page)
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more reference to each page; a free kept page comes back to life."""
        for page in pages:
            if self._refs[page] == 0:
                del self._idle[page]
            self._refs[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One reference less to each page; of kept pages that become free the first goes first.

        Raises:
            ValueError: nobody holds the page.
        """
        for page in pages:
            if self._refs[page] == 0:
                raise ValueError(f"page {page} is released more often than it was taken")
            self._refs[page] -= 1
            if self._refs[page] == 0:
                if page in self._kept:
                    self._idle[page] = None
                else:
                    self._blank.append(page)

    def keep(self, page: int) -> None:
        """The content of a held page may serve again: keep it as long as possible once free."""
        self._kept.add(page)

    def forget_kept(self) -> None:
        """No content is worth keeping any more."""
        self._kept.clear()
        self._blank.extend(self._idle)
        self._idle.clear()

    def num_idle(self, pages: Iterable[int]) -> int:
        """How many of these pages are free, so that sharing them lowers `num_free`."""
        return sum(self._refs[page] == 0 for page in pages)

    def check_integrity(self, held: Iterable[int] | None = None) -> None:
        """Check the books; for tests and debugging.

        Args:
            held: the page of every entry of every block table; each must account for exactly
                one reference.

        Raises:
            AssertionError: the books are wrong.
        """
        free = self._blank + list(self._idle)
        assert len(free) == len(set(free)), "a page is free twice"
        assert 0 not in free and self._refs[0] == 0, "the null page is in use"
        unreferenced = {page for page in range(1, self.num_pages) if self._refs[page] == 0}
        assert set(free) == unreferenced, "free lists and reference counts differ"
        assert min(self._refs) >= 0, "negative reference count"
        assert self._kept.issuperset(self._idle), "an idle page is not kept"
        assert self._kept.isdisjoint(self._blank), "a kept page is blank"
        if held is not None:
            counts = Counter(page for page in held if page != 0)
            refs = {page: count for page, count in enumerate(self._refs) if count}
            assert counts == refs, f"held {counts}, counted {refs}"
