"""Choosing tokens: a pure function from logits and sampling settings to tokens.

It comes in variants, each a superset of the one before: a row gets the same token whichever of
those that serve it runs. The order of a row's rules is vLLM's: log-probabilities are the raw
ones, of the unmodified logits; then allowed tokens, bias, penalties, temperature, min_p, top_k,
and top_p over what top_k left. A token that ties with the last one kept is kept as well.

There is no sort: a filter is a threshold, found digit by digit of the logits' bits.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jaxpaged.sampling_params import MAX_LOGIT_BIAS

VARIANTS = ("greedy", "plain", "filtered", "logprobs", "full")
LARGE = 1e30  # beyond any logit, and finite
GREEDY_TEMPERATURE = 1e-5  # below it the most likely token is taken, as in vLLM

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
    """
    edited_RV = logits_RV
    if sampling.edits is not None and penalties is not None:
        edited_RV = _edit(logits_RV, sampling.edits, penalties.count_BV[sampling.slot_R])
    token_R = _argmax(edited_RV)
    if sampling.draw is not None:
        greedy_R = sampling.draw.temperature_R < GREEDY_TEMPERATURE
        drawn_R = _draw(edited_RV, sampling.draw, sampling.position_R, sampling.filters)
        token_R = jnp.where(greedy_R, token_R, drawn_R)
    sampled_R = sampling.target_R < 0
    token_R = jnp.where(sampled_R, token_R, sampling.target_R)
    if penalties is not None:
        null_slot = penalties.count_BV.shape[0] - 1
        twice_R = jnp.where(sampled_R & (sampling.slot_R < null_slot), 2, 0)
        penalties = PenaltyState(penalties.count_BV.at[sampling.slot_R, token_R].add(twice_R))
    if VARIANTS.index(variant) < VARIANTS.index("logprobs"):
        return SampleOutput(token_R), penalties
    return _measure(logits_RV, token_R, max_logprobs), penalties


def _argmax(x_RV: jax.Array) -> jax.Array:
    """First of the largest: two plain reductions, which XLA's CPU backend vectorises."""
    V = x_RV.shape[1]
    best_RV = x_RV == x_RV.max(axis=-1, keepdims=True)
    return jnp.minimum(jnp.where(best_RV, jnp.arange(V), V).min(axis=-1), V - 1)  # if all NaN


def _edit(logits_RV: jax.Array, edits: LogitEdits, count_RV: jax.Array) -> jax.Array:
    """Forbid, bias and penalise tokens."""
    R, V = logits_RV.shape
    bits_RW32 = (edits.mask_RW[..., None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
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


def _draw(
    logits_RV: jax.Array, draw: DrawSettings, position_R: jax.Array, filters: Filters | None
) -> jax.Array:
    """A random token of each row, by the Gumbel trick: noise belongs to the token's id."""
    # Relative to the largest, so that a tiny temperature makes no infinity of it.
    temperature_R1 = jnp.maximum(draw.temperature_R, GREEDY_TEMPERATURE)[:, None]
    x_RV = (logits_RV - logits_RV.max(axis=-1, keepdims=True)) / temperature_R1
    noisy_RV = x_RV + _gumbel(draw, position_R, logits_RV.shape[1])
    if filters is not None:
        noisy_RV = jnp.where(_kept(x_RV, filters), noisy_RV, -jnp.inf)
    return _argmax(noisy_RV)


def _gumbel(draw: DrawSettings, position_R: jax.Array, V: int) -> jax.Array:
    def row(seed_2: jax.Array, choice: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(seed_2, impl="threefry2x32")
        key = jax.random.fold_in(jax.random.fold_in(key, choice), position)
        return jax.random.gumbel(key, (V,), jnp.float32)

    return jax.vmap(row)(draw.seed_R2, draw.choice_R, position_R)


def _kept(x_RV: jax.Array, filters: Filters) -> jax.Array:
    """Which tokens min_p, top_k and top_p leave; `x_RV` is at most 0, and 0 for the best."""
    V = x_RV.shape[1]
    weight_RV = jnp.exp(x_RV)
    kept_RV = weight_RV >= filters.min_p_R[:, None]
    key_RV = jnp.where(kept_RV, _ordered_bits(x_RV), 0)

    top_k_R = jnp.where(filters.top_k_R > 0, jnp.minimum(filters.top_k_R, V), V)
    kept_RV &= key_RV >= _threshold(key_RV, jnp.int32(1), top_k_R)[:, None]

    weight_RV = jnp.where(kept_RV, weight_RV, 0)
    # The best token alone weighs 1: a top_p that rounds to nothing still keeps it.
    mass_R = jnp.maximum(filters.top_p_R * weight_RV.sum(axis=-1), 1e-30)
    within_RV = key_RV >= _threshold(key_RV, weight_RV, mass_R)[:, None]
    return kept_RV & (within_RV | (filters.top_p_R >= 1)[:, None])


def _ordered_bits(x: jax.Array) -> jax.Array:
    """uint32 in the same order as the float32s (-0 = 0)."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits & sign, ~bits, bits | sign)


def _threshold(
    key_RV: jax.Array, weight_RV: jax.Array, need_R: jax.Array, digit_bits: int | None = None
) -> jax.Array:
    """The largest uint32 t with sum(weight of keys >= t) >= need; 0 if even all do not reach it.

    One digit a pass, the highest first. The sum falls as t grows (rounding keeps that: all
    passes add in the same order), so the digit is the number of its values that reach `need`.
    A pass of long digits reads less and compares more, which suits everything but a CPU.
    """
    if digit_bits is None:
        digit_bits = 1 if jax.default_backend() == "cpu" else 4

    def settle(i: jax.Array, t_R: jax.Array) -> jax.Array:
        shift = (32 - digit_bits * (i + 1)).astype(jnp.uint32)
        digit_R = jnp.zeros_like(t_R)
        for value in range(1, 1 << digit_bits):
            trial_R = t_R | (jnp.uint32(value) << shift)
            sum_R = jnp.where(key_RV >= trial_R[:, None], weight_RV, 0).sum(axis=-1)
            digit_R += sum_R >= need_R
        return t_R | (digit_R << shift)

    return lax.fori_loop(0, 32 // digit_bits, settle, jnp.zeros(need_R.shape, jnp.uint32))


def _measure(logits_RV: jax.Array, token_R: jax.Array, max_logprobs: int) -> SampleOutput:
    """Raw log-probability and rank of the tokens, and the most likely ones."""
    log_sum_R1 = jax.nn.logsumexp(logits_RV, axis=-1, keepdims=True)
    logit_R1 = jnp.take_along_axis(logits_RV, token_R[:, None], axis=-1)
    top_RX, top_id_RX = lax.top_k(logits_RV, min(max_logprobs, logits_RV.shape[1]))
    return SampleOutput(
        token_R,
        (logit_R1 - log_sum_R1)[:, 0],
        1 + (logits_RV > logit_R1).sum(axis=-1, dtype=jnp.int32),
        top_id_RX,
        top_RX - log_sum_R1,
    )
