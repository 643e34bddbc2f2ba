"""Random workloads against a fake device that notices every wrong read.

The fake model's next token is a hash of the whole prefix. Its KV cells remember which prefix
they were computed from, so a query that would attend to a stale, foreign, missing or released
cell fails the test, and so does a token that differs from a plain loop's.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple
from zlib import crc32

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.core.request import Request
from jaxpaged.core.scheduler import ScheduledSequence, Scheduler, SchedulerConfig, SchedulerOutput
from jaxpaged.core.sequence import SequenceState
from jaxpaged.sampling_params import SamplingParams

VOCAB = 11
EOS, STOP_ID = 0, 1
STOP_STRING = (2, 3)  # what a detokenizer would find, some steps late


def extend(prefix: int, token: int) -> int:
    return hash((prefix, token))


def prefix_hashes(salt: str | None, tokens: list[int]) -> list[int]:
    """For every position the hash of what its cell depends on."""
    hashes, last = [], crc32(repr(salt).encode())
    for token in tokens:
        last = extend(last, token)
        hashes.append(last)
    return hashes


def sample(prefix: int, request: Request, index: int) -> int:
    return hash((prefix, request.seed, index)) % VOCAB


def ends_with_stop_string(request: Request, output: list[int]) -> bool:
    return bool(request.params.stop) and tuple(output[-2:]) == STOP_STRING


def plain_loop(request: Request, index: int, max_model_len: int) -> tuple[list[int], str]:
    """The outputs and finish reason of one choice, computed one token at a time."""
    params, output = request.params, []
    prefix = prefix_hashes(request.cache_salt, list(request.prompt_token_ids))[-1]
    while True:
        output.append(sample(prefix, request, index))
        prefix = extend(prefix, output[-1])
        ends = request.eos_token_ids | set(params.stop_token_ids)
        if output[-1] in ends and len(output) >= params.min_tokens:
            return output, "stop"
        if len(output) == params.max_tokens:
            return output, "length"
        if len(output) + len(request.prompt_token_ids) == max_model_len:
            return output, "length"
        if ends_with_stop_string(request, output):
            return output, "stop"


Holding = tuple[SequenceState, int]  # a sequence and one of its pages


class Cell(NamedTuple):
    group: int
    prefix: int
    guessed: bool  # the host did not know the token when the cell was computed
    writer: int
    sequence: SequenceState
    position: int

    @property
    def confirmed(self) -> bool:  # that the token is the sequence's, and not its last
        known = self.position < len(self.sequence.token_ids)
        return not self.guessed or (known and not self.sequence.finished)


@dataclass
class FakeDevice:
    """KV cells by (page, slot in the page), the last token by sequence slot."""

    config: SchedulerConfig
    cells: dict[tuple[int, int], Cell] = field(default_factory=dict)
    last_token: dict[int, int] = field(default_factory=dict)
    made: dict[SequenceState, dict[int, int]] = field(default_factory=dict)  # token by position
    steps: int = 0

    def cell_of(self, sequence: SequenceState, group: int, position: int) -> tuple[int, int]:
        page = sequence.block_tables[group][position // self.config.page_size]
        assert page != 0, "a position has no page"
        return page, position % self.config.page_size

    def run(self, output: SchedulerOutput, held: set[Holding]) -> list[int]:
        """Write all cells of the step, check all reads, sample.

        Args:
            held: pages that were in the same hands before this step.
        """
        self.steps += 1
        prefixes = [self.write(item, held) for item in output.sequences]
        for item, hashes in zip(output.sequences, prefixes, strict=True):
            self.check_reads(item, hashes)
        tokens = []
        for item, hashes in zip(output.sequences, prefixes, strict=True):
            if item.samples:
                token = sample(hashes[-1], item.sequence.request, item.sequence.index)
                tokens.append(token)
                self.last_token[item.slot] = token
                self.made.setdefault(item.sequence, {})[item.start + item.num_tokens] = token
        return tokens

    def write(self, item: ScheduledSequence, held: set[Holding]) -> list[int]:
        sequence, end = item.sequence, item.start + item.num_tokens
        tokens = sequence.token_ids[:end]
        known = len(tokens)
        if known < end:
            assert known >= end - 1 or item.num_tokens == 1, "only the last token may be unknown"
            tokens += [self.made[sequence][at] for at in range(known, end)]
            assert tokens[-1] == self.last_token[item.slot]
        hashes = prefix_hashes(sequence.request.cache_salt, tokens)
        for group in range(len(self.config.windows)):
            for position in range(item.start, end):
                cell = self.cell_of(sequence, group, position)
                others = {holder for holder, page in held if page == cell[0]} - {sequence}
                assert not others, "a page is written under the eyes of another owner"
                place = self.steps, sequence, position
                self.cells[cell] = Cell(group, hashes[position], position >= known, *place)
        return hashes

    def check_reads(self, item: ScheduledSequence, hashes: list[int]) -> None:
        for group, window in enumerate(self.config.windows):
            first = 0 if window is None else max(0, item.start - window + 1)
            for position in range(first, len(hashes)):
                cell = self.cells[self.cell_of(item.sequence, group, position)]
                assert cell[:2] == (group, hashes[position]), "a foreign or stale cell is read"


@dataclass
class Job:
    """A request and what becomes of it."""

    request: Request
    arrives: int  # step
    aborted_at: int | None
    outputs: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    prompt_rows: list[int] = field(default_factory=list)
    aborted: bool = False


class Simulation:
    """An engine loop around a scheduler and the fake device."""

    def __init__(
        self, config: SchedulerConfig, jobs: list[Job], overlap: bool, late: int, reset_at: int
    ) -> None:
        self.config = config
        self.scheduler = Scheduler(config)
        self.device = FakeDevice(config)
        self.jobs = {job.request.request_id: job for job in jobs}
        self.depth = config.num_stages if overlap else config.num_stages - 1
        self.late = late  # steps until the detokenizer's news arrive
        self.reset_at = reset_at  # step before which the prefix cache is emptied
        self.now = 0
        self.pending: deque[tuple[SchedulerOutput, list[int], int]] = deque()
        self.finishes: list[tuple[int, str, int, int]] = []
        self.order: dict[str, int] = {}

    def run(self) -> None:
        last_event = max(max(job.arrives, job.aborted_at or 0) for job in self.jobs.values())
        choices = sum(job.request.params.n for job in self.jobs.values())
        deadline = last_event + 10 * (choices + 1) * self.config.max_model_len
        while self.now <= last_event or self.scheduler.has_unfinished or self.pending:
            assert self.now < deadline, "it does not come to an end"
            self.step()
            self.now += 1
        self.check_end()

    def step(self) -> None:
        self.deliver_messages()
        held = self.holdings()
        output = self.scheduler.schedule()
        self.check_output(output)
        tokens = self.device.run(output, held & self.holdings())
        if output.sequences:
            self.pending.append((output, tokens, self.device.steps))
        if self.pending and (len(self.pending) > self.depth or not output.sequences):
            self.collect(*self.pending.popleft())
        self.scheduler.check_integrity()
        self.check_cache()

    def deliver_messages(self) -> None:
        if self.now == self.reset_at:
            assert self.scheduler.reset_prefix_cache() == self.config.enable_prefix_caching
        for request_id, job in self.jobs.items():
            if job.arrives == self.now:
                self.scheduler.add(job.request)
                self.order[request_id] = len(self.order)
            if job.aborted_at == self.now:
                alive = self.scheduler.abort(request_id)
                assert all(s.finish_reason == "abort" and s.finished for s in alive)
                assert len(alive) + len(job.reasons) in (0, job.request.params.n)
                job.aborted = bool(alive)
                assert self.scheduler.abort(request_id) == []
        due = [finish for finish in self.finishes if finish[0] <= self.now]
        for _, request_id, index, num_tokens in due:
            sequence = self.scheduler.finish(request_id, index, num_tokens)
            if sequence is not None:
                assert len(sequence.output_token_ids) == num_tokens
                self.jobs[request_id].reasons[index] = "stop"
        self.finishes = [finish for finish in self.finishes if finish[0] > self.now]

    def collect(self, output: SchedulerOutput, tokens: list[int], writer: int) -> None:
        sampled = [item for item in output.sequences if item.samples]
        finished_before = [item.sequence.finished for item in sampled]
        lengths = [len(item.sequence.token_ids) for item in sampled]
        found = self.scheduler.update(output, tokens)
        for item, taken, was_finished, length, token in zip(
            sampled, found, finished_before, lengths, tokens, strict=True
        ):
            sequence = item.sequence
            if was_finished:
                assert taken is None and len(sequence.token_ids) == length
                assert sequence.finish_reason != "length", "a known end has no wasted row"
                continue
            assert taken is sequence and sequence.token_ids[length:] == [token]
            request = sequence.request
            job = self.jobs[request.request_id]
            seen = job.outputs.setdefault(sequence.index, [])
            seen.append(token)
            if sequence.finish_reason is not None:
                assert sequence.finished
                assert (sequence.stop_reason == STOP_ID) == (token == STOP_ID != EOS) or (
                    sequence.finish_reason == "length"
                )
                job.reasons[sequence.index] = sequence.finish_reason
            if ends_with_stop_string(request, seen):
                news = (self.now + self.late, request.request_id, sequence.index, len(seen))
                self.finishes.append(news)

    def alive(self) -> list[SequenceState]:
        return [s for choices in self.scheduler._alive.values() for s in choices.values()]

    def holdings(self) -> set[Holding]:
        return {
            (s, page) for s in self.alive() for table in s.block_tables for page in table if page
        }

    def check_output(self, output: SchedulerOutput) -> None:
        items, config = output.sequences, self.config
        assert output.num_tokens == sum(item.num_tokens for item in items)
        assert output.num_tokens <= config.max_num_batched_tokens
        assert len(items) <= config.max_num_seqs
        single = [item.num_tokens == 1 for item in items]
        assert single == sorted(single, reverse=True), "decodes come first"
        assert all(item.num_tokens >= 1 for item in items)
        running = [s for s in self.alive() if s.slot >= 0]
        assert len({s.slot for s in running}) == len(running) == self.scheduler.num_running
        assert all(0 <= s.slot < config.max_num_seqs for s in running)
        assert {id(item.sequence) for item in items} <= {id(s) for s in running}
        if output.admitted:
            assert not output.preempted
            waiting = [s.key for s in self.scheduler._waiting]
            assert max(s.key for s in output.admitted) < min(waiting, default=(1 << 60,)), (
                "somebody overtook the head of the queue"
            )
        rows = 0
        for item in items:
            sequence = item.sequence
            end = item.start + item.num_tokens
            assert sequence.num_computed == end
            wanted = sequence.request.params.prompt_logprobs is not None
            if not config.enable_chunked_prefill and not wanted:
                assert item.samples, "an unchunked prompt is computed at once"
            rows += item.num_prompt_logprob_rows
            positions = range(
                item.prompt_logprob_start,
                item.prompt_logprob_start + item.num_prompt_logprob_rows,
            )
            assert all(item.start <= p < end for p in positions)
            self.jobs[sequence.request.request_id].prompt_rows += positions
        assert rows <= config.max_prompt_logprob_rows

    def check_cache(self) -> None:
        """No cell of a cached page was computed from a token that nobody has confirmed."""
        if self.scheduler.pages.cache is None:
            return
        in_flight = {writer for _, _, writer in self.pending}
        for page in self.scheduler.pages.cache._keys:
            for slot in range(self.config.page_size):
                cell = self.device.cells[page, slot]
                assert cell.confirmed or cell.writer not in in_flight, "published too early"

    def check_end(self) -> None:
        scheduler = self.scheduler
        assert scheduler.num_running == scheduler.num_waiting == 0
        assert scheduler.num_queued_requests == scheduler.num_queued_tokens == 0
        assert not (scheduler._alive or scheduler._unforked or scheduler._queued)
        assert scheduler.pages.pool.num_free == self.config.num_pages - 1, "pages leak"
        assert len(scheduler._free_slots) == self.config.max_num_seqs, "slots leak"
        for job in self.jobs.values():
            request = job.request
            if request.params.prompt_logprobs is not None and not job.aborted:
                assert job.prompt_rows == list(range(len(request.prompt_token_ids) - 1))
            for index in range(request.params.n):
                expected, reason = plain_loop(request, index, self.config.max_model_len)
                seen = job.outputs.get(index, [])
                assert seen[: len(expected)] == expected[: len(seen)]
                if not job.aborted:
                    assert len(seen) >= len(expected)
                    if len(seen) == len(expected):
                        assert job.reasons[index] == reason


@st.composite
def configs(draw: st.DrawFn) -> SchedulerConfig:
    page_size = draw(st.sampled_from([1, 2, 4]))
    max_model_len = draw(st.integers(8, 40))
    groups = draw(st.lists(st.sampled_from([None, 1, 2, 3, 5, 9]), min_size=1, max_size=3))
    chunked = draw(st.booleans())
    budget = draw(st.integers(1, 24)) if chunked else max_model_len + draw(st.integers(0, 8))
    settings = {
        "page_size": page_size,
        "windows": tuple(groups),
        "max_num_seqs": draw(st.integers(1, 5)),
        "max_num_batched_tokens": budget,
        "max_model_len": max_model_len,
        "long_prefill_token_threshold": draw(st.sampled_from([0, 0, 3])),
        "enable_prefix_caching": draw(st.booleans()),
        "enable_chunked_prefill": chunked,
        "policy": draw(st.sampled_from(["fcfs", "priority"])),
        "max_prompt_logprob_rows": draw(st.integers(1, 6)),
        "num_stages": draw(st.sampled_from([1, 1, 2, 3])),
    }
    fewest = min_pages(settings)
    return SchedulerConfig(num_pages=fewest + draw(st.integers(0, fewest)), **settings)


def min_pages(settings: dict) -> int:
    """The smallest pool that the settings allow."""
    num_pages = 2
    while True:
        try:
            SchedulerConfig(num_pages=num_pages, **settings)
        except ValueError:
            num_pages += 1
        else:
            return num_pages


@st.composite
def job_lists(draw: st.DrawFn, max_model_len: int) -> list[Job]:
    jobs = []
    stem = random.Random(draw(st.integers(0, 3))).choices(range(VOCAB), k=max_model_len)
    for number in range(draw(st.integers(1, 7))):
        shared = draw(st.integers(0, max_model_len - 2))
        tail = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6))
        prompt = (stem[:shared] + tail)[: max_model_len - 1]
        max_tokens = draw(st.one_of(st.none(), st.integers(1, 20)))
        params = SamplingParams(
            n=draw(st.sampled_from([1, 1, 1, 2, 3])),
            max_tokens=max_tokens,
            min_tokens=draw(st.integers(0, min(3, max_tokens or 3))),
            stop=draw(st.sampled_from([(), ("stop",)])),
            stop_token_ids=draw(st.sampled_from([(), (STOP_ID,)])),
            prompt_logprobs=draw(st.sampled_from([None, None, None, 1])),
            skip_reading_prefix_cache=draw(st.sampled_from([None, None, True])),
            priority=draw(st.integers(0, 2)),
        )
        request = Request(
            request_id=f"request {number}",
            prompt_token_ids=tuple(prompt),
            params=params,
            seed=draw(st.integers(0, 1)),
            eos_token_ids=draw(st.sampled_from([frozenset(), frozenset({EOS})])),
            cache_salt=draw(st.sampled_from([None, None, None, "pepper"])),
        )
        arrives = draw(st.integers(0, 12))
        patience = draw(st.one_of(st.none(), st.none(), st.integers(0, 15)))
        jobs.append(Job(request, arrives, None if patience is None else arrives + patience))
    return jobs


@settings(max_examples=600, deadline=None, derandomize=True)
@given(data=st.data(), overlap=st.booleans(), late=st.integers(0, 3), reset_at=st.integers(0, 60))
def test_any_workload_gives_the_tokens_of_a_plain_loop(
    data: st.DataObject, overlap: bool, late: int, reset_at: int
) -> None:
    config = data.draw(configs())
    jobs = data.draw(job_lists(config.max_model_len))
    Simulation(config, jobs, overlap, late, reset_at).run()
