"""Where stages form a pipeline, the sequences of steps that overlap are not the same."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from jaxpaged.core.scheduler_output import SchedulerOutput

Make = Callable[..., Any]


def play(scheduler: Any, num_stages: int, num_steps: int) -> list[list[str]]:
    """The requests of each step, where as many steps as stages are in flight."""
    steps: list[list[str]] = []
    pending: deque[SchedulerOutput] = deque()
    for _ in range(num_steps):
        output = scheduler.schedule()
        steps.append([item.sequence.request.request_id for item in output.sequences])
        pending.append(output)
        if len(pending) > num_stages:
            scheduler.take(pending.popleft())
    return steps


def test_half_of_the_sequences_are_in_each_half_of_the_steps(
    make_scheduler: Make, make_request: Make
) -> None:
    scheduler = make_scheduler(num_stages=2)
    for name in "abcde":
        scheduler.add(make_request(3, name))
    assert play(scheduler, 2, 6) == [["a", "b", "c"], ["d", "e"]] * 3


def test_fewer_sequences_than_stages_do_not_wait(make_scheduler: Make, make_request: Make) -> None:
    scheduler = make_scheduler(num_stages=3)
    scheduler.add(make_request(3, "a"))
    assert play(scheduler, 3, 4) == [["a"]] * 4
    scheduler.add(make_request(3, "b"))
    steps = play(scheduler, 3, 6)[2:]
    assert steps in ([["a"], ["b"]] * 2, [["b"], ["a"]] * 2)


def test_chunks_of_a_prompt_follow_each_other_at_once(
    make_scheduler: Make, make_request: Make
) -> None:
    scheduler = make_scheduler(num_stages=2, max_num_batched_tokens=8)
    scheduler.add(make_request(2, "a"))
    scheduler.add(make_request(30, "long"))
    found = play(scheduler, 2, 5)
    assert [("long" in step) for step in found] == [True] * 5 or found[0] == ["a"]
    assert sum("long" in step for step in found[:5]) >= 4
    assert sum("a" in step for step in found) >= 2


def test_steps_become_even_again(make_scheduler: Make, make_request: Make) -> None:
    scheduler = make_scheduler(num_stages=2)
    for name, length in (("a", 3), ("b", 3), ("c", 40), ("d", 40)):
        scheduler.add(make_request(3, name, max_tokens=length))
    steps = play(scheduler, 2, 14)
    assert steps[:2] == [["a", "b"], ["c", "d"]]
    assert steps[-4:] in ([["c"], ["d"]] * 2, [["d"], ["c"]] * 2)
