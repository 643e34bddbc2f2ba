"""Which cards each engine's process sees."""

from __future__ import annotations

import pytest

from jaxpaged.engine.core_fleet import split_devices


def test_each_engine_gets_cards_of_its_own():
    assert split_devices(None, 8, 2, 4) == ["0,1,2,3", "4,5,6,7"]
    assert split_devices("5, 3,GPU-a", 8, 3, 1) == ["5", "3", "GPU-a"]
    assert split_devices("7,6,1,0", 8, 2, 2) == ["7,6", "1,0"]


def test_one_engine_sees_what_there_is_and_without_cards_there_is_nothing_to_split():
    assert split_devices("2,3", 8, 1, 2) == [None]
    assert split_devices(None, 0, 3, 2) == [None] * 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "needs 4 GPUs, and this machine has 2"),
        ("0", "and CUDA_VISIBLE_DEVICES names 1"),
        ("0,-1,1,0", "and CUDA_VISIBLE_DEVICES names 1"),
        ("0,,1", "and CUDA_VISIBLE_DEVICES names 1"),
        ("", "and CUDA_VISIBLE_DEVICES names 0"),
    ],
)
def test_too_few_cards(given: str | None, message: str):
    with pytest.raises(ValueError, match=message):
        split_devices(given, 2, 2, 2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("0,0", "CUDA_VISIBLE_DEVICES=0,0 names card 0 twice"),
        ("GPU-a,1,GPU-a", "names card GPU-a twice"),
        ("7,8,9", "names card 8, and this machine has 8: 0 to 7"),
    ],
)
def test_cards_that_no_engine_can_have(given: str, message: str):
    with pytest.raises(ValueError, match=message):
        split_devices(given, 8, 2, 1)


def test_what_follows_an_end_is_not_looked_at():
    assert split_devices("1,0,-1,0,99", 2, 2, 1) == ["1", "0"]
