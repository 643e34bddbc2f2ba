from __future__ import annotations

from jaxpaged.page_keys import page_keys


def test_a_key_tells_all_that_comes_before():
    keys = page_keys(range(10), 4)
    assert len(keys) == 2 and keys == page_keys(range(8), 4)
    assert page_keys([9, 1, 2, 3, 4, 5, 6, 7], 4)[1] != keys[1]
    assert page_keys(range(10), 4, origin="salt")[0] != keys[0]
    assert page_keys([4, 5, 6, 7, 8], 4, keys[0]) == keys[1:]
