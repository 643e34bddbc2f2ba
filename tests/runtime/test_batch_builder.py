"""What a step's words say, against what the scheduler decided, item by item."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.core.buckets import MAX_PROMPT_LOGPROB_ROWS, Buckets
from jaxpaged.core.request import Request
from jaxpaged.core.scheduler import Scheduler
from jaxpaged.core.scheduler_config import SchedulerConfig
from jaxpaged.core.scheduler_output import SchedulerOutput
from jaxpaged.runtime.batch_builder import BatchBuilder, StepInput
from jaxpaged.runtime.slot_table import SlotTable
from jaxpaged.runtime.step import NO_ENTRY, StepShapes
from jaxpaged.sampling_params import SamplingParams

SEQS, TOKENS, PAGE, VOCAB = 4, 32, 4, 100
BUCKETS = Buckets(SEQS, TOKENS, "gpu")
SHAPES = StepShapes(
    num_groups=2,
    max_num_seqs=SEQS,
    pages_per_seq=16,
    page_size=PAGE,
    max_rows=SEQS + MAX_PROMPT_LOGPROB_ROWS,
    vocab=VOCAB,
)


class Thorough(BatchBuilder):
    """Takes no step for one that the device makes for itself without having packed it."""

    def _goes_on(self, output: SchedulerOutput) -> bool:
        return False


class Host:
    """A scheduler and what packs its steps, one step ahead of the tokens."""

    def __init__(self, num_pages: int = 200) -> None:
        config = SchedulerConfig(
            page_size=PAGE,
            num_pages=num_pages,
            windows=(None, 8),
            max_num_seqs=SEQS,
            max_num_batched_tokens=TOKENS,
            max_model_len=64,
        )
        self.scheduler = Scheduler(config)
        self.slots = SlotTable(SEQS, VOCAB)
        self.builder = BatchBuilder(SHAPES, BUCKETS, self.slots)
        self.tables: dict[int, int] = {}  # index in the flattened tables -> page
        self.num_requests = 0

    def add(self, prompt_len: int, **params: Any) -> None:
        draw = np.random.default_rng(self.num_requests)
        self.num_requests += 1
        request = Request(
            request_id=str(self.num_requests),
            prompt_token_ids=tuple(draw.integers(0, VOCAB, prompt_len).tolist()),
            params=SamplingParams(temperature=0, **params),
            seed=0,
        )
        self.scheduler.add(request)

    def step(self) -> tuple[SchedulerOutput, StepInput]:
        scheduled = self.scheduler.schedule()
        self.builder.admit(scheduled.admitted)
        self.slots.admit(scheduled.admitted)
        return scheduled, self.builder.step(scheduled)

    def take(self, scheduled: SchedulerOutput) -> None:
        self.scheduler.update(scheduled, [7 for item in scheduled.sequences if item.samples])

    def check(self, scheduled: SchedulerOutput, step: StepInput) -> None:
        assert step.words_X is not None and step.sampling is not None
        views = SHAPES.forward_packing(step.bucket).views(step.words_X[SHAPES.forward_offset :])
        tokens, positions, owners, starts, rows, scored = [], [], [], [], [], []
        for b, item in enumerate(scheduled.sequences):
            starts.append(len(tokens))
            known = item.sequence.token_ids
            for position in range(item.start, item.start + item.num_tokens):
                if position in item.prompt_logprob_positions:
                    scored.append(len(tokens))
                tokens.append(known[position] if position < len(known) else -1 - item.slot)
                positions.append(position)
                owners.append(b)
            if item.samples:
                rows.append(len(tokens) - 1)
        num_seqs, num_tokens = len(starts), len(tokens)
        assert views["token_T"][:num_tokens].tolist() == tokens
        assert views["position_T"][:num_tokens].tolist() == positions
        assert views["seq_T"][:num_tokens].tolist() == owners
        assert set(views["seq_T"][num_tokens:].tolist()) <= {step.bucket.num_seqs - 1}
        assert views["query_start_B1"][:num_seqs].tolist() == starts
        assert set(views["query_start_B1"][num_seqs:].tolist()) == {num_tokens}
        assert views["slot_B"][:num_seqs].tolist() == [i.slot for i in scheduled.sequences]
        assert set(views["slot_B"][num_seqs:].tolist()) <= {SHAPES.null_slot}
        ends = [item.start + item.num_tokens for item in scheduled.sequences]
        assert views["kv_len_B"][:num_seqs].tolist() == ends
        assert views["row_R"][: len(rows) + len(scored)].tolist() == rows + scored
        assert views["num_seqs"] == num_seqs
        assert views["num_decodes"] == sum(item.num_tokens == 1 for item in scheduled.sequences)
        assert [row.position for row in step.sampling.prompt_rows] == [
            position + 1
            for item in scheduled.sequences
            for position in item.prompt_logprob_positions
        ]
        for index_X, page_X in [
            *step.table_uploads,
            (views["table_index_X"], views["table_page_X"]),
        ]:
            self.tables |= dict(zip(index_X.tolist(), page_X.tolist(), strict=True))
        self.tables.pop(NO_ENTRY, None)
        for item in scheduled.sequences:
            for group, table in enumerate(item.sequence.block_tables):
                base = SHAPES.table_index(group, item.slot, 0)
                there = [self.tables[base + column] for column in range(len(table))]
                assert all(page in (0, has) for page, has in zip(table, there, strict=True))


def test_decodes_chunks_and_scored_prompts_side_by_side() -> None:
    host = Host()
    host.add(5, max_tokens=20)
    before, step = host.step()
    host.check(before, step)
    host.add(1, max_tokens=20)
    host.add(9, max_tokens=20, prompt_logprobs=0)
    host.add(30, max_tokens=20)
    kinds = set()
    for _ in range(12):
        scheduled, step = host.step()
        if step.words_X is not None:
            host.check(scheduled, step)
        kinds.add((step.bucket.decode_only, step.words_X is None, bool(step.sampling.prompt_rows)))
        host.take(before)
        before = scheduled
    mixed, decodes, steady = (False, False), (True, False), (True, True)
    assert kinds == {(*mixed, True), (*mixed, False), (*decodes, False), (*steady, False)}


def test_steady_decodes_go_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And are packed no more often."""
    host = Host()
    host.add(4 * PAGE, max_tokens=40)
    before, _ = host.step()
    told, packed = [], []
    pack = host.builder._new_step
    monkeypatch.setattr(host.builder, "_new_step", lambda x: packed.append(x) or pack(x))
    for _ in range(2 * PAGE):
        scheduled, step = host.step()
        told.append(step.words_X is not None)
        assert len(packed) == sum(told)
        host.take(before)
        before = scheduled
    new_page = [True] + [False] * (PAGE - 1)
    assert told == 2 * new_page


def contents(step: StepInput) -> tuple[Any, ...]:
    """What can be compared of a step's input."""
    words, sampling = step.words_X, step.sampling
    uploads = [(index_X.tolist(), page_X.tolist()) for index_X, page_X in step.table_uploads]
    rows: tuple[Any, ...] = ()
    if sampling is not None:
        own = [*map(id, sampling.sampled)], sampling.slots.tolist(), sampling.prompt_rows
        rows = sampling.num_rows, sampling.variant, sampling.embeds, *own
    return step.bucket, None if words is None else words.tolist(), uploads, rows


ACTIONS = st.lists(
    st.one_of(
        st.tuples(
            st.integers(1, 20),
            st.fixed_dictionaries(
                {"max_tokens": st.integers(2, 30)},
                optional={
                    "logprobs": st.just(1),
                    "min_tokens": st.just(2),
                    "prompt_logprobs": st.just(0),
                },
            ),
        ),
        st.sampled_from(["abort", "late", *["step"] * 20]),
    ),
    min_size=20,
    max_size=60,
)


@settings(max_examples=50, deadline=None)
@given(ACTIONS, st.sampled_from([40, 200]))
def test_what_is_not_packed_would_have_been_what_the_device_has(
    actions: list[Any], num_pages: int
) -> None:
    """Requests that come, end, are aborted and preempted, tokens that are a step late or not."""
    host = Host(num_pages)
    thorough = Thorough(SHAPES, BUCKETS, host.slots)
    before: list[SchedulerOutput] = []
    late = 1
    for action in actions:
        if action == "late":
            late = 1 - late
        elif action == "abort":
            host.scheduler.abort(str(host.num_requests))
        elif action != "step":
            prompt_len, params = action
            host.add(prompt_len, **params)
        else:
            scheduled = host.scheduler.schedule()
            for builder in (host.builder, thorough):
                builder.admit(scheduled.admitted)
            host.slots.admit(scheduled.admitted)
            if scheduled.sequences:
                found, want = (contents(x.step(scheduled)) for x in (host.builder, thorough))
                assert found == want
                np.testing.assert_array_equal(host.builder._on_device, thorough._on_device)
                before.append(scheduled)
            while len(before) > (late if scheduled.sequences else 0):
                host.take(before.pop(0))


@pytest.mark.parametrize("least", [0, 3])
def test_too_few_tokens_want_a_mask(least: int) -> None:
    host = Host()
    host.add(5, max_tokens=20)
    host.add(5, max_tokens=20, min_tokens=least)
    variants = []
    for _ in range(5):
        scheduled, step = host.step()
        variants.append(step.sampling.variant)
        host.take(scheduled)
    assert variants == ["full"] * least + ["greedy"] * (5 - least)
