"""Decides what each step computes: admission, chunks, preemption, the end of sequences."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

from jaxpaged.core.page_allocator import PageAllocator
from jaxpaged.core.request import Request
from jaxpaged.core.scheduler_config import SchedulerConfig
from jaxpaged.core.scheduler_output import ScheduledSequence, SchedulerOutput, StepDraft
from jaxpaged.core.sequence import NO_SLOT, SequenceQueue, SequenceState, Status
from jaxpaged.core.turns import Turns

log = logging.getLogger(__name__)


class QueueFullError(Exception):
    """As many requests or tokens wait as the settings allow."""


class Scheduler:
    """Continuous batching over a pool of pages.

    It knows no prefill or decode phase, only tokens that are not computed yet. A step may be
    scheduled before the tokens of steps before it are known: they count as placeholders.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.pages = PageAllocator(
            num_pages=config.num_pages,
            page_size=config.page_size,
            windows=config.windows,
            max_chunk=config.max_chunk,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        self._page_size = config.page_size
        self.num_preemptions = 0
        self.prefix_cache_queries = 0  # tokens of prompts looked up
        self.prefix_cache_hits = 0  # tokens of prompts found
        self.num_queued_requests = 0  # never admitted yet
        self.num_queued_tokens = 0  # of their prompts
        self._arrivals = 0
        self._waiting = SequenceQueue()
        self._running = SequenceQueue()
        self._alive: dict[str, dict[int, SequenceState]] = {}  # request -> choice -> state
        self._unforked: dict[str, list[SequenceState]] = {}  # wait for choice 0 to do the prompt
        self._queued: set[str] = set()
        self._turns = Turns(config.num_stages, config.max_num_seqs)
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))

    @property
    def has_unfinished(self) -> bool:
        return bool(self._alive)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences in the queue, preempted ones included."""
        return len(self._waiting)

    @property
    def sequences(self) -> Iterator[SequenceState]:
        """Those that run, then those that wait."""
        return chain(self._running, self._waiting)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            QueueFullError: too many requests or prompt tokens wait already.
            ValueError: the id is in use, or the prompt is empty or leaves no room for a token.
        """
        prompt_len = len(request.prompt_token_ids)
        if request.request_id in self._alive:
            raise ValueError(f"request id {request.request_id!r} is in use")
        if not 0 < prompt_len < self.config.max_model_len:
            raise ValueError(
                f"a prompt must have 1 to {self.config.max_model_len - 1} tokens, got {prompt_len}"
            )
        self._check_queue(prompt_len)
        self._arrivals += 1
        request = replace(request, arrival=self._arrivals)
        params = request.params
        max_len = self.config.max_model_len
        if params.max_tokens is not None:
            max_len = min(max_len, prompt_len + params.max_tokens)
        priority = params.priority if self.config.policy == "priority" else 0
        choices = [
            SequenceState(
                request=request,
                index=index,
                key=(priority, request.arrival, index),
                max_len=max_len,
                token_ids=list(request.prompt_token_ids),
                block_tables=[[] for _ in self.config.windows],
            )
            for index in range(params.n)
        ]
        self._alive[request.request_id] = dict(enumerate(choices))
        if params.n > 1:
            self._unforked[request.request_id] = choices[1:]
        self._waiting.add(choices[0])
        self._queued.add(request.request_id)
        self.num_queued_requests += 1
        self.num_queued_tokens += prompt_len

    def abort(self, request_id: str) -> list[SequenceState]:
        """End a request, wherever it is; returns its choices that were alive."""
        sequences = list(self._alive.get(request_id, {}).values())
        for sequence in sequences:
            self._finish(sequence, "abort")
        return sequences

    def finish(self, request_id: str, index: int, num_tokens: int) -> SequenceState | None:
        """End a choice whose output number `num_tokens` completed a stop string.

        Returns:
            The choice, cut to that many outputs; None if it had ended before.
        """
        sequence = self._alive.get(request_id, {}).get(index)
        if sequence is not None:
            del sequence.token_ids[sequence.prompt_len + num_tokens :]
            self._finish(sequence, "stop")
        return sequence

    def schedule(self) -> SchedulerOutput:
        """Choose the next step; nothing may be left to do (no sequences)."""
        step = StepDraft(self.config.max_num_batched_tokens, self.config.max_prompt_logprob_rows)
        self._schedule_running(step)
        if not step.preempted:
            self._schedule_waiting(step)
        self._turns.end(step)
        return SchedulerOutput(
            sequences=(*step.single, *step.chunks),
            num_tokens=self.config.max_num_batched_tokens - step.tokens_left,
            preempted=tuple(step.preempted),
            admitted=tuple(step.admitted),
            extended=tuple(step.extended),
        )

    def update(self, output: SchedulerOutput, tokens: Sequence[int]) -> list[SequenceState | None]:
        """Take the tokens of a step, one for each scheduled sequence that samples, in order.

        Returns:
            Whose each token is; None where the sequence had ended before: drop that row.
        """
        sampled = [item.sequence for item in output.sequences if item.samples]
        taken: list[SequenceState | None] = []
        for sequence, token_id in zip(sampled, tokens, strict=True):
            if sequence.finish_reason is not None:
                taken.append(None)
                continue
            sequence.num_in_flight -= 1
            token_ids = sequence.token_ids
            token_ids.append(token_id)
            if token_id in sequence.ending_ids or len(token_ids) >= sequence.max_len:
                self._finish_by_token(sequence, token_id)
            taken.append(sequence)
        return taken

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix; False if prefix caching is off."""
        if self.pages.cache is None:
            return False
        self.pages.cache.reset()
        return True

    @property
    def prefix_cache_epoch(self) -> int:
        """Another number than before: what was cached then serves no new sequence."""
        return 0 if self.pages.cache is None else self.pages.cache.epoch

    def set_weight_version(self, version: object) -> None:
        """The weights changed: what they computed before serves no new sequence."""
        if self.pages.cache is not None:
            self.pages.cache.set_weight_version(version)

    def check_integrity(self) -> None:
        """Check that every page is accounted for; for tests and debugging.

        Raises:
            AssertionError: a page leaks or is in the wrong hands.
        """
        alive = [s for choices in self._alive.values() for s in choices.values()]
        self.pages.pool.check_integrity(
            page for sequence in alive for table in sequence.block_tables for page in table
        )

    def _check_queue(self, prompt_len: int) -> None:
        most_requests = self.config.max_num_queued_reqs
        most_tokens = self.config.max_num_queued_tokens
        if most_requests is not None and self.num_queued_requests >= most_requests:
            raise QueueFullError(
                f"the queue is full: {self.num_queued_requests} requests wait, "
                f"the limit is {most_requests}"
            )
        if most_tokens is not None and self.num_queued_tokens + prompt_len > most_tokens:
            raise QueueFullError(
                f"the queue is full: {self.num_queued_tokens} prompt tokens wait and "
                f"{prompt_len} more were sent, the limit is {most_tokens}"
            )

    def _schedule_running(self, step: StepDraft) -> None:
        for sequence in self._turns.running(self._running, len(self._waiting)):
            if step.tokens_left == 0:
                break
            start = sequence.num_computed
            num_tokens = len(sequence.token_ids) + sequence.num_in_flight
            if num_tokens >= sequence.max_len:
                continue  # its last token is in flight
            if num_tokens - start > 1 or start < sequence.prompt_len:
                count = self._chunk(sequence, start, step)
                if count and self._make_room(sequence, start + count, step):
                    self._commit(sequence, count, step)
                continue
            # One token of a decode: the loop's hot path.
            if num_tokens > sequence.capacity:
                self.pages.publish(sequence, min(start, len(sequence.token_ids)))
                if not self._make_room(sequence, num_tokens, step):
                    return
            sequence.num_computed = num_tokens
            sequence.num_in_flight += 1
            step.tokens_left -= 1
            step.single.append(ScheduledSequence(sequence, start, 1, sequence.slot, True, 0, 0))

    def _make_room(self, sequence: SequenceState, end: int, step: StepDraft) -> bool:
        """Get pages up to position `end`, if need be from those served last; False: it is one."""
        while end > sequence.capacity:
            if self.pages.extend(sequence, sequence.num_computed, end):
                step.extended.append(sequence)
                break
            victim = self._running.last
            self._preempt(victim)
            step.preempted.append(victim)
            if victim is sequence:
                return False
        return True

    def _schedule_waiting(self, step: StepDraft) -> None:
        places = self._turns.places(step, len(self._running), len(self._waiting))
        while self._waiting and step.tokens_left and self._free_slots and places:
            sequence = self._waiting.first
            if sequence.num_in_flight:
                break  # preempted: its last token is still on the way to the host
            if not self._admit(sequence, step):
                if self._running or not self._drop_held_pages():
                    break
                continue
            self._waiting.discard(sequence)
            self._running.add(sequence)
            sequence.status = Status.RUNNING
            sequence.slot = self._free_slots.pop()
            step.admitted.append(sequence)
            start = sequence.num_computed
            count = self._chunk(sequence, start, step)
            self.pages.extend(sequence, start, start + count)
            self._commit(sequence, count, step)
            places -= 1

    def _admit(self, sequence: SequenceState, step: StepDraft) -> bool:
        """Whether the head of the queue may run from now on; takes the pages of a prefix hit."""
        hit = None
        start = sequence.num_computed
        if start == 0:
            hit = self.pages.lookup(sequence)
            start = hit.num_pages * self._page_size
        if self._chunk(sequence, start, step) == 0 or not self.pages.admit(sequence, hit):
            return False
        if sequence.request.request_id in self._queued:
            self._leave_queue(sequence)
            sequence.num_cached_tokens = start
            if self.pages.cache is not None:
                self.prefix_cache_queries += sequence.prompt_len
                self.prefix_cache_hits += start
        return True

    def _chunk(self, sequence: SequenceState, start: int, step: StepDraft) -> int:
        """Tokens of the sequence that this step has room for, from `start` on."""
        count = sequence.num_tokens - start
        if count == 1:
            pass
        elif self.config.enable_chunked_prefill:
            count = min(count, self.config.max_chunk, step.tokens_left)
        elif count > step.tokens_left:
            return 0
        wanted = sequence.prompt_logprobs_wanted
        if sequence.num_prompt_logprobs < wanted:
            first = max(start, sequence.num_prompt_logprobs)
            if min(start + count, wanted) - first > step.rows_left:
                count = first + step.rows_left - start
        return count

    def _commit(self, sequence: SequenceState, count: int, step: StepDraft) -> None:
        """Put a chunk of known tokens into the step; its pages are there."""
        start = sequence.num_computed
        sequence.num_computed = end = start + count
        samples = end == len(sequence.token_ids)
        first_row = num_rows = 0
        if sequence.num_prompt_logprobs < sequence.prompt_logprobs_wanted:
            first_row = max(start, sequence.num_prompt_logprobs)
            num_rows = max(0, min(end, sequence.prompt_logprobs_wanted) - first_row)
            sequence.num_prompt_logprobs += num_rows
        item = ScheduledSequence(
            sequence, start, count, sequence.slot, samples, first_row, num_rows
        )
        (step.single if count == 1 else step.chunks).append(item)
        step.tokens_left -= count
        step.rows_left -= num_rows
        # Attention reads after it has written: pages may be shared within this very step.
        self.pages.publish(sequence, end)
        if samples:
            sequence.num_in_flight += 1
            if sequence.request.request_id in self._unforked:
                self._fork(sequence)

    def _fork(self, parent: SequenceState) -> None:
        for child in self._unforked.pop(parent.request.request_id):
            self.pages.fork(parent, child)
            child.num_cached_tokens = parent.num_cached_tokens
            self._waiting.add(child)

    def _drop_held_pages(self) -> bool:
        """Take the pages of forks that wait behind the head; False if there are none."""
        holders = [s for s in self._waiting if s.num_computed and s is not self._waiting.first]
        for sequence in holders:
            self.pages.release(sequence)
        return bool(holders)

    def _preempt(self, sequence: SequenceState) -> None:
        log.warning(
            "request %s choice %d is preempted by RECOMPUTE: no free pages; "
            "%d computed tokens are dropped",
            sequence.request.request_id,
            sequence.index,
            sequence.num_computed,
        )
        self._stop_running(sequence)
        sequence.status = Status.WAITING
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.add(sequence)

    def _stop_running(self, sequence: SequenceState) -> None:
        # A row in flight may turn out wasted: publish what collected steps computed.
        collected = sequence.num_computed - sequence.num_in_flight
        self.pages.publish(sequence, min(collected, len(sequence.token_ids)))
        self.pages.release(sequence)
        self._running.discard(sequence)
        self._free_slots.append(sequence.slot)
        sequence.slot = NO_SLOT

    def _finish_by_token(self, sequence: SequenceState, token_id: int) -> None:
        """End the sequence if its newest token does."""
        num_tokens = len(sequence.token_ids)
        request = sequence.request
        fewest = sequence.prompt_len + request.params.min_tokens
        is_eos = token_id in request.eos_token_ids
        # EOS comes too early only where a grammar allows nothing else any more.
        ends = num_tokens >= fewest or (is_eos and request.grammar is not None)
        if token_id in sequence.ending_ids and ends:
            if not is_eos:
                sequence.stop_reason = token_id
            self._finish(sequence, "stop")
        elif num_tokens >= sequence.max_len:
            self._finish(sequence, "length")

    def _finish(self, sequence: SequenceState, reason: str) -> None:
        if sequence.status is Status.RUNNING:
            self._stop_running(sequence)
        else:
            self._waiting.discard(sequence)
            self.pages.release(sequence)
        sequence.status = Status.FINISHED
        sequence.finish_reason = reason
        request_id = sequence.request.request_id
        alive = self._alive[request_id]
        del alive[sequence.index]
        if not alive:
            del self._alive[request_id]
            self._unforked.pop(request_id, None)
            self._leave_queue(sequence)

    def _leave_queue(self, sequence: SequenceState) -> None:
        """The request is no longer one that was never admitted."""
        if sequence.request.request_id in self._queued:
            self._queued.remove(sequence.request.request_id)
            self.num_queued_requests -= 1
            self.num_queued_tokens -= sequence.prompt_len
