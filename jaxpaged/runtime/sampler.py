"""Choosing tokens: a pure function from logits and sampling settings to tokens.

It comes in variants, each a superset of the one before: a row gets the same token whichever of
those that serve it runs. The order of a row's rules is vLLM's: log-probabilities are the raw
ones, of the unmodified logits; then allowed tokens, bias, penalties, temperature, min_p, top_k,
and top_p over what top_k left. A token that ties with the last one kept is kept as well.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh

from jaxpaged.parallel.vocabulary import argmax, top_k
from jaxpaged.sampling_params import MAX_LOGIT_BIAS
from pallas_kernels.sample_top_k_top_p import sample_top_k_top_p
from pallas_kernels.sampling import draw_tokens

VARIANTS = ("greedy", "plain", "filtered", "logprobs", "full")
LARGE = 1e30  # beyond any logit, and finite

Field = tuple[str, tuple[int, ...], str]  # name, shape after R, dtype


@struct.dataclass
class DrawSettings:
    """How a row's token is drawn: from the plain variant on."""

    seed_R2: jax.Array  # u32 low and high word
    choice_R: jax.Array  # i32 which of the request's n choices
    temperature_R: jax.Array  # f32


@struct.dataclass
class Filters:
    """Which tokens may be drawn: from the filtered variant on."""

    top_k_R: jax.Array  # i32; 0: off
    top_p_R: jax.Array  # f32; 1: off
    min_p_R: jax.Array  # f32; 0: off


@struct.dataclass
class LogitEdits:
    """What happens to the logits beforehand: in the full variant."""

    repetition_R: jax.Array  # f32; 1: off
    presence_R: jax.Array  # f32
    frequency_R: jax.Array  # f32
    bias_id_RX: jax.Array  # i32 token ids; -1: unused
    bias_RX: jax.Array  # f32
    mask_RW: jax.Array  # u32; bit i of word w allows id 32 * w + i


@struct.dataclass
class SamplingBatch:
    """Settings of each sampled row; a variant's extra ones are None in those before it."""

    slot_R: jax.Array  # i32 slot of the sequence; max_num_seqs for rows that sample nothing
    position_R: jax.Array  # i32 position of the new token
    target_R: jax.Array  # i32; -1: sample; otherwise the token whose log-probability is asked
    draw: DrawSettings | None = None
    filters: Filters | None = None
    edits: LogitEdits | None = None

    @classmethod
    def from_arrays(cls, arrays: dict[str, jax.Array]) -> SamplingBatch:
        """From the arrays that `input_fields` names."""

        def part(kind: type[Any]) -> Any:
            names = [field.name for field in dataclasses.fields(kind)]
            return kind(**{n: arrays[n] for n in names}) if names[0] in arrays else None

        return cls(
            slot_R=arrays["slot_R"],
            position_R=arrays["position_R"],
            target_R=arrays["target_R"],
            draw=part(DrawSettings),
            filters=part(Filters),
            edits=part(LogitEdits),
        )


def input_fields(variant: str, vocab: int) -> tuple[Field, ...]:
    """The arrays that a variant reads besides `position_R`: name, shape of a row, dtype."""
    added: dict[str, tuple[Field, ...]] = {
        "greedy": (("slot_R", (), "int32"), ("target_R", (), "int32")),
        "plain": (
            ("seed_R2", (2,), "uint32"),
            ("choice_R", (), "int32"),
            ("temperature_R", (), "float32"),
        ),
        "filtered": (
            ("top_k_R", (), "int32"),
            ("top_p_R", (), "float32"),
            ("min_p_R", (), "float32"),
        ),
        "logprobs": (),
        "full": (
            ("repetition_R", (), "float32"),
            ("presence_R", (), "float32"),
            ("frequency_R", (), "float32"),
            ("bias_id_RX", (MAX_LOGIT_BIAS,), "int32"),
            ("bias_RX", (MAX_LOGIT_BIAS,), "float32"),
            ("mask_RW", (-(-vocab // 32),), "uint32"),
        ),
    }
    names = VARIANTS[: VARIANTS.index(variant) + 1]
    return tuple(field for name in names for field in added[name])


@struct.dataclass
class SampleOutput:
    """Results of each row; log-probabilities only from the variants that compute them."""

    token_R: jax.Array  # i32 the new token, or the target
    logprob_R: jax.Array | None = None  # f32 raw natural log-probability of that token
    rank_R: jax.Array | None = None  # i32 1 + the number of tokens more likely than it
    top_id_RX: jax.Array | None = None  # i32 the most likely tokens, best first
    top_logprob_RX: jax.Array | None = None  # f32


@struct.dataclass
class PenaltyState:
    """Which tokens each slot has seen: bit 0 = in the prompt, the rest = times 2 put out."""

    count_BV: jax.Array  # i32[max_num_seqs + 1, V]; the last slot is padding's and stays 0

    @classmethod
    def zeros(cls, max_num_seqs: int, vocab: int) -> PenaltyState:
        return cls(jnp.zeros((max_num_seqs + 1, vocab), jnp.int32))


def count_tokens(state: PenaltyState, piece: jax.Array) -> PenaltyState:
    """Add known tokens to a slot's counts; a long sequence goes in several pieces.

    Args:
        piece: i32[3 + X]: the slot; how many of the leading ids belong to the prompt; whether
            the slot's counts start over first (0 or 1); then the ids, padded with -1.
    """
    slot, num_prompt, reset = piece[0], piece[1], piece[2]
    id_X = piece[3:]
    V = state.count_BV.shape[1]
    in_prompt_X = jnp.arange(id_X.shape[0]) < num_prompt
    id_X = jnp.where(id_X < 0, V, id_X)  # dropped, where -1 would mean the last token
    row_V = jnp.where(reset != 0, 0, state.count_BV[slot])
    prompt_V = jnp.zeros_like(row_V).at[id_X].max(in_prompt_X.astype(jnp.int32), mode="drop")
    output_V = jnp.zeros_like(row_V).at[id_X].add(jnp.where(in_prompt_X, 0, 2), mode="drop")
    return PenaltyState(state.count_BV.at[slot].set((row_V | prompt_V) + output_V))


def sample(
    logits_RV: jax.Array,
    sampling: SamplingBatch,
    variant: str,
    penalties: PenaltyState | None,
    *,
    max_logprobs: int,
    fused: bool | None = None,
    mesh: Mesh | None = None,
) -> tuple[SampleOutput, PenaltyState | None]:
    """Choose a token for every row, or measure the one that the row names.

    A draw depends on the row's logits and settings and on (seed, choice, position) alone. A row
    whose mask allows nothing is sampled as if it had no mask.

    Args:
        logits_RV: float32.
        sampling: `from_arrays` of what `input_fields` lists for this variant.
        variant: static, one of VARIANTS.
        penalties: token counts by slot, for "full" alone; None otherwise. The tokens chosen
            are added to them.
        max_logprobs: static, entries of `top_id_RX`.
        fused: static, draw by the kernels for NVIDIA GPUs; None: where the platform is one, and a
            device has all logits. Both ways draw the same token, unless rounding decides.
        mesh: static, the devices that share the vocabulary; None: one device.
    """
    edited_RV = logits_RV
    if sampling.edits is not None and penalties is not None:
        edited_RV = _edit(logits_RV, sampling.edits, penalties.count_BV[sampling.slot_R])
    if sampling.draw is None:
        token_R = argmax(edited_RV, mesh)
    else:
        if fused is None:
            fused = mesh is None and jax.default_backend() == "gpu"
        filters = {} if sampling.filters is None else vars(sampling.filters)
        # Where devices share the logits, a pass over them costs an exchange of sums.
        plain = draw_tokens if mesh is None else partial(draw_tokens, digit_bits=4)
        token_R = (sample_top_k_top_p if fused else plain)(
            edited_RV, position_R=sampling.position_R, **vars(sampling.draw), **filters
        )
    sampled_R = sampling.target_R < 0
    token_R = jnp.where(sampled_R, token_R, sampling.target_R)
    if penalties is not None:
        null_slot = penalties.count_BV.shape[0] - 1
        twice_R = jnp.where(sampled_R & (sampling.slot_R < null_slot), 2, 0)
        penalties = PenaltyState(penalties.count_BV.at[sampling.slot_R, token_R].add(twice_R))
    if VARIANTS.index(variant) < VARIANTS.index("logprobs"):
        return SampleOutput(token_R), penalties
    return _measure(logits_RV, token_R, max_logprobs, mesh), penalties


def _edit(logits_RV: jax.Array, edits: LogitEdits, count_RV: jax.Array) -> jax.Array:
    """Forbid, bias and penalise tokens."""
    R, V = logits_RV.shape
    # Whole words on each of the devices that share the vocabulary; what pads it is not allowed.
    mask_RW = jnp.pad(edits.mask_RW, ((0, 0), (0, -(-V // 32) - edits.mask_RW.shape[1])))
    bits_RW32 = (mask_RW[..., None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    allowed_RV = bits_RW32.reshape(R, -1)[:, :V] != 0
    allowed_RV |= ~allowed_RV.any(axis=-1, keepdims=True)

    bias_id_RX = jnp.where(edits.bias_id_RX < 0, V, edits.bias_id_RX)
    x_RV = logits_RV.at[jnp.arange(R)[:, None], bias_id_RX].add(edits.bias_RX, mode="drop")

    repetition_R1 = edits.repetition_R[:, None]
    repeated_RV = jnp.where(x_RV > 0, x_RV / repetition_R1, x_RV * repetition_R1)
    # Finite, however small the penalty that was divided by.
    x_RV = jnp.where(count_RV != 0, jnp.clip(repeated_RV, -LARGE, LARGE), x_RV)
    times_RV = count_RV >> 1
    x_RV -= edits.frequency_R[:, None] * times_RV
    x_RV -= edits.presence_R[:, None] * (times_RV > 0)
    return jnp.where(allowed_RV, x_RV, -jnp.inf)


def _measure(
    logits_RV: jax.Array, token_R: jax.Array, max_logprobs: int, mesh: Mesh | None
) -> SampleOutput:
    """Raw log-probability and rank of the tokens, and the most likely ones."""
    log_sum_R1 = jax.nn.logsumexp(logits_RV, axis=-1, keepdims=True)
    logit_R1 = jnp.take_along_axis(logits_RV, token_R[:, None], axis=-1)
    top_RX, top_id_RX = top_k(logits_RV, min(max_logprobs, logits_RV.shape[1]), mesh)
    return SampleOutput(
        token_R,
        (logit_R1 - log_sum_R1)[:, 0],
        1 + (logits_RV > logit_R1).sum(axis=-1, dtype=jnp.int32),
        top_id_RX,
        top_RX - log_sum_R1,
    )
