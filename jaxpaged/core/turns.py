"""Which sequences may be part of a step while others are in flight."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from jaxpaged.core.scheduler_output import StepDraft
from jaxpaged.core.sequence import SequenceQueue, SequenceState


class Turns:
    """Deals sequences out to the steps that overlap where stages form a pipeline.

    The input of a decode is the token before it, which comes out of the last stage. A step that had
    to wait for it in the first stage would hold up all others, so sequences take turns: each step
    gets its share of those that are known. Chunks of a prompt wait for nothing. With one stage
    there are no turns: a step begins when the one before is through.
    """

    def __init__(self, num_stages: int, max_num_seqs: int) -> None:
        self._num_stages, self._max_num_seqs = num_stages, max_num_seqs
        self._steps = 0

    def running(self, running: SequenceQueue, num_waiting: int) -> Iterable[SequenceState]:
        """Those of the running sequences that may be part of the next step, in their order."""
        if self._num_stages == 1:
            return running
        return self._rested(running, self._share(len(running) + num_waiting))

    def places(self, step: StepDraft, num_running: int, num_waiting: int) -> int:
        """How many sequences may be admitted to a step that has its running ones."""
        if self._num_stages == 1:
            return self._max_num_seqs
        taken = sum(item.samples for item in (*step.single, *step.chunks))
        return max(self._share(num_running + num_waiting) - taken, num_running < self._num_stages)

    def end(self, step: StepDraft) -> None:
        """The step is complete."""
        if self._num_stages > 1:
            self._steps += 1
            for item in (*step.single, *step.chunks):
                item.sequence.last_step = self._steps

    def _share(self, known: int) -> int:
        return -(-min(known, self._max_num_seqs) // self._num_stages)

    def _rested(self, running: SequenceQueue, share: int) -> Iterator[SequenceState]:
        overlapping = min(self._num_stages, len(running))
        for sequence in running:
            if sequence.num_tokens - sequence.num_computed > 1:
                yield sequence
            elif share and sequence.num_tokens < sequence.max_len:
                away = self._steps + 1 - sequence.last_step
                if away >= overlapping or not sequence.num_in_flight:
                    share -= 1
                    yield sequence
