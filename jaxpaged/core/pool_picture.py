"""What the pool looks like: who holds which page, small enough to be drawn."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from jaxpaged.core.page_pool import PagePool
from jaxpaged.core.sequence import SequenceState

# What a cell of the picture says; FIRST_OWNER + i: owner i alone holds the page.
FREE, CACHED, SHARED, HELD, FIRST_OWNER = range(5)

MAX_CELLS = 4096
MAX_OWNERS = 250  # a code fits a byte; pages of further sequences are just HELD
MAX_TABLES = 12  # page tables that are told of, those of the newest owners
MAX_TABLE_PAGES = 64  # of each


@dataclass(frozen=True)
class Owner:
    """A sequence with pages."""

    request_id: str
    index: int
    num_tokens: int
    num_pages: int
    table: list[int] = field(default_factory=list)  # its first pages in order, of one KV group


@dataclass(frozen=True)
class PoolPicture:
    """Every `stride`-th page from page 1 on, a byte each."""

    stride: int
    cells: bytes
    owners: list[Owner]


def draw(pool: PagePool, sequences: Iterable[SequenceState]) -> PoolPicture:
    """A picture of at most MAX_CELLS pages.

    Its time is about that of one look-up for each page that a sequence holds.

    Args:
        sequences: those that may hold pages; the first MAX_OWNERS that do are named.
    """
    stride = max(1, -(-(pool.num_pages - 1) // MAX_CELLS))
    pages = range(1, pool.num_pages, stride)
    kept = pool.kept
    cells = bytearray(
        [
            HELD if refs == 1 else SHARED if refs else CACHED if page in kept else FREE
            for page, refs in zip(pages, pool.references[1::stride], strict=True)
        ]
    )
    single = {page for page, cell in zip(pages, cells, strict=True) if cell == HELD}
    owners: list[Owner] = []
    newest: deque[tuple[Owner, list[int]]] = deque(maxlen=MAX_TABLES)
    for sequence in sequences:
        tables = sequence.block_tables
        num_pages = sum(len(table) - table.count(0) for table in tables)
        if num_pages == 0:
            continue
        if len(owners) == MAX_OWNERS:
            break
        code = FIRST_OWNER + len(owners)
        owner = Owner(sequence.request.request_id, sequence.index, sequence.num_tokens, num_pages)
        owners.append(owner)
        newest.append((owner, tables[0]))
        for table in tables:
            for page in single.intersection(table):
                cells[(page - 1) // stride] = code
    for owner, table in newest:
        owner.table.extend(table[:MAX_TABLE_PAGES])
    return PoolPicture(stride, bytes(cells), owners)
