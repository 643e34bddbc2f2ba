"""The state of one choice of a request, and queues of such states."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter
from typing import Any

from jaxpaged.core.request import Request

Key = tuple[int, int, int]  # priority, arrival, choice: smaller is served first

NO_SLOT = -1


class Status(Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class SequenceState:
    """One choice of a request: its tokens and the pages that hold them.

    `num_computed` counts tokens whose step was scheduled, the placeholder of a token in flight
    included; `num_tokens - num_computed` is what is left to do, be it prompt or decode.
    """

    request: Request
    index: int  # choice, 0 <= index < n
    key: Key
    max_len: int  # tokens at which it ends with reason "length"
    token_ids: list[int]  # the prompt and every output that the host knows
    block_tables: list[list[int]]  # pages of each KV group in order; 0 where released
    status: Status = Status.WAITING
    slot: int = NO_SLOT  # row of per-sequence device state, 0 .. max_num_seqs - 1, while running
    num_computed: int = 0
    num_in_flight: int = 0  # tokens sampled on the device that the host does not know yet
    capacity: int = 0  # tokens that the pages of every group have room for
    finish_reason: str | None = None  # stop, length, abort
    stop_reason: int | None = None  # the id of stop_token_ids that ended it
    num_cached_tokens: int = 0  # prefix hit at the first admission
    num_prompt_logprobs: int = 0  # rows already scheduled; row p scores prompt token p + 1
    num_preemptions: int = 0
    page_hashes: list[bytes] = field(default_factory=list)  # prefix keys of leading pages
    num_published: int = 0  # leading pages that the prefix cache was told of
    cache_epoch: int = -1  # `PrefixCache.epoch` when its first page was computed
    last_step: int = -1  # number of the step that it was last part of
    grammar: Any = None  # where it stands in its grammar, kept by `runtime.grammar`
    prompt_len: int = field(init=False)
    ending_ids: frozenset[int] = field(init=False)  # EOS and stop_token_ids
    prompt_logprobs_wanted: int = field(init=False)  # rows; only choice 0 scores the prompt

    def __post_init__(self) -> None:
        params = self.request.params
        self.prompt_len = len(self.request.prompt_token_ids)
        self.ending_ids = self.request.eos_token_ids | set(params.stop_token_ids)
        scored = self.index == 0 and params.prompt_logprobs is not None
        self.prompt_logprobs_wanted = self.prompt_len - 1 if scored else 0

    @property
    def num_tokens(self) -> int:
        """Known tokens and those in flight."""
        return len(self.token_ids) + self.num_in_flight

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.prompt_len :]

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED


_by_key = attrgetter("key")


class SequenceQueue:
    """Sequences in the order of their keys."""

    def __init__(self) -> None:
        self._sequences: list[SequenceState] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[SequenceState]:
        return iter(self._sequences)

    @property
    def first(self) -> SequenceState:
        return self._sequences[0]

    @property
    def last(self) -> SequenceState:
        return self._sequences[-1]

    def add(self, sequence: SequenceState) -> None:
        insort(self._sequences, sequence, key=_by_key)

    def discard(self, sequence: SequenceState) -> None:
        """Remove the sequence if it is there."""
        at = bisect_left(self._sequences, sequence.key, key=_by_key)
        if at < len(self._sequences) and self._sequences[at] is sequence:
            del self._sequences[at]
