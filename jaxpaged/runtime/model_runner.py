"""Runs steps on the device: dispatches at once, collects when asked."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from jaxpaged.core.scheduler import SchedulerOutput
from jaxpaged.core.sequence import SequenceState
from jaxpaged.models.decoder import Decoder, Params, head_params
from jaxpaged.parallel.sharding import put
from jaxpaged.runtime import sampler
from jaxpaged.runtime.batch_builder import BatchBuilder, PromptRow, StepInput
from jaxpaged.runtime.command_stream import CommandSender
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
        self,
        model: Decoder,
        params: Params,
        plan: EnginePlan,
        executables: Executables[Key],
        followers: CommandSender | None = None,
    ) -> None:
        self.plan, self.executables = plan, executables
        self.followers = followers  # None: the whole mesh is this host's
        self._model, self._params, self._head_params = model, params, head_params(params)
        self._shapes = plan.shapes
        self._slots = SlotTable(plan.max_num_seqs, plan.vocab)
        self._builder = BatchBuilder(self._shapes, plan.buckets, self._slots)
        self._state, self._penalties = zero_states(model, plan)
        self._whole = self._state.last_token.sharding

    def warm_up(self, keys: Sequence[Key]) -> None:
        """Run executables once on padding, so that the first request finds them loaded."""
        for key in keys:
            match key:
                case TakeInput(size):
                    self.execute(key, np.zeros(size, np.int32))
                case Forward(bucket):
                    self._take_input(self._builder.padded_step(bucket))
                    self.execute(key)
                case Sample(num_rows, variant):
                    self._take_input(self._builder.padded_step(self.plan.buckets.forward[0]))
                    late = (
                        () if rides_along(variant) else (self._builder.padded_sampling(num_rows),)
                    )
                    self.execute(key, *late)
                case Embed():
                    self.execute(key)
        jax.block_until_ready(self._state)

    # -- the device ----------------------------------------------------------------------------

    def execute(self, key: Key, *words: np.ndarray) -> Any:
        """Run an executable on the state and on words from the host; every host of the mesh does.

        Returns:
            What `Sample` and `Embed` compute; None of all others, which change the state alone.
        """
        if self.followers is not None:
            self.followers.execute(key, words)
        run, state, sent = self.executables[key], self._state, [self._put(each) for each in words]
        match key:
            case TakeInput():
                self._state = state.replace(input_X=run(state.input_X, *sent))
            case Forward():
                self._state = run(self._params, state)
            case Sample(_, variant):
                return self._run_sample(run, variant == "full", *sent)
            case Embed():
                return run(state.hidden_RD if state.pooled_RD is None else state.pooled_RD)
            case Upkeep.PAGE_TABLES:
                self._state = state.replace(page_tables=run(state.page_tables, *sent))
            case Upkeep.PENALTIES:
                self._penalties = run(self._penalties, *sent)
        return None

    def _put(self, buffer: np.ndarray) -> jax.Array:
        """The one way up: explicit, so that a test can forbid any other transfer."""
        return put(buffer, self._whole)

    def _run_sample(
        self, run: jax.stages.Compiled, full: bool, late_X: jax.Array | None = None
    ) -> sampler.SampleOutput:
        """Sample with the settings in the state's input, or with those that come late."""
        state = self._state
        out, last_token, penalties = run(
            self._head_params,
            state.hidden_RD,
            state.position_R,
            state.last_token,
            self._penalties if full else None,
            state.input_X if late_X is None else late_X,
        )
        self._state = state.replace(last_token=last_token)
        if full:
            self._penalties = penalties
        return out

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
            self.execute(Upkeep.PAGE_TABLES, index_X, page_X)
        if step.words_X is not None:
            self._take_input(step.words_X)
        self.execute(Forward(step.bucket))
        return step

    def _take_input(self, words_X: np.ndarray) -> None:
        self.execute(TakeInput(words_X.size), words_X)

    def _count_known_tokens(self, sequence: SequenceState) -> None:
        """Start a slot's token counts over with what the host knows of the sequence."""
        token_ids = sequence.token_ids
        num_prompt = len(sequence.request.prompt_token_ids)
        for start in range(0, len(token_ids), PENALTY_PIECE):
            ids = token_ids[start : start + PENALTY_PIECE]
            piece = np.full(PENALTY_PIECE + 3, -1, np.int32)
            piece[:3] = sequence.slot, max(num_prompt - start, 0), start == 0
            piece[3 : 3 + len(ids)] = ids
            self.execute(Upkeep.PENALTIES, piece)

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
        late: tuple[np.ndarray, ...] = ()
        if not rides_along(sampling.variant):
            late = (self._builder.late_words(sampling, grammar_masks),)
        out = self.execute(Sample(sampling.num_rows, sampling.variant), *late)
        embedding_RD = None
        if sampling.embeds:
            rows = self.plan.buckets.fit_rows(len(sampling.sampled), scoring=False)
            embedding_RD = self.execute(Embed(rows))
        for array in jax.tree.leaves((out, embedding_RD)):
            array.copy_to_host_async()
        return InFlight(scheduled, out, sampling.prompt_rows, now, embedding_RD)

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
