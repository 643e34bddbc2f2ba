"""Worker processes that may be lost without loss."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_server import eventually

from jaxpaged.engine import grammar_checker
from jaxpaged.engine.errors import BadRequestError, RequestFailedError
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
    running = [checker.submit(ENDLESS) for _ in range(2)]
    eventually(lambda: all(future.running() for future in running))
    with pytest.raises(RequestFailedError, match="wait to be compiled") as refused:
        checker.check(ENDLESS)
    assert refused.value.code == 503
    with pytest.raises(RequestFailedError, match="wait to be compiled"):
        asyncio.run(checker.checked(ENDLESS))
    assert checker.check(GOOD)  # remembered
    began = time.monotonic()
    checker.close()  # ends the workers, and with them the threads that wait for them
    assert all(worker._process is None for worker in checker._workers)
    assert time.monotonic() - began < 3


def test_who_waits_for_a_checker_that_closes(checker: GrammarChecker) -> None:
    checker.check(GOOD)

    async def wait() -> list[object]:
        loop = asyncio.get_running_loop()
        loop.call_later(0.3, checker.close)
        waits = [checker.checked(ENDLESS) for _ in range(4)]
        return await asyncio.gather(*waits, return_exceptions=True)

    failures = asyncio.run(wait())
    assert all(isinstance(failure, RequestFailedError) for failure in failures)
    with pytest.raises(RequestFailedError, match="shutting down"):
        checker.check(GOOD)


def test_the_clock_starts_with_the_work(
    tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_checker, "WORKERS", 1)
    monkeypatch.setattr(grammar_checker, "MAX_WAITING", 1)
    checker = GrammarChecker(tokenizer_folder / "tokenizer.json")
    checker.check(GOOD)
    monkeypatch.setattr(grammar_checker, "COMPILE_SECONDS", 2.0)
    monkeypatch.setattr(grammar_checker, "WAIT_SECONDS", 0.1)
    running = checker.submit(ENDLESS)
    eventually(running.running)

    async def leave() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(checker.checked(ENDLESS), 0.02)

    asyncio.run(leave())
    waiting = checker.submit(StructuredOutputs(choice=["a"]))  # in the place that is free again
    with pytest.raises(RequestFailedError, match="wait to be compiled"):
        checker.submit(ENDLESS)
    with pytest.raises(BadRequestError, match="takes more than"):
        running.result()
    assert waiting.result()
    checker.close()


def test_a_tokenizer_that_is_of_no_use(tmp_path: Path) -> None:
    checker = GrammarChecker(tmp_path / "tokenizer.json")
    checker.warm_up()
    with pytest.raises(BadRequestError, match=r"cannot use this model's tokenizer.*No such file"):
        checker.check(GOOD)
    checker.close()


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/n", "$defs": {"n": {"$ref": "#/$defs/n"}}},
        {"properties": {f"p{place}": {} for place in range(700)}},
        {"multipleOf": 3_000_001},
        "[",
    ],
)
def test_what_is_wrong_behind_thoughts(checker: GrammarChecker, schema: Any) -> None:
    before = 'before: text\ntext[suffix="</think>"]: /(?s:.*)/\n'
    assert checker.check(StructuredOutputs(json_object=True, before_json=before))
    with pytest.raises(BadRequestError):
        checker.check(StructuredOutputs(json=schema, before_json=before))
