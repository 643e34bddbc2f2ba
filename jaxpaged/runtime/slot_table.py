"""Sampling settings of the running sequences, by slot, ready to be gathered into a batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxpaged.core.scheduler import ScheduledSequence
from jaxpaged.core.sequence import SequenceState
from jaxpaged.runtime.sampler import VARIANTS
from jaxpaged.runtime.token_masks import below_min_tokens, static_mask
from jaxpaged.sampling_params import MAX_LOGIT_BIAS, SamplingParams

FULL = VARIANTS.index("full")
SCORING = VARIANTS[VARIANTS.index("logprobs") :]  # variants that report log-probabilities


def has_penalties(params: SamplingParams) -> bool:
    """Whether a token's score depends on how often it came before."""
    return bool(
        params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1
    )


def _variant_level(params: SamplingParams, masked: bool) -> int:
    """Index of the smallest variant that serves these parameters (min_tokens aside)."""
    if has_penalties(params) or params.logit_bias or masked:
        return FULL
    if params.logprobs is not None:
        return VARIANTS.index("logprobs")
    if params.greedy:
        return VARIANTS.index("greedy")
    if params.top_k > 0 or params.top_p < 1 or params.min_p > 0:
        return VARIANTS.index("filtered")
    return VARIANTS.index("plain")


class SlotTable:
    """Holds every setting of `sample` that stays the same for a sequence."""

    def __init__(self, max_num_seqs: int, vocab: int) -> None:
        self._vocab = vocab
        self._level = np.zeros(max_num_seqs, np.int32)
        self._min_tokens = np.zeros(max_num_seqs, np.int32)
        self._pooled: set[int] = set()  # slots whose sequence is there for its embedding
        self._static_masks: dict[int, np.ndarray | None] = {}
        self._arrays = {
            "seed_R2": np.zeros((max_num_seqs, 2), np.uint32),
            "choice_R": np.zeros(max_num_seqs, np.int32),
            "temperature_R": np.zeros(max_num_seqs, np.float32),
            "top_k_R": np.zeros(max_num_seqs, np.int32),
            "top_p_R": np.ones(max_num_seqs, np.float32),
            "min_p_R": np.zeros(max_num_seqs, np.float32),
            "repetition_R": np.ones(max_num_seqs, np.float32),
            "presence_R": np.zeros(max_num_seqs, np.float32),
            "frequency_R": np.zeros(max_num_seqs, np.float32),
            "bias_id_RX": np.full((max_num_seqs, MAX_LOGIT_BIAS), -1, np.int32),
            "bias_RX": np.zeros((max_num_seqs, MAX_LOGIT_BIAS), np.float32),
        }

    def admit(self, sequences: Sequence[SequenceState]) -> None:
        """Take over the settings of sequences that got a slot."""
        for sequence in sequences:
            request, slot = sequence.request, sequence.slot
            (self._pooled.add if request.pooling else self._pooled.discard)(slot)
            params, arrays = request.params, self._arrays
            mask_W = static_mask(request, self._vocab)
            self._static_masks[slot] = mask_W
            self._level[slot] = _variant_level(
                params,
                mask_W is not None or request.bad_word_ids != () or request.grammar is not None,
            )
            self._min_tokens[slot] = params.min_tokens
            seed = request.seed % 2**64
            arrays["seed_R2"][slot] = seed & 0xFFFFFFFF, seed >> 32
            arrays["choice_R"][slot] = sequence.index
            arrays["temperature_R"][slot] = params.temperature
            arrays["top_k_R"][slot] = max(params.top_k, 0)
            arrays["top_p_R"][slot] = params.top_p
            arrays["min_p_R"][slot] = params.min_p
            arrays["repetition_R"][slot] = params.repetition_penalty
            arrays["presence_R"][slot] = params.presence_penalty
            arrays["frequency_R"][slot] = params.frequency_penalty
            bias = params.logit_bias or {}
            arrays["bias_id_RX"][slot] = -1
            arrays["bias_id_RX"][slot, : len(bias)] = list(bias.keys())
            arrays["bias_RX"][slot, : len(bias)] = list(bias.values())

    def static_mask(self, slot: int) -> np.ndarray | None:
        return self._static_masks[slot]

    def embeds(self, sampled: Sequence[ScheduledSequence]) -> bool:
        """Whether the embedding of some row is wanted."""
        return bool(self._pooled) and any(item.slot in self._pooled for item in sampled)

    def variant(
        self, sampled: Sequence[ScheduledSequence], slots: np.ndarray, prompt_logprobs: bool
    ) -> str:
        """The smallest variant of `sample` that serves every row; `slots`: i32 of `sampled`."""
        if self._min_tokens[slots].any() and any(map(below_min_tokens, sampled)):
            return VARIANTS[FULL]
        least = VARIANTS.index("logprobs") if prompt_logprobs else 0
        return VARIANTS[self._level[slots].max(initial=least)]

    def fill(self, slots: np.ndarray, views: dict[str, np.ndarray]) -> None:
        """Gather the rows of `slots` into the front of the views that the variant has."""
        for name, array in self._arrays.items():
            if name in views:
                views[name][: len(slots)] = array[slots]
