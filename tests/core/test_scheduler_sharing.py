"""What sequences share: prefixes, the prompt of several choices; and the rows of the prompt."""

from collections.abc import Callable
from typing import Any

import pytest

from jaxpaged.core.request import Request
from jaxpaged.core.scheduler_output import SchedulerOutput

EOS = 7
MakeRequest = Callable[..., Request]
MakeScheduler = Callable[..., Any]


def plan(output: SchedulerOutput) -> dict[tuple[str, int], tuple[int, int]]:
    """(request id, choice) -> (start, tokens)."""
    return {
        (item.sequence.request.request_id, item.sequence.index): (item.start, item.num_tokens)
        for item in output.sequences
    }


# -- prefix cache -----------------------------------------------------------------------------


def test_a_prompt_is_shared_within_the_very_step_that_computes_it(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler()
    prompt = list(range(11))
    scheduler.add(make_request(prompt, "a"))
    scheduler.add(make_request(prompt, "b"))
    output = scheduler.step()
    assert plan(output) == {("a", 0): (0, 11), ("b", 0): (8, 3)}
    a, b = (item.sequence for item in output.sequences)
    assert a.block_tables[0][:2] == b.block_tables[0][:2]
    assert a.block_tables[0][2] != b.block_tables[0][2]
    assert (a.num_cached_tokens, b.num_cached_tokens) == (0, 8)
    assert (scheduler.prefix_cache_queries, scheduler.prefix_cache_hits) == (22, 8)


def test_generated_tokens_are_found_by_the_next_turn(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request([1, 2, 3, 4, 5], "a", max_tokens=8))
    for token in range(10, 18):
        scheduler.step(token)
    assert not scheduler.has_unfinished
    scheduler.add(make_request([1, 2, 3, 4, 5, *range(10, 18), 99], "b"))
    # 12 tokens were computed; the thirteenth was only sampled.
    assert plan(scheduler.step()) == {("b", 0): (12, 2)}


def test_a_wasted_row_is_not_published(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request([1, 2, 3], "a", eos_token_ids=frozenset({EOS})))
    first = scheduler.schedule()
    wasted = scheduler.schedule()
    scheduler.take(first, EOS)
    scheduler.take(wasted, 8)
    scheduler.add(make_request([1, 2, 3, EOS, 8], "b"))
    assert plan(scheduler.step()) == {("b", 0): (0, 5)}


@pytest.mark.parametrize(
    ("settings", "fields"),
    [
        ({"enable_prefix_caching": False}, {}),
        ({}, {"skip_reading_prefix_cache": True}),
        ({}, {"prompt_logprobs": 0}),
        ({}, {"cache_salt": "other"}),
    ],
)
def test_who_does_not_read_the_cache(
    make_scheduler: MakeScheduler,
    make_request: MakeRequest,
    settings: dict[str, Any],
    fields: dict[str, Any],
) -> None:
    scheduler = make_scheduler(**settings)
    scheduler.add(make_request(list(range(9)), "a"))
    scheduler.step()
    scheduler.add(make_request(list(range(9)), "b", **fields))
    assert plan(scheduler.step())["b", 0] == (0, 9)
    assert scheduler.prefix_cache_hits == 0


def test_who_does_not_read_the_cache_still_writes_it(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request(list(range(9)), "a", prompt_logprobs=0))
    scheduler.add(make_request(list(range(9)), "b", n=2))
    output = scheduler.step()
    assert plan(output) == {("a", 0): (0, 9), ("b", 0): (8, 1), ("b", 1): (8, 1)}
    assert [item.sequence.num_cached_tokens for item in output.sequences] == [8, 8, 0]


def test_resets_and_new_weights(make_scheduler: MakeScheduler, make_request: MakeRequest) -> None:
    assert not make_scheduler(enable_prefix_caching=False).reset_prefix_cache()
    scheduler = make_scheduler()
    starts = []
    for change in (None, None, lambda: scheduler.set_weight_version(2), None):
        if change:
            change()
        scheduler.add(make_request(list(range(9)), "a", max_tokens=1))
        starts.append(scheduler.step().sequences[0].start)
    assert scheduler.reset_prefix_cache()
    scheduler.add(make_request(list(range(9)), "a", max_tokens=1))
    starts.append(scheduler.step().sequences[0].start)
    assert starts == [0, 8, 0, 8, 0]


# -- prompt log-probabilities -----------------------------------------------------------------


def rows(output: SchedulerOutput, request_id: str) -> list[int]:
    return [
        row
        for item in output.sequences
        if item.sequence.request.request_id == request_id
        for row in range(
            item.prompt_logprob_start, item.prompt_logprob_start + item.num_prompt_logprob_rows
        )
    ]


def test_prompt_rows_are_spread_over_steps(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler(max_prompt_logprob_rows=5)
    scheduler.add(make_request(9, "a", prompt_logprobs=1))
    scheduler.add(make_request(5, "b", prompt_logprobs=1, n=2))
    scheduler.add(make_request(5, "c"))
    output = scheduler.step()
    assert plan(output) == {("a", 0): (0, 5)}, "no row is left for b, and c may not overtake"
    output = scheduler.step()
    assert plan(output) == {("a", 0): (5, 4), ("b", 0): (0, 2), ("c", 0): (0, 5)}
    assert rows(output, "a") == [5, 6, 7] and rows(output, "b") == [0, 1]
    output = scheduler.step()
    assert plan(output)["b", 0] == (2, 3)
    assert plan(output)["b", 1] == (4, 1), "the other choice has no rows of its own"
    assert rows(output, "a") == [] and rows(output, "b") == [2, 3]


def test_a_preemption_repeats_no_prompt_row(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler(num_pages=7, max_model_len=24, max_num_batched_tokens=16)
    scheduler.add(make_request(8, "a", max_tokens=3))
    scheduler.add(make_request(list(range(16)), "b", prompt_logprobs=1))
    assert rows(scheduler.step(), "b") == list(range(8))
    output = scheduler.step()
    assert [s.request.request_id for s in output.preempted] == ["b"]
    scheduler.step()
    output = scheduler.step()
    assert plan(output) == {("b", 0): (0, 16)}, "the cache is not read before all rows are there"
    assert rows(output, "b") == list(range(8, 15))


# -- several choices --------------------------------------------------------------------------


def test_choices_share_full_prompt_pages_and_recompute_the_last(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler(
        windows=(None, 3), enable_prefix_caching=False, max_num_batched_tokens=7
    )
    scheduler.add(make_request(10, "a", n=3))
    scheduler.add(make_request(2, "b"))
    assert plan(scheduler.step()) == {("a", 0): (0, 7)}
    output = scheduler.step()
    assert plan(output) == {("a", 0): (7, 3), ("a", 1): (8, 2), ("a", 2): (8, 2)}
    first, second, third = (item.sequence for item in output.sequences)
    assert first.block_tables[0][:2] == second.block_tables[0][:2] == third.block_tables[0][:2]
    assert second.block_tables[1][:2] == [0, first.block_tables[1][1]]
    assert len({s.block_tables[0][2] for s in (first, second, third)}) == 3
    assert plan(scheduler.step())["b", 0] == (0, 2)


def test_choices_hold_their_place_in_the_queue(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    scheduler.add(make_request(10, "a", n=3, max_tokens=2))
    scheduler.add(make_request(2, "b"))
    assert plan(scheduler.step()) == {("a", 0): (0, 10), ("a", 1): (8, 2)}
    assert scheduler.num_waiting == 2
    scheduler.step()
    output = scheduler.step()
    assert list(plan(output)) == [("a", 2), ("b", 0)]


def test_waiting_choices_lose_their_pages_rather_than_block_the_head(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler(num_pages=7, max_model_len=24, max_num_seqs=1, policy="priority")
    scheduler.add(make_request(17, "a", n=2, max_tokens=1))
    scheduler.step()
    # Nothing runs, the other choice of a holds four of six pages, and b, more urgent, wants four.
    assert (scheduler.num_running, scheduler.pages.pool.num_free) == (0, 2)
    scheduler.add(make_request(16, "b", priority=-1, max_tokens=1))
    assert plan(scheduler.step()) == {("b", 0): (0, 16)}
    assert list(plan(scheduler.step())) == [("a", 1)]
    assert not scheduler.has_unfinished
