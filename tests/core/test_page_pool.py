import pytest

from jaxpaged.core.page_pool import PagePool


def test_the_null_page_is_never_handed_out() -> None:
    pool = PagePool(4)
    assert sorted(pool.take(3)) == [1, 2, 3]
    assert pool.num_free == 0 and pool.usage == 1
    with pytest.raises(MemoryError, match="1 pages wanted, 0 are free"):
        pool.take(1)
    pool.check_integrity(held=[1, 2, 3, 0])


def test_taking_too_many_takes_none() -> None:
    pool = PagePool(4)
    with pytest.raises(MemoryError):
        pool.take(4)
    assert pool.num_free == 3
    pool.check_integrity(held=[])


def test_a_page_is_free_once_every_holder_released_it() -> None:
    pool = PagePool(3)
    (page,) = pool.take(1)
    pool.share([page])
    pool.release([page])
    assert pool.num_free == 1
    pool.check_integrity(held=[page])
    pool.release([page])
    assert pool.num_free == 2
    with pytest.raises(ValueError, match="released more often"):
        pool.release([page])


def test_blank_pages_go_first_then_kept_ones_by_age() -> None:
    pool = PagePool(6)
    evicted: list[int] = []
    pool.on_evict = evicted.append
    a, b, c, d, e = pool.take(5)
    for page in (a, b, c):
        pool.keep(page)
    pool.release([b, d, a, c])
    assert pool.take(1) == [d] and evicted == []
    assert pool.take(2) == [b, a] == evicted
    pool.check_integrity(held=[d, b, a, e])


def test_sharing_a_free_kept_page_saves_it() -> None:
    pool = PagePool(4)
    pages = pool.take(3)
    for page in pages:
        pool.keep(page)
    pool.release(pages)
    assert pool.num_idle(pages) == 3
    pool.share(pages[:1])
    assert pool.num_idle(pages) == 2 and pool.num_free == 2
    assert pool.take(2) == pages[1:]
    pool.check_integrity(held=pages)


def test_forgetting_makes_every_free_page_blank() -> None:
    pool = PagePool(4)
    evicted: list[int] = []
    pool.on_evict = evicted.append
    pages = pool.take(3)
    for page in pages:
        pool.keep(page)
    pool.release(pages[:2])
    pool.forget_kept()
    pool.release(pages[2:])
    pool.check_integrity(held=[])
    pool.take(3)
    assert evicted == []


@pytest.mark.parametrize("held", [[1], [1, 1, 2], [2, 3]])
def test_the_integrity_check_finds_wrong_holders(held: list[int]) -> None:
    pool = PagePool(4)
    assert pool.take(2) == [1, 2]
    with pytest.raises(AssertionError):
        pool.check_integrity(held)
