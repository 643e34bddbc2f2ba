"""Drawing tokens under min-p, top-k and top-p in plain XLA: runs on every platform.

There is no sort: a filter is a threshold, found digit by digit of the logits' order.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

GREEDY_TEMPERATURE = 1e-5  # below it a row takes its most likely token


def draw_tokens(
    logits_RV: jax.Array,
    *,
    seed_R2: jax.Array,
    choice_R: jax.Array,
    position_R: jax.Array,
    temperature_R: jax.Array,
    top_k_R: jax.Array | None = None,
    top_p_R: jax.Array | None = None,
    min_p_R: jax.Array | None = None,
    digit_bits: int = 1,
) -> jax.Array:
    """Draw a token of each row from what min-p, top-k and top-p leave, in this order.

    With x = (logit - largest logit) / temperature: min-p keeps exp(x) >= min_p; top-k keeps x at
    least the k-th largest of those; top-p keeps x at least the largest t for which those x >= t
    have top_p of the mass, the sum of exp(x), of all that top-k kept. So what ties with the last
    one kept is kept. The Gumbel trick draws: the largest x + noise wins, the first in a tie, and
    the noise is `jax.random.gumbel` of the key `seed` with `choice` and `position` folded in.

    Args:
        logits_RV: float32.
        seed_R2: uint32, the words of a threefry key.
        choice_R, position_R: int32.
        temperature_R: float32; below GREEDY_TEMPERATURE: the first of the largest logits.
        top_k_R: int32; 0, or None: off.
        top_p_R: float32; 1, or None: off.
        min_p_R: float32; 0, or None: off.
        digit_bits: of a threshold that a pass over the logits settles: more of them for fewer
            passes, which pays where devices share the logits and exchange their sums each time.

    Returns:
        int32 [R]; some token even where a row has no largest logit.
    """
    # Relative to the largest, so that a tiny temperature makes no infinity of it.
    temperature_R1 = jnp.maximum(temperature_R, GREEDY_TEMPERATURE)[:, None]
    x_RV = (logits_RV - logits_RV.max(axis=-1, keepdims=True)) / temperature_R1
    noisy_RV = x_RV + _gumbel(seed_R2, choice_R, position_R, logits_RV.shape[1])
    if not (top_k_R is None and top_p_R is None and min_p_R is None):
        kept_RV = kept(
            x_RV, top_k_R=top_k_R, top_p_R=top_p_R, min_p_R=min_p_R, digit_bits=digit_bits
        )
        noisy_RV = jnp.where(kept_RV, noisy_RV, -jnp.inf)
    return jnp.where(temperature_R < GREEDY_TEMPERATURE, argmax(logits_RV), argmax(noisy_RV))


def argmax(x_RV: jax.Array) -> jax.Array:
    """First of the largest; some index even where a row has none.

    One reduction of pairs, which a GPU does in one pass; and two plain ones, which XLA's CPU
    backend vectorises.
    """

    def in_two(x_RV: jax.Array) -> jax.Array:
        V = x_RV.shape[1]
        best_RV = x_RV == x_RV.max(axis=-1, keepdims=True)
        return jnp.minimum(jnp.where(best_RV, jnp.arange(V), V).min(axis=-1), V - 1)  # if all NaN

    in_one = partial(lax.argmax, axis=1, index_dtype=jnp.int32)
    return lax.platform_dependent(x_RV, cuda=in_one, default=in_two)


def kept(
    x_RV: jax.Array,
    *,
    top_k_R: jax.Array | None,
    top_p_R: jax.Array | None,
    min_p_R: jax.Array | None,
    digit_bits: int = 1,
) -> jax.Array:
    """Which tokens the filters leave; `x_RV` is at most 0, and 0 for the best."""
    V = x_RV.shape[1]
    weight_RV = jnp.exp(x_RV)
    kept_RV = jnp.full(x_RV.shape, True) if min_p_R is None else weight_RV >= min_p_R[:, None]
    key_RV = jnp.where(kept_RV, _ordered_bits(x_RV), 0)
    if top_k_R is not None:
        top_k_R = jnp.where(top_k_R > 0, jnp.minimum(top_k_R, V), V)
        kept_RV &= key_RV >= threshold(key_RV, jnp.int32(1), top_k_R, digit_bits)[:, None]
    if top_p_R is not None:
        weight_RV = jnp.where(kept_RV, weight_RV, 0)
        # The best token alone weighs 1: a top_p that rounds to nothing still keeps it.
        mass_R = jnp.maximum(top_p_R * weight_RV.sum(axis=-1), 1e-30)
        within_RV = key_RV >= threshold(key_RV, weight_RV, mass_R, digit_bits)[:, None]
        kept_RV &= within_RV | (top_p_R >= 1)[:, None]
    return kept_RV


def threshold(
    key_RV: jax.Array, weight_RV: jax.Array, need_R: jax.Array, digit_bits: int = 1
) -> jax.Array:
    """The largest uint32 t with sum(weight of keys >= t) >= need; 0 if even all do not reach it.

    One digit a pass, the highest first. The sum falls as t grows: rounding keeps that, since all
    passes add in the same order.

    Args:
        digit_bits: of a digit; divides 32.
    """

    def settle(i: jax.Array, t_R: jax.Array) -> jax.Array:
        shift = (32 - digit_bits * (i + 1)).astype(jnp.uint32)
        digit_R = jnp.zeros_like(t_R)
        for digit in range(1, 1 << digit_bits):
            trial_R = t_R | (jnp.uint32(digit) << shift)
            sum_R = jnp.where(key_RV >= trial_R[:, None], weight_RV, 0).sum(axis=-1)
            digit_R += sum_R >= need_R  # those that reach it come before those that do not
        return t_R | (digit_R << shift)

    return lax.fori_loop(0, 32 // digit_bits, settle, jnp.zeros(need_R.shape, jnp.uint32))


def _gumbel(seed_R2: jax.Array, choice_R: jax.Array, position_R: jax.Array, V: int) -> jax.Array:
    def row(seed_2: jax.Array, choice: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(seed_2, impl="threefry2x32")
        key = jax.random.fold_in(jax.random.fold_in(key, choice), position)
        return jax.random.gumbel(key, (V,), jnp.float32)

    return jax.vmap(row)(seed_R2, choice_R, position_R)


def _ordered_bits(x: jax.Array) -> jax.Array:
    """uint32 in the same order as the float32s (-0 = 0)."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits & sign, ~bits, bits | sign)
