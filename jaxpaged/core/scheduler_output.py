"""What the scheduler decides."""

from __future__ import annotations

from dataclasses import dataclass

from jaxpaged.core.sequence import SequenceState


@dataclass(slots=True, eq=False)
class ScheduledSequence:
    """A sequence's part of a step: positions [start, start + num_tokens).

    Read-only by agreement: freezing would triple the cost of making one, in every step.
    """

    sequence: SequenceState
    start: int
    num_tokens: int
    slot: int
    samples: bool  # the row of its last token yields a new token
    prompt_logprob_start: int  # the row at position p scores prompt token p + 1
    num_prompt_logprob_rows: int

    @property
    def prompt_logprob_positions(self) -> range:
        """Of the rows that score prompt tokens."""
        first = self.prompt_logprob_start
        return range(first, first + self.num_prompt_logprob_rows)


class StepDraft:
    """A step in the making."""

    def __init__(self, tokens: int, rows: int) -> None:
        self.tokens_left = tokens
        self.rows_left = rows
        self.single: list[ScheduledSequence] = []
        self.chunks: list[ScheduledSequence] = []
        self.preempted: list[SequenceState] = []
        self.admitted: list[SequenceState] = []
        self.extended: list[SequenceState] = []


@dataclass(frozen=True)
class SchedulerOutput:
    """One step. Sequences with one token come first, then longer chunks."""

    sequences: tuple[ScheduledSequence, ...]
    num_tokens: int
    preempted: tuple[SequenceState, ...]
    admitted: tuple[SequenceState, ...]  # got a slot in this step, for the first time or again
    extended: tuple[SequenceState, ...]  # ran before and got pages in this step
