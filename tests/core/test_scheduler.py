import logging
from collections.abc import Callable
from typing import Any

import pytest

from jaxpaged.core.request import Request
from jaxpaged.core.scheduler import QueueFullError, SchedulerConfig
from jaxpaged.core.scheduler_output import SchedulerOutput
from jaxpaged.core.sequence import SequenceState, Status

EOS = 7
MakeRequest = Callable[..., Request]
MakeScheduler = Callable[..., Any]


def plan(output: SchedulerOutput) -> dict[tuple[str, int], tuple[int, int]]:
    """(request id, choice) -> (start, tokens)."""
    return {
        (item.sequence.request.request_id, item.sequence.index): (item.start, item.num_tokens)
        for item in output.sequences
    }


def only(output: SchedulerOutput) -> SequenceState:
    assert len(output.sequences) == 1
    return output.sequences[0].sequence


# -- chunks and budget ------------------------------------------------------------------------


def test_decodes_come_first_and_the_budget_is_shared_in_order(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10)
    scheduler.add(make_request(25, "a"))
    assert plan(scheduler.step()) == {("a", 0): (0, 10)}
    scheduler.add(make_request(6, "b"))
    scheduler.add(make_request(6, "c"))
    assert plan(scheduler.step()) == {("a", 0): (10, 10)}
    output = scheduler.step()
    assert plan(output) == {("a", 0): (20, 5), ("b", 0): (0, 5)}
    assert [item.samples for item in output.sequences] == [True, False]
    output = scheduler.step()
    assert list(plan(output).items()) == [
        (("a", 0), (25, 1)),
        (("b", 0), (5, 1)),
        (("c", 0), (0, 6)),
    ]
    assert output.num_tokens == 8
    assert [s.request.request_id for s in output.admitted] == ["c"]


def test_a_long_prompt_takes_no_more_than_the_threshold(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler(long_prefill_token_threshold=8)
    scheduler.add(make_request(20, "a"))
    scheduler.add(make_request(5, "b"))
    assert plan(scheduler.step()) == {("a", 0): (0, 8), ("b", 0): (0, 5)}
    assert plan(scheduler.step()) == {("a", 0): (8, 8), ("b", 0): (5, 1)}


def test_unchunked_prompts_wait_for_a_step_with_room(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler(enable_chunked_prefill=False, max_num_batched_tokens=64)
    scheduler.add(make_request(40, "a"))
    scheduler.add(make_request(30, "b"))
    scheduler.add(make_request(3, "c"))
    assert plan(scheduler.step()) == {("a", 0): (0, 40)}, "c must not overtake b"
    assert plan(scheduler.step()) == {("a", 0): (40, 1), ("b", 0): (0, 30), ("c", 0): (0, 3)}


def test_slots_are_stable_and_used_again(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abc":
        scheduler.add(make_request(4, name, max_tokens=30))
    slots = {item.sequence.request.request_id: item.slot for item in scheduler.step().sequences}
    assert sorted(slots) == ["a", "b"] and sorted(slots.values()) == [0, 1]
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)
    scheduler.abort("a")
    output = scheduler.step()
    assert {item.sequence.request.request_id: item.slot for item in output.sequences} == {
        "b": slots["b"],
        "c": slots["a"],
    }


# -- how sequences end ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "token", "reason", "stop_reason"),
    [
        ({"eos_token_ids": frozenset({EOS})}, EOS, "stop", None),
        ({"stop_token_ids": (5,)}, 5, "stop", 5),
        ({"eos_token_ids": frozenset({EOS}), "stop_token_ids": (EOS,)}, EOS, "stop", None),
        ({"eos_token_ids": frozenset({EOS}), "max_tokens": 1}, EOS, "stop", None),
        ({"max_tokens": 1}, EOS, "length", None),
        ({"eos_token_ids": frozenset({EOS}), "min_tokens": 2}, EOS, None, None),
        ({"stop_token_ids": (5,), "min_tokens": 1}, 5, "stop", 5),
    ],
)
def test_reasons(
    make_scheduler: MakeScheduler,
    make_request: MakeRequest,
    fields: dict[str, Any],
    token: int,
    reason: str | None,
    stop_reason: int | None,
) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request(4, **fields))
    output = scheduler.schedule()
    (taken,) = scheduler.take(output, token)
    assert taken is only(output) and taken.output_token_ids == [token]
    assert (taken.finish_reason, taken.stop_reason) == (reason, stop_reason)
    assert scheduler.has_unfinished == (reason is None)
    assert (only(output).status is Status.FINISHED) == (reason is not None)


def test_max_model_len_ends_a_sequence(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler(max_model_len=6)
    scheduler.add(make_request(4, max_tokens=None))
    first = scheduler.step()
    scheduler.step()
    assert only(first).finish_reason == "length" and len(only(first).token_ids) == 6


def test_a_known_end_wastes_no_row_and_an_unknown_one_wastes_one(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request(4, "long", max_tokens=2))
    scheduler.add(make_request(4, "ends", eos_token_ids=frozenset({EOS})))
    outputs = [scheduler.schedule(), scheduler.schedule()]
    assert [item.start for item in outputs[1].sequences] == [4, 4]
    taken = scheduler.update(outputs[0], [1, EOS])
    assert [sequence.finish_reason for sequence in taken if sequence] == [None, "stop"]
    assert not scheduler.schedule().sequences, "the last token of the other one is in flight"
    taken = scheduler.update(outputs[1], [2, 3])
    assert taken[1] is None and taken[0] is not None
    assert taken[0].finish_reason == "length"
    assert [item.sequence.output_token_ids for item in outputs[0].sequences] == [[1, 2], [EOS]]
    assert scheduler.pages.pool.num_free == 100


def test_a_stop_string_found_late_cuts_the_outputs(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request(4, "a"))
    sequence = only(scheduler.step(1))
    for token in (2, 3, 4):
        scheduler.step(token)
    in_flight = scheduler.schedule()
    assert scheduler.finish("a", 0, 2) is sequence
    assert sequence.output_token_ids == [1, 2] and sequence.finish_reason == "stop"
    assert scheduler.take(in_flight) == [None]
    assert scheduler.finish("a", 0, 2) is None
    assert not scheduler.has_unfinished and scheduler.pages.pool.num_free == 100


def test_abort_wherever_the_request_is(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(make_request(4, "runs", n=2))
    scheduler.add(make_request(4, "waits", n=3))
    in_flight = scheduler.schedule()
    assert [s.index for s in scheduler.abort("waits")] == [0, 1, 2]
    assert [s.finish_reason for s in scheduler.abort("runs")] == ["abort", "abort"]
    assert scheduler.abort("runs") == scheduler.abort("never seen") == []
    assert scheduler.take(in_flight) == [None]
    assert not scheduler.has_unfinished and scheduler.num_waiting == 0
    assert scheduler.pages.pool.num_free == 100


# -- the queue --------------------------------------------------------------------------------


def test_a_full_queue_refuses(make_scheduler: MakeScheduler, make_request: MakeRequest) -> None:
    scheduler = make_scheduler(max_num_seqs=1, max_num_queued_reqs=2, max_num_queued_tokens=20)
    scheduler.add(make_request(15, "a", n=2))
    with pytest.raises(QueueFullError, match="15 prompt tokens wait and 6 more .* limit is 20"):
        scheduler.add(make_request(6))
    scheduler.step()  # a runs, its second choice waits: nothing is queued any more
    scheduler.add(make_request(6, "b"))
    scheduler.add(make_request(6, "c"))
    with pytest.raises(QueueFullError, match="2 requests wait, the limit is 2"):
        scheduler.add(make_request(1))
    scheduler.abort("b")
    scheduler.add(make_request(1))
    assert (scheduler.num_queued_requests, scheduler.num_queued_tokens) == (2, 7)


def test_bad_requests_are_refused(make_scheduler: MakeScheduler, make_request: MakeRequest) -> None:
    scheduler = make_scheduler(max_model_len=8)
    scheduler.add(make_request(7, "a"))
    with pytest.raises(ValueError, match="'a' is in use"):
        scheduler.add(make_request(7, "a"))
    for length in (0, 8):
        with pytest.raises(ValueError, match=f"1 to 7 tokens, got {length}"):
            scheduler.add(make_request(length))


def test_limits_under_which_nothing_could_run_are_refused() -> None:
    settings: dict[str, Any] = {
        "page_size": 4,
        "windows": (None, 8),
        "max_num_seqs": 1,
        "max_num_batched_tokens": 8,
        "max_model_len": 64,
    }
    # 16 full pages; of the window 8 + 8 - 2 tokens and a page more, for it may begin anywhere.
    SchedulerConfig(num_pages=1 + 16 + 5, **settings)
    with pytest.raises(ValueError, match="max_model_len 64 needs 21 pages, the pool has 20"):
        SchedulerConfig(num_pages=1 + 16 + 4, **settings)
    with pytest.raises(ValueError, match=r"at least max_model_len \(64\), got 8"):
        SchedulerConfig(num_pages=100, enable_chunked_prefill=False, **settings)


def test_priorities_are_heard_only_when_asked_for(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    for policy, expected in (("fcfs", "abc"), ("priority", "bca")):
        scheduler = make_scheduler(policy=policy)
        for name, priority in (("a", 5), ("b", -1), ("c", 0)):
            scheduler.add(make_request(4, name, priority=priority))
        admitted = scheduler.step().admitted
        assert "".join(s.request.request_id for s in admitted) == expected


# -- preemption -------------------------------------------------------------------------------


def test_the_last_in_order_is_preempted_and_comes_back_with_its_token(
    make_scheduler: MakeScheduler, make_request: MakeRequest, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = make_scheduler(num_pages=8, max_model_len=24)
    for name, prompt_len in (("a", 8), ("b", 8), ("c", 12), ("d", 1)):
        scheduler.add(make_request(prompt_len, name))
    first = scheduler.schedule()
    c = first.sequences[2].sequence
    with caplog.at_level(logging.WARNING):
        output = scheduler.schedule()
    assert plan(output) == {("a", 0): (8, 1), ("b", 0): (8, 1)}
    assert output.preempted == (c,) and not output.admitted
    assert "request c choice 0 is preempted by RECOMPUTE" in caplog.text
    assert (c.num_in_flight, c.num_computed, c.status) == (1, 0, Status.WAITING)
    assert "12 computed tokens are dropped" in caplog.text
    scheduler.abort("b")
    assert not scheduler.schedule().admitted, "there is room, but its token is not known yet"
    scheduler.take(first, 1)
    assert c.output_token_ids == [1] and c.num_in_flight == 0
    output = scheduler.schedule()
    assert output.admitted == (c,), "it goes before d, which came later"
    assert plan(output)["c", 0] == (4, 9), "its first page was still cached"
    assert (scheduler.num_preemptions, c.num_preemptions) == (1, 1)
    assert c.num_cached_tokens == 0, "what its own pages saved is no prefix hit"


def test_the_least_urgent_is_preempted_under_priorities(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler(num_pages=7, max_model_len=24, policy="priority")
    for name, priority in (("a", 2), ("b", 1), ("c", 3)):
        scheduler.add(make_request(8, name, priority=priority))
    scheduler.step()
    output = scheduler.schedule()
    assert [s.request.request_id for s in output.preempted] == ["c"]
    assert list(plan(output)) == [("b", 0), ("a", 0)]


def test_a_sequence_preempts_itself_if_it_is_the_last(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler(num_pages=7, max_model_len=24)
    scheduler.add(make_request(10, "a", max_tokens=4))
    scheduler.add(make_request(12, "b"))
    scheduler.step()
    output = scheduler.schedule()
    assert plan(output) == {("a", 0): (10, 1)}
    assert [s.request.request_id for s in output.preempted] == ["b"]


def test_admission_waits_until_the_whole_prompt_fits(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler(num_pages=7, max_model_len=24, max_num_batched_tokens=8)
    scheduler.add(make_request(8, "a", max_tokens=3))
    scheduler.add(make_request(17, "b"))
    scheduler.add(make_request(1, "c"))
    scheduler.step()
    assert plan(scheduler.step()) == {("a", 0): (8, 1)}, "5 pages are wanted, 3 are free"
    assert plan(scheduler.step()) == {("a", 0): (9, 1)}
    assert plan(scheduler.step()) == {("b", 0): (0, 8)}


# -- windows ----------------------------------------------------------------------------------


def test_a_window_lets_go_of_what_no_query_sees(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler(windows=(None, 6), max_num_batched_tokens=8)
    scheduler.add(make_request(30, "a", max_tokens=30))
    sequence = only(scheduler.step())
    scheduler.step()
    # The chunk from 8 on sees 3 and later: page 0 stays.
    assert [page > 0 for page in sequence.block_tables[1]] == [True] * 4
    scheduler.step()
    # The chunk from 16 on sees 11 and later: pages 0 and 1 are gone.
    assert [page > 0 for page in sequence.block_tables[1]] == [False] * 2 + [True] * 4
    assert len(sequence.block_tables[0]) == 8, "full groups have room for the whole prompt"
    for _ in range(20):
        scheduler.step()
    assert sequence.finish_reason is None
    assert sum(page > 0 for page in sequence.block_tables[1]) <= 3
    assert all(sequence.block_tables[0])
