from collections.abc import Callable

import pytest

from jaxpaged.core.page_pool import PagePool
from jaxpaged.core.prefix_cache import PrefixCache, first_needed_page
from jaxpaged.core.sequence import SequenceState

SIZE = 4
Make = Callable[..., SequenceState]


@pytest.mark.parametrize(
    ("position", "window", "page"),
    [(100, None, 0), (8, 1, 2), (8, 2, 1), (8, 5, 1), (8, 6, 0), (3, 100, 0)],
)
def test_first_needed_page(position: int, window: int | None, page: int) -> None:
    assert first_needed_page(position, window, SIZE) == page


class Books:
    """A pool and a cache over it, and sequences that compute every page at once."""

    def __init__(self, make_sequence: Make, windows: tuple[int | None, ...] = (None,)) -> None:
        self.pool = PagePool(100)
        self.cache = PrefixCache(self.pool, windows, SIZE)
        self.make_sequence = make_sequence
        self.num_groups = len(windows)

    def new(self, tokens: list[int], **fields: str) -> SequenceState:
        return self.make_sequence(tokens, self.num_groups, **fields)

    def compute(self, tokens: list[int], **fields: str) -> SequenceState:
        sequence = self.new(tokens, **fields)
        self.cache.begin(sequence)
        sequence.block_tables = [
            self.pool.take(-(-len(tokens) // SIZE)) for _ in range(self.num_groups)
        ]
        self.cache.publish(sequence, len(tokens))
        return sequence

    def evict(self, page: int) -> None:
        """Make a page held by one sequence be taken by somebody else."""
        self.pool.release([page])
        while self.pool.num_free:
            self.pool.take(1)

    def hit(self, tokens: list[int], **fields: str) -> int:
        return self.cache.lookup(self.new(tokens, **fields)).num_pages


def test_equal_beginnings_hit_whole_pages(make_sequence: Make) -> None:
    books = Books(make_sequence)
    first = books.compute(list(range(10)))
    hit = books.cache.lookup(books.new(list(range(20))))
    assert hit.num_pages == 2 and hit.tables == [first.block_tables[0][:2]]
    assert books.hit([*range(7), 99, *range(8, 20)]) == 1
    assert books.hit([99, *range(1, 20)]) == 0


def test_one_token_is_left_to_compute(make_sequence: Make) -> None:
    books = Books(make_sequence)
    books.compute(list(range(8)))
    assert books.hit(list(range(8))) == 1
    assert books.hit(list(range(9))) == 2


def test_a_page_is_found_only_behind_the_same_pages(make_sequence: Make) -> None:
    books = Books(make_sequence)
    books.compute([1, 1, 1, 1, 2, 2, 2, 2])
    books.compute([3, 3, 3, 3])
    assert books.hit([3, 3, 3, 3, 2, 2, 2, 2, 0]) == 1


def test_salts_do_not_mix(make_sequence: Make) -> None:
    books = Books(make_sequence)
    books.compute(list(range(9)), cache_salt="a")
    assert books.hit(list(range(9))) == 0
    assert books.hit(list(range(9)), cache_salt="b") == 0
    assert books.hit(list(range(9)), cache_salt="a") == 2


def test_the_first_page_of_a_key_stays(make_sequence: Make) -> None:
    books = Books(make_sequence)
    first = books.compute(list(range(9)))
    books.compute(list(range(9)))
    assert books.cache.lookup(books.new(list(range(9)))).tables == [first.block_tables[0][:2]]


def test_an_evicted_page_ends_the_hit_and_may_come_back(make_sequence: Make) -> None:
    books = Books(make_sequence)
    first = books.compute(list(range(13)))
    again = books.new(list(range(13)))
    again.block_tables = [books.pool.take(4)]
    books.evict(first.block_tables[0][1])
    assert books.hit(list(range(13))) == 1
    books.cache.begin(again)
    books.cache.publish(again, 13)
    assert books.hit(list(range(13))) == 3


def test_nothing_is_left_of_evicted_pages(make_sequence: Make) -> None:
    books = Books(make_sequence, windows=(None, 3))
    sequence = books.compute(list(range(13)))
    for table in sequence.block_tables:
        for page in table:
            books.evict(page)
    assert not books.cache._pages and not books.cache._keys


def test_a_weight_version_has_its_own_pages(make_sequence: Make) -> None:
    books = Books(make_sequence)
    tokens = list(range(13))
    books.compute(tokens)
    running = books.new(tokens)
    books.cache.begin(running)
    running.block_tables = [books.pool.take(4)]
    books.cache.set_weight_version("new")
    assert books.hit(tokens) == 0
    books.cache.publish(running, 13)
    assert books.hit(tokens) == 0, "begun under other weights"
    books.compute(tokens[:9])
    assert books.hit(tokens) == 2
    books.cache.set_weight_version(0)
    assert books.hit(tokens) == 3


def test_after_a_reset_nothing_is_found_and_old_sequences_publish_nothing(
    make_sequence: Make,
) -> None:
    books = Books(make_sequence)
    tokens = list(range(13))
    old = books.compute(tokens)
    old.token_ids += range(13, 20)
    old.block_tables[0] += books.pool.take(1)
    books.cache.reset()
    books.cache.publish(old, 20)
    assert books.hit(tokens) == 0
    books.pool.release(old.block_tables[0])
    books.pool.check_integrity(held=[])


def test_a_hit_needs_of_a_window_only_what_the_next_query_sees(make_sequence: Make) -> None:
    books = Books(make_sequence, windows=(None, 6))
    first = books.compute(list(range(17)))
    full, windowed = first.block_tables
    books.evict(windowed[0])
    hit = books.cache.lookup(books.new(list(range(17))))
    # The query at 16 sees 11 .. 16: pages 2 and 3.
    assert hit.num_pages == 4
    assert hit.tables == [full[:4], [0, 0, windowed[2], windowed[3]]]


def test_a_hole_in_a_window_shortens_the_hit(make_sequence: Make) -> None:
    books = Books(make_sequence, windows=(None, 6))
    first = books.compute(list(range(25)))
    books.evict(first.block_tables[1][4])
    # 6 pages and 5 pages would need page 4; 4 pages need pages 2 and 3.
    assert books.hit(list(range(25))) == 4
    books.evict(first.block_tables[1][0])
    assert books.hit(list(range(25))) == 4
    assert books.hit(list(range(9))) == 0, "2 pages need 0 and 1, 1 page needs 0"


def test_the_hit_is_the_longest_that_every_group_serves(make_sequence: Make) -> None:
    books = Books(make_sequence, windows=(6, 3, None))
    first = books.compute(list(range(33)))
    wide, narrow, full = first.block_tables
    books.evict(narrow[7])  # 8 pages are out, for the narrow window
    books.evict(wide[5])  # so are 7 and 6, for the wide one
    books.evict(full[6])
    assert books.hit(list(range(33))) == 5
    books.evict(narrow[4])  # 5 pages need page 4 of the narrow group
    assert books.hit(list(range(33))) == 4


def test_without_full_groups_early_pages_may_be_gone(make_sequence: Make) -> None:
    books = Books(make_sequence, windows=(3,))
    first = books.compute(list(range(17)))
    for page in first.block_tables[0][:3]:
        books.evict(page)
    hit = books.cache.lookup(books.new(list(range(17))))
    assert hit.tables == [[0, 0, 0, first.block_tables[0][3]]]


def test_a_window_of_one_needs_no_page_at_all(make_sequence: Make) -> None:
    books = Books(make_sequence, windows=(1,))
    assert books.hit(list(range(17))) == 4
