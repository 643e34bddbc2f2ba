"""What the scheduler decides, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from jaxpaged.core.sequence import SequenceState


class ScheduledSequence(NamedTuple):
    """A sequence's part of a step: positions [start, start + num_tokens)."""

    sequence: SequenceState
    start: int
    num_tokens: int
    slot: int
    samples: bool  # the row of its last token yields a new token
    prompt_logprob_start: int  # rows p in [start_row, start_row + n) score prompt token p + 1
    num_prompt_logprob_rows: int


@dataclass(frozen=True)
class SchedulerOutput:
    """One step. Sequences with one token come first, then longer chunks."""

    sequences: tuple[ScheduledSequence, ...]
    num_tokens: int
    preempted: tuple[SequenceState, ...]
    admitted: tuple[SequenceState, ...]  # got a slot in this step, for the first time or again


class SequenceUpdate(NamedTuple):
    """A new token of a sequence."""

    sequence: SequenceState
    token_id: int
    finish_reason: str | None
    stop_reason: int | None
