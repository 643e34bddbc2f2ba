"""Worker processes that may be lost without loss."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_server import eventually

from jaxpaged.engine import grammar_checker
from jaxpaged.engine.errors import BadRequestError
from jaxpaged.engine.grammar_checker import GrammarChecker
from jaxpaged.sampling_params import StructuredOutputs

GOOD = StructuredOutputs(regex="[ab]")
ENDLESS = StructuredOutputs(  # 500 bytes, hours of work
    json={
        "allOf": [
            {"type": "integer", "multipleOf": p, "minimum": -(10**15), "maximum": 10**15}
            for p in (9973, 9967, 9949, 9941)
        ]
    }
)


@pytest.fixture
def checker(tokenizer_folder: Path) -> Iterator[GrammarChecker]:
    checker = GrammarChecker(tokenizer_folder / "tokenizer.json")
    checker.warm_up()
    yield checker
    checker.close()


def test_a_worker_is_killed_in_time_and_another_serves(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = checker.check(GOOD)
    assert "[ab]" in text
    monkeypatch.setattr(grammar_checker, "COMPILE_SECONDS", 0.3)
    slow = checker.submit(ENDLESS)
    assert checker.check(GOOD) == text  # remembered; the other worker is busy
    with pytest.raises(BadRequestError, match="takes more than"):
        slow.result()
    monkeypatch.undo()
    assert checker.check(StructuredOutputs(choice=["a"]))


def test_a_worker_that_dies_is_replaced(
    tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_checker, "WORKERS", 1)
    checker = GrammarChecker(tokenizer_folder / "tokenizer.json")
    slow = checker.submit(ENDLESS)
    eventually(lambda: checker._workers and checker._workers[0]._process)
    process = checker._workers[0]._process
    assert process is not None
    process.kill()
    with pytest.raises(BadRequestError, match="memory"):
        slow.result()
    assert checker.check(GOOD)
    checker.close()


def test_who_waits_too_long_is_told(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    checker.check(GOOD)
    monkeypatch.setattr(grammar_checker, "WAIT_SECONDS", 0.1)
    with pytest.raises(BadRequestError, match="takes more than"):
        checker.check(ENDLESS)
    began = time.monotonic()
    checker.close()  # ends the worker, and with it the thread that waits for it
    assert all(worker._process is None for worker in checker._workers)
    assert time.monotonic() - began < 3


def test_a_tokenizer_that_is_of_no_use(tmp_path: Path) -> None:
    checker = GrammarChecker(tmp_path / "tokenizer.json")
    checker.warm_up()
    with pytest.raises(BadRequestError, match=r"cannot use this model's tokenizer.*No such file"):
        checker.check(GOOD)
    checker.close()
