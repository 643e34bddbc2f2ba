"""Packs what the scheduler decided into the host buffers of a step. NumPy only, no device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxpaged.core.buckets import Bucket, Buckets
from jaxpaged.core.scheduler import ScheduledSequence, SchedulerOutput
from jaxpaged.core.sequence import SequenceState
from jaxpaged.runtime.sampler import VARIANTS
from jaxpaged.runtime.slot_table import SCORING, SlotTable
from jaxpaged.runtime.step import NO_ENTRY, StepShapes, rides_along
from jaxpaged.runtime.token_masks import next_token_mask

TABLE_UPDATES = 4096  # page-table entries one upload before a step carries


@dataclass(frozen=True)
class PromptRow:
    """A row that asks for the log-probability of a prompt token."""

    sequence: SequenceState
    position: int  # of the token asked for


@dataclass(frozen=True)
class Sampling:
    """Which rows a step samples: new tokens first, then prompt log-probabilities."""

    num_rows: int
    variant: str
    sampled: list[ScheduledSequence]
    slots: np.ndarray  # i32 of these
    prompt_rows: list[PromptRow]
    embeds: bool  # some row's embedding is wanted


@dataclass(frozen=True)
class StepInput:
    """Host side of a step."""

    bucket: Bucket
    words_X: np.ndarray | None  # front of the state's `input_X`; None: the device has it
    table_uploads: list[tuple[np.ndarray, np.ndarray]]  # (index_X, page_X) to write beforehand
    sampling: Sampling | None  # None: no row is wanted, every chunk ends inside its prompt


class BatchBuilder:
    """Knows what the device has: page-table entries sent, sampling settings by slot."""

    def __init__(self, shapes: StepShapes, buckets: Buckets, slots: SlotTable) -> None:
        self._shapes = shapes
        self._buckets = buckets
        self._slots = slots
        self._sent = np.zeros((shapes.num_groups, shapes.max_num_seqs), np.int64)
        self._packings = {bucket: shapes.forward_packing(bucket) for bucket in buckets.forward}
        self._sample_packings = {
            (rows, variant): shapes.sample_packing(rows, variant)
            for variant in VARIANTS
            for rows in (buckets.scoring_rows if variant in SCORING else buckets.rows)
        }
        self._on_device: np.ndarray | None = None  # front of the state's `input_X`
        # Of the last step, if the device may go on from it.
        self._steady: tuple[Bucket, Sampling] | None = None
        self._offset, self._sizes = shapes.forward_offset, shapes.input_sizes(buckets)

    def admit(self, sequences: Sequence[SequenceState]) -> None:
        """Sequences that take a slot this step: nothing of theirs is on the device yet."""
        for sequence in sequences:
            self._sent[:, sequence.slot] = 0

    def step(self, output: SchedulerOutput) -> StepInput:
        """Tokens (decodes first, then chunks), page-table news and sampling of a step.

        A new buffer every time: the device may still read the one before.
        """
        if self._goes_on(output):
            return self._next_step(output)
        scheduled = output.sequences
        num_decodes = [item.num_tokens for item in scheduled].count(1)
        bucket = self._buckets.fit(
            output.num_tokens, len(scheduled), decode_only=num_decodes == len(scheduled)
        )
        words_X, views = self._new_step(bucket)
        views["num_decodes"][...] = num_decodes
        views["num_seqs"][...] = len(scheduled)
        slot_B = np.array([item.slot for item in scheduled], np.int32)
        views["slot_B"][: len(scheduled)] = slot_B
        views["slot_B"][len(scheduled) :] = self._shapes.null_slot
        samples_B = np.array([item.samples for item in scheduled], bool)
        self._fill_tokens(scheduled, num_decodes, views)
        self._fill_rows(scheduled, samples_B, views)
        uploads = self._fill_page_tables((*output.admitted, *output.extended), views)
        sampling = self._sampling(scheduled, slot_B[samples_B])
        if sampling is not None and rides_along(sampling.variant):
            self._fill_sampling(sampling, words_X, {})
        known = self._on_device is not None and np.array_equal(self._on_device, words_X)
        self._on_device = words_X.copy()  # the transfer may still read the other
        if bucket.decode_only:
            self._count_on(bucket)
        named = views["token_T"][: len(scheduled)] < 0
        self._steady = None
        if bucket.decode_only and named.all() and sampling and rides_along(sampling.variant):
            self._steady = bucket, sampling
        return StepInput(bucket, None if known else words_X, uploads, sampling)

    def _goes_on(self, output: SchedulerOutput) -> bool:
        """Whether a step is one that the device makes for itself: see `StepShapes.next_input`."""
        if self._steady is None or output.admitted or output.extended:
            return False
        before = self._steady[1].sampled
        return len(before) == len(output.sequences) and all(
            item.slot == then.slot
            and item.num_tokens == 1
            and item.start == then.start + 1
            and item.start >= len(item.sequence.token_ids)  # named by its slot
            for item, then in zip(output.sequences, before, strict=True)
        )

    def _next_step(self, output: SchedulerOutput) -> StepInput:
        """Such a step, of which nothing has to be told."""
        assert self._steady is not None
        bucket, before = self._steady
        sampling = replace(before, sampled=list(output.sequences))
        self._steady = bucket, sampling
        self._count_on(bucket)
        return StepInput(bucket, None, [], sampling)

    def _count_on(self, bucket: Bucket) -> None:
        """Know what the device makes of its input after a decode step."""
        assert self._on_device is not None
        self._shapes.count_on(self._packings[bucket].views(self._on_device[self._offset :]))

    def padded_step(self, bucket: Bucket) -> np.ndarray:
        """Input of a step of nothing, whatever variant samples it."""
        words_X, views = self._new_step(bucket)
        views["slot_B"][:] = self._shapes.null_slot
        views["table_index_X"][:] = NO_ENTRY
        words_X[: self._offset] = self._shapes.null_slot
        return words_X

    def padded_sampling(self, num_rows: int) -> np.ndarray:
        """Settings of rows that sample nothing, for the variant that does not ride along."""
        words_X = np.zeros(self._sample_packings[num_rows, "full"].size, np.int32)
        words_X[:num_rows] = self._shapes.null_slot
        return words_X

    def _new_step(self, bucket: Bucket) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        packing = self._packings[bucket]
        size = next(n for n in self._sizes if n >= self._offset + packing.size)
        words_X = np.zeros(size, np.int32)
        return words_X, packing.views(words_X[self._offset :])

    def _fill_tokens(
        self,
        scheduled: Sequence[ScheduledSequence],
        num_decodes: int,
        views: dict[str, np.ndarray],
    ) -> None:
        position_T, seq_T = views["position_T"], views["seq_T"]
        query_start_B1, kv_len_B = views["query_start_B1"], views["kv_len_B"]
        num_seqs, at = len(scheduled), num_decodes
        position_T[:at] = [item.start for item in scheduled[:at]]
        kv_len_B[:at] = position_T[:at] + 1
        seq_T[:at] = query_start_B1[:at] = np.arange(at)
        for b, item in enumerate(scheduled[num_decodes:], num_decodes):
            end, kv_len = at + item.num_tokens, item.start + item.num_tokens
            position_T[at:end] = np.arange(item.start, kv_len)
            kv_len_B[b] = kv_len
            seq_T[at:end] = b
            query_start_B1[b] = at
            at = end
        seq_T[at:] = kv_len_B.size - 1
        query_start_B1[num_seqs:] = at
        views["token_T"][:at] = _token_ids(scheduled)

    def _fill_rows(
        self,
        scheduled: Sequence[ScheduledSequence],
        samples_B: np.ndarray,
        views: dict[str, np.ndarray],
    ) -> None:
        """Which tokens' rows are wanted: the last of a sequence that samples, and scored ones."""
        start_B1, row_R = views["query_start_B1"], views["row_R"]
        last_R = start_B1[1 : len(scheduled) + 1][samples_B] - 1
        scored = [
            int(start_B1[b]) + position - item.start
            for b, item in enumerate(scheduled)
            if item.num_prompt_logprob_rows
            for position in item.prompt_logprob_positions
        ]
        row_R[: len(last_R)] = last_R
        row_R[len(last_R) :][: len(scored)] = scored

    def _fill_page_tables(
        self, sequences: Sequence[SequenceState], views: dict[str, np.ndarray]
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Entries that are new since the last step; those beyond the buffer's room come back."""
        indices: list[int] = []
        pages: list[int] = []
        for sequence in sequences:
            for group, table in enumerate(sequence.block_tables):
                sent = self._sent[group, sequence.slot]
                base = self._shapes.table_index(group, sequence.slot, 0)
                indices.extend(range(base + sent, base + len(table)))
                pages.extend(table[sent:])
                self._sent[group, sequence.slot] = len(table)
        index_X, page_X = views["table_index_X"], views["table_page_X"]
        extra = max(0, len(indices) - index_X.size)
        uploads = []
        for start in range(0, extra, TABLE_UPDATES):
            end = min(start + TABLE_UPDATES, extra)
            index = np.full(TABLE_UPDATES, NO_ENTRY, np.int32)
            page = np.zeros(TABLE_UPDATES, np.int32)
            index[: end - start], page[: end - start] = indices[start:end], pages[start:end]
            uploads.append((index, page))
        count = len(indices) - extra
        index_X[:count], page_X[:count] = indices[extra:], pages[extra:]
        index_X[count:] = NO_ENTRY
        return uploads

    def _sampling(
        self, scheduled: Sequence[ScheduledSequence], slots: np.ndarray
    ) -> Sampling | None:
        sampled = [item for item in scheduled if item.samples]
        prompt_rows = [
            PromptRow(item.sequence, position + 1)
            for item in scheduled
            if item.num_prompt_logprob_rows
            for position in item.prompt_logprob_positions
        ]
        count = len(sampled) + len(prompt_rows)
        if count == 0:
            return None
        variant = self._slots.variant(sampled, slots, bool(prompt_rows))
        num_rows = self._buckets.fit_rows(count, scoring=variant in SCORING)
        embeds = self._slots.embeds(sampled)
        return Sampling(num_rows, variant, sampled, slots, prompt_rows, embeds)

    def late_words(self, sampling: Sampling, grammar_masks: Mapping[int, np.ndarray]) -> np.ndarray:
        """Settings of a sampling that does not ride along, once its masks can be told.

        Args:
            grammar_masks: uint32[W] by slot, of the sequences that have a grammar.
        """
        packing = self._sample_packings[sampling.num_rows, sampling.variant]
        words_X = np.zeros(packing.size, np.int32)
        self._fill_sampling(sampling, words_X, grammar_masks)
        return words_X

    def _fill_sampling(
        self, sampling: Sampling, words_X: np.ndarray, grammar_masks: Mapping[int, np.ndarray]
    ) -> None:
        slots, prompt_rows = sampling.slots, sampling.prompt_rows
        views = self._sample_packings[sampling.num_rows, sampling.variant].views(words_X)
        count = len(slots)
        views["slot_R"][:] = self._shapes.null_slot
        views["slot_R"][:count] = slots
        views["target_R"][:] = 0  # padding asks for a token's log-probability: draws nothing
        views["target_R"][:count] = -1
        views["target_R"][count : count + len(prompt_rows)] = [
            row.sequence.token_ids[row.position] for row in prompt_rows
        ]
        self._slots.fill(slots, views)
        if "mask_RW" in views:
            views["mask_RW"][:] = 0xFFFFFFFF
            for r, item in enumerate(sampling.sampled):
                static_W = self._slots.static_mask(item.slot)
                mask_W = next_token_mask(
                    item, static_W, self._shapes.vocab, grammar_masks.get(item.slot)
                )
                if mask_W is not None:
                    views["mask_RW"][r] = mask_W


def _token_ids(scheduled: Sequence[ScheduledSequence]) -> list[int]:
    """The tokens of a step; one that the host does not know yet is named by its slot."""
    token_ids: list[int] = []
    for item in scheduled:
        start, known = item.start, item.sequence.token_ids
        if start < len(known):
            token_ids += known[start : start + item.num_tokens]
        if start + item.num_tokens > len(known):
            token_ids.append(-1 - item.slot)
    return token_ids
