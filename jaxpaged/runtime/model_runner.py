"""Runs steps on the device: dispatches at once, collects when asked."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import jax
import numpy as np

from jaxpaged.core.buckets import Bucket
from jaxpaged.core.scheduler import SchedulerOutput
from jaxpaged.core.sequence import SequenceState
from jaxpaged.runtime import sampler
from jaxpaged.runtime.batch_builder import BatchBuilder, PromptRow, StepInput
from jaxpaged.runtime.plan import EnginePlan
from jaxpaged.runtime.programs import (
    PENALTY_PIECE,
    Embed,
    Forward,
    Key,
    Sample,
    TakeInput,
    Upkeep,
)
from jaxpaged.runtime.slot_table import SlotTable, has_penalties
from jaxpaged.runtime.stage import Stage
from jaxpaged.runtime.step import rides_along

NO_MASKS: Mapping[int, np.ndarray] = MappingProxyType({})


@dataclass(frozen=True)
class InFlight:
    """A dispatched step whose results are on their way to the host."""

    scheduled: SchedulerOutput
    out: sampler.SampleOutput | None  # None: no row was wanted
    prompt_rows: list[PromptRow]
    dispatched: float  # time.perf_counter()
    embedding_RD: jax.Array | None = None  # None: no embedding was wanted

    def is_ready(self) -> bool:
        """Whether `collect` would not wait."""
        return self.out is None or self.out.token_R.is_ready()  # type: ignore[attr-defined]


@dataclass(frozen=True)
class StepResult:
    """Host copies of what a step sampled. Rows: new tokens first, then prompt tokens."""

    token_ids: list[int]  # of the rows that sampled, in the order of the schedule
    prompt_rows: list[PromptRow]
    logprob_R: np.ndarray | None
    rank_R: np.ndarray | None
    top_id_RX: np.ndarray | None
    top_logprob_RX: np.ndarray | None
    embedding_RD: np.ndarray | None = None  # of the rows that sampled


class ModelRunner:
    """Owns a model: its stages, of which there is one unless they form a pipeline.

    A step goes through all stages as soon as it is dispatched, each on devices of its own: steps
    that are in flight at once overlap.
    """

    def __init__(self, stages: Sequence[Stage], plan: EnginePlan) -> None:
        self.plan, self.stages = plan, tuple(stages)
        self._first, self._last = self.stages[0], self.stages[-1]
        self._slots = SlotTable(plan.max_num_seqs, plan.vocab)
        self._builder = BatchBuilder(plan.shapes, plan.buckets, self._slots)
        # Of steps that the host may not have collected: the slots that sampled, and the tokens of
        # all slots, on their way to the first stage.
        self._returning: deque[tuple[set[int], jax.Array]] = deque(maxlen=len(self.stages))

    def warm_up(self, keys: Sequence[Key]) -> None:
        """Run executables once on padding, so that the first request finds them loaded."""
        for key in keys:
            match key:
                case TakeInput(size):
                    self._take_input(np.zeros(size, np.int32))
                case Forward(bucket):
                    self._take_input(self._builder.padded_step(bucket))
                    self._run_forward(bucket)
                case Sample(num_rows, variant):
                    self._take_input(self._builder.padded_step(self.plan.buckets.forward[0]))
                    late = None if rides_along(variant) else self._builder.padded_sampling(num_rows)
                    self._run_sample(key, late)
                case Upkeep.LAST_TOKENS:
                    self._return_tokens({0})
                    self._take_returned({0})
                case Embed(num_rows):
                    self._embed(num_rows)
        jax.block_until_ready([stage.state for stage in self.stages])

    @property
    def late_compilations(self) -> int:
        """Executables that were compiled when they were needed."""
        return sum(stage.executables.late_compilations for stage in self.stages)

    # -- steps ---------------------------------------------------------------------------------

    def forward(self, scheduled: SchedulerOutput) -> StepInput:
        """Dispatch the forward pass of a step; returns at once what `sample` wants to know."""
        self._builder.admit(scheduled.admitted)
        self._slots.admit(scheduled.admitted)
        for sequence in scheduled.admitted:
            if has_penalties(sequence.request.params):
                self._count_known_tokens(sequence)
        step = self._builder.step(scheduled)
        if self._first is not self._last:
            self._take_returned(
                {
                    item.slot
                    for item in scheduled.sequences
                    if item.start + item.num_tokens > len(item.sequence.token_ids)
                }
            )
        for index_X, page_X in step.table_uploads:
            self._update_page_tables(index_X, page_X)
        if step.words_X is not None:
            self._take_input(step.words_X)
        self._run_forward(step.bucket)
        return step

    def _update_page_tables(self, index_X: np.ndarray, page_X: np.ndarray) -> None:
        for stage in self.stages:
            stage.update_page_tables(index_X, page_X)

    def _take_input(self, words_X: np.ndarray) -> None:
        for stage in self.stages:
            stage.take_input(words_X)

    def _run_forward(self, bucket: Bucket) -> None:
        sent_TD = None
        for stage in self.stages:
            sent_TD = stage.forward(bucket, sent_TD)

    def _count_known_tokens(self, sequence: SequenceState) -> None:
        """Start a slot's token counts over with what the host knows of the sequence."""
        token_ids = sequence.token_ids
        num_prompt = len(sequence.request.prompt_token_ids)
        for start in range(0, len(token_ids), PENALTY_PIECE):
            ids = token_ids[start : start + PENALTY_PIECE]
            piece = np.full(PENALTY_PIECE + 3, -1, np.int32)
            piece[:3] = sequence.slot, max(num_prompt - start, 0), start == 0
            piece[3 : 3 + len(ids)] = ids
            self._last.count_tokens(piece)

    def sample(
        self,
        scheduled: SchedulerOutput,
        step: StepInput,
        grammar_masks: Mapping[int, np.ndarray] = NO_MASKS,
    ) -> InFlight:
        """Dispatch the sampling of a step's rows; the copy to the host starts at once.

        Args:
            grammar_masks: by slot, of the sequences that have a grammar.
        """
        now = time.perf_counter()
        sampling = step.sampling
        if sampling is None:
            return InFlight(scheduled, None, [], now)
        late = None
        if not rides_along(sampling.variant):
            late = self._builder.late_words(sampling, grammar_masks)
        out = self._run_sample(Sample(sampling.num_rows, sampling.variant), late)
        if self._first is not self._last:
            self._return_tokens({item.slot for item in sampling.sampled})
        embedding_RD = None
        if sampling.embeds:
            rows = self.plan.buckets.fit_rows(len(sampling.sampled), scoring=False)
            embedding_RD = self._embed(rows)
        for array in jax.tree.leaves((out, embedding_RD)):
            array.copy_to_host_async()
        return InFlight(scheduled, out, sampling.prompt_rows, now, embedding_RD)

    def _return_tokens(self, slots: set[int]) -> None:
        """Send what was sampled to the first stage. It is not to wait for it, and has other steps
        to compute: see `_take_returned`.
        """
        self._returning.append((slots, self._first.put(self._last.state.last_token)))

    def _take_returned(self, named: set[int]) -> None:
        """Let the first stage have the tokens that its next step looks up in these slots."""
        for at in reversed(range(len(self._returning))):
            slots, last_token = self._returning[at]
            if slots & named:
                self._first.take_last_tokens(last_token)
                for _ in range(at + 1):  # what came before is in it
                    self._returning.popleft()
                return

    def _embed(self, num_rows: int) -> jax.Array:
        return self._last.embed(num_rows)

    def _run_sample(self, key: Sample, late_X: np.ndarray | None) -> sampler.SampleOutput:
        return self._last.sample(key, late_X)

    def collect(self, step: InFlight) -> StepResult:
        """Wait for a step's results."""
        if step.out is None:
            return StepResult([], [], None, None, None, None)
        out, embedding_RD = jax.device_get((step.out, step.embedding_RD))
        count = sum(item.samples for item in step.scheduled.sequences)
        return StepResult(
            out.token_R[:count].tolist(),
            step.prompt_rows,
            out.logprob_R,
            out.rank_R,
            out.top_id_RX,
            out.top_logprob_RX,
            embedding_RD,
        )
