from __future__ import annotations

from collections.abc import Callable

import pytest

from jaxpaged.core import pool_picture
from jaxpaged.core.page_pool import PagePool
from jaxpaged.core.pool_picture import CACHED, FIRST_OWNER, FREE, HELD, SHARED, Owner, draw
from jaxpaged.core.scheduler import Scheduler, SchedulerConfig
from jaxpaged.core.sequence import SequenceState


def test_every_state_of_a_page(make_sequence: Callable[..., SequenceState]):
    pool = PagePool(8)
    own, other, both, idle, lost = pool.take(5)
    pool.share([both])
    pool.keep(idle)
    pool.release([idle])
    one, two = make_sequence(4, request_id="one"), make_sequence(4, request_id="two")
    one.block_tables, two.block_tables = [[own, both]], [[both, other]]
    picture = draw(pool, [one, make_sequence(4), two])
    cells = dict(enumerate(picture.cells, 1))
    assert picture.stride == 1 and len(cells) == 7
    assert cells.pop(own) == FIRST_OWNER and cells.pop(other) == FIRST_OWNER + 1
    assert (cells.pop(both), cells.pop(idle), cells.pop(lost)) == (SHARED, CACHED, HELD)
    assert set(cells.values()) == {FREE}
    assert picture.owners == [
        Owner("one", 0, 4, 2, [own, both]),
        Owner("two", 0, 4, 2, [both, other]),
    ]


def test_windows_leave_holes(make_sequence: Callable[..., SequenceState]):
    pool = PagePool(8)
    a, b, c = pool.take(3)
    sequence = make_sequence(40, num_groups=2)
    sequence.block_tables = [[a, b], [0, c]]
    picture = draw(pool, [sequence])
    assert picture.owners[0].num_pages == 3
    assert picture.cells.count(FIRST_OWNER) == 3
    assert picture.owners[0].table == [a, b]


def test_a_large_pool_is_sampled(
    make_sequence: Callable[..., SequenceState], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(pool_picture, "MAX_CELLS", 4)
    pool = PagePool(11)
    sequence = make_sequence(4)
    sequence.block_tables = [pool.take(4)]  # 1 to 4
    picture = draw(pool, [sequence])
    assert picture.stride == 3  # pages 1, 4, 7, 10
    assert picture.cells == bytes([FIRST_OWNER, FIRST_OWNER, FREE, FREE])


def test_only_so_many_owners_are_named(
    make_sequence: Callable[..., SequenceState], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(pool_picture, "MAX_OWNERS", 1)
    pool = PagePool(4)
    sequences = [make_sequence(4), make_sequence(4)]
    for sequence in sequences:
        sequence.block_tables = [pool.take(1)]
    picture = draw(pool, sequences)
    assert sorted(picture.cells) == [FREE, HELD, FIRST_OWNER] and len(picture.owners) == 1


def test_only_the_newest_tables_are_told(
    make_sequence: Callable[..., SequenceState], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(pool_picture, "MAX_TABLES", 1)
    monkeypatch.setattr(pool_picture, "MAX_TABLE_PAGES", 2)
    pool = PagePool(9)
    sequences = [make_sequence(4), make_sequence(4)]
    for sequence in sequences:
        sequence.block_tables = [pool.take(3)]
    picture = draw(pool, sequences)
    assert [owner.table for owner in picture.owners] == [[], sequences[1].block_tables[0][:2]]


def test_the_schedulers_sequences(make_request: Callable):
    scheduler = Scheduler(
        SchedulerConfig(
            page_size=4, num_pages=9, windows=(None,), max_num_seqs=1,
            max_num_batched_tokens=16, max_model_len=32,
        )
    )  # fmt: skip
    scheduler.add(make_request(6, "runs"))
    scheduler.add(make_request(6, "waits"))
    scheduler.schedule()
    assert [s.request.request_id for s in scheduler.sequences] == ["runs", "waits"]
    picture = draw(scheduler.pages.pool, scheduler.sequences)
    assert [owner.request_id for owner in picture.owners] == ["runs"]
    assert picture.cells.count(FIRST_OWNER) == 2
