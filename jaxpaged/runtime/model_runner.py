"""Runs steps on the device: dispatches at once, collects when asked."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import jax
import numpy as np

from jaxpaged.core.buckets import Bucket
from jaxpaged.core.scheduler import SchedulerOutput
from jaxpaged.core.sequence import SequenceState
from jaxpaged.models.decoder import Decoder, Params, head_params
from jaxpaged.runtime import sampler
from jaxpaged.runtime.batch_builder import BatchBuilder, PromptRow, StepInput
from jaxpaged.runtime.compilation import Executables
from jaxpaged.runtime.plan import EnginePlan
from jaxpaged.runtime.programs import (
    PENALTY_PIECE,
    Embed,
    Forward,
    Key,
    Sample,
    TakeInput,
    Upkeep,
    zero_states,
)
from jaxpaged.runtime.slot_table import SlotTable, has_penalties
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
    """Owns weights, state and executables of one model on one mesh."""

    def __init__(
        self, model: Decoder, params: Params, plan: EnginePlan, executables: Executables[Key]
    ) -> None:
        self.plan, self.executables = plan, executables
        self._model, self._params, self._head_params = model, params, head_params(params)
        self._shapes = plan.shapes
        self._slots = SlotTable(plan.max_num_seqs, plan.vocab)
        self._builder = BatchBuilder(self._shapes, plan.buckets, self._slots)
        self._state, self._penalties = zero_states(model, plan)

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
                case Embed(num_rows):
                    self._embed(num_rows)
        jax.block_until_ready(self._state)

    # -- steps ---------------------------------------------------------------------------------

    def forward(self, scheduled: SchedulerOutput) -> StepInput:
        """Dispatch the forward pass of a step; returns at once what `sample` wants to know."""
        self._builder.admit(scheduled.admitted)
        self._slots.admit(scheduled.admitted)
        for sequence in scheduled.admitted:
            if has_penalties(sequence.request.params):
                self._count_known_tokens(sequence)
        step = self._builder.step(scheduled)
        for index_X, page_X in step.table_uploads:
            tables = self.executables[Upkeep.PAGE_TABLES](
                self._state.page_tables, self._put(index_X), self._put(page_X)
            )
            self._state = self._state.replace(page_tables=tables)
        if step.words_X is not None:
            self._take_input(step.words_X)
        self._run_forward(step.bucket)
        return step

    def _take_input(self, words_X: np.ndarray) -> None:
        input_X = self.executables[TakeInput(words_X.size)](self._state.input_X, self._put(words_X))
        self._state = self._state.replace(input_X=input_X)

    def _run_forward(self, bucket: Bucket) -> None:
        self._state = self.executables[Forward(bucket)](self._params, self._state)

    def _put(self, buffer: np.ndarray) -> jax.Array:
        """The one way up: explicit, so that a test can forbid any other transfer."""
        return jax.device_put(buffer, self._state.last_token.sharding)

    def _count_known_tokens(self, sequence: SequenceState) -> None:
        """Start a slot's token counts over with what the host knows of the sequence."""
        token_ids = sequence.token_ids
        num_prompt = len(sequence.request.prompt_token_ids)
        for start in range(0, len(token_ids), PENALTY_PIECE):
            ids = token_ids[start : start + PENALTY_PIECE]
            piece = np.full(PENALTY_PIECE + 3, -1, np.int32)
            piece[:3] = sequence.slot, max(num_prompt - start, 0), start == 0
            piece[3 : 3 + len(ids)] = ids
            self._penalties = self.executables[Upkeep.PENALTIES](self._penalties, self._put(piece))

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
        embedding_RD = None
        if sampling.embeds:
            rows = self.plan.buckets.fit_rows(len(sampling.sampled), scoring=False)
            embedding_RD = self._embed(rows)
        for array in jax.tree.leaves((out, embedding_RD)):
            array.copy_to_host_async()
        return InFlight(scheduled, out, sampling.prompt_rows, now, embedding_RD)

    def _embed(self, num_rows: int) -> jax.Array:
        state = self._state
        pooled_RD = state.hidden_RD if state.pooled_RD is None else state.pooled_RD
        return self.executables[Embed(num_rows)](pooled_RD)

    def _run_sample(self, key: Sample, late_X: np.ndarray | None) -> sampler.SampleOutput:
        """Sample with the settings in the state's input, or with those that come late."""
        full = key.variant == "full"
        out, last_token, penalties = self.executables[key](
            self._head_params,
            self._state.hidden_RD,
            self._state.position_R,
            self._state.last_token,
            self._penalties if full else None,
            self._state.input_X if late_X is None else self._put(late_X),
        )
        self._state = self._state.replace(last_token=last_token)
        if full:
            self._penalties = penalties
        return out

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
