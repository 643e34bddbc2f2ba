"""Drawing tokens under min-p, top-k and top-p without a sort, in Pallas' Triton dialect.

One kernel reads the logits once and leaves the largest logit and the mass of every group of 32
neighbours. The k-th largest of the groups' largest logits is a lower bound of the k-th largest
logit, and masses bound top-p's threshold likewise; so a second kernel, which sees the groups
alone, lists those that may hold a token that is kept: few, as a rule, and all of them where the
filters keep nearly everything. Where many are listed, two more passes narrow down where the
threshold lies. The tokens that are left to look at are gathered, the exact threshold is found
among them, several pivots a pass, and the last kernel draws, making noise where a token is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.sampling import GREEDY_TEMPERATURE

GROUP = 32  # neighbouring tokens that are listed together: a line of memory
PIVOTS = 8  # thresholds tried in a pass
FAR_KEY = 0x42D00000  # of distance 104: farther tokens weigh 0 in float32 and are never drawn
NO_KEY = 0x7FFFFFFF
MAX_NOISE = 15.95  # more than any of `gumbel`, whose uniform numbers end at 1 - 2 ** -23
LINEAR_PASSES = 4  # passes that divide a bracket evenly in distance; later ones in key


@dataclass(frozen=True)
class TuningConfig:
    """How sampling is laid out on the card; never changes what it computes, save rounding.

    Attributes:
        block: logits that a program handles at once, a power of two from 256 to 4096.
        num_warps: warps of a program, a power of two up to 16.
        programs: programs that whole rows are shared out to.
        many_groups: groups listed of a row from which on the search for top-p's threshold is
            narrowed down by all programs first.
        gathered: tokens of a row that are gathered at most, a multiple of `block`.
    """

    block: int
    num_warps: int
    programs: int
    many_groups: int = 512
    gathered: int = 8192

    def __post_init__(self) -> None:
        if self.block not in (256, 512, 1024, 2048, 4096):
            raise ValueError(f"block must be 256, 512, 1024, 2048 or 4096, got {self.block}")
        if self.num_warps not in (1, 2, 4, 8, 16):
            raise ValueError(f"num_warps must be 1, 2, 4, 8 or 16, got {self.num_warps}")
        if self.programs < 1:
            raise ValueError(f"programs must be positive, got {self.programs}")
        if self.many_groups < 0:
            raise ValueError(f"many_groups must not be negative, got {self.many_groups}")
        if self.gathered < 1 or self.gathered % self.block:
            raise ValueError(f"gathered must be a multiple of block, got {self.gathered}")


def tuning_config(*, R: int) -> TuningConfig:
    """The setting for R rows (H200)."""
    return TuningConfig(1024, 4, 2112) if R >= 64 else TuningConfig(1024, 8, 1056)


def sample_top_k_top_p(
    logits_RV: jax.Array,
    *,
    seed_R2: jax.Array,
    choice_R: jax.Array,
    position_R: jax.Array,
    temperature_R: jax.Array,
    top_k_R: jax.Array | None = None,
    top_p_R: jax.Array | None = None,
    min_p_R: jax.Array | None = None,
    config: TuningConfig | None = None,
    interpret: bool = False,
) -> jax.Array:
    """What `sampling.draw_tokens` does, with the same arguments, but for rounding.

    Args:
        logits_RV: float32.
        config: layout on the card; None: `tuning_config`.
        interpret: run on any platform, slowly.

    Raises:
        ValueError: other logits.
    """
    R, V = logits_RV.shape
    if logits_RV.dtype != jnp.float32:
        raise ValueError(f"logits must be float32, got {logits_RV.dtype}")
    config = config or tuning_config(R=R)
    greedy_R = temperature_R < GREEDY_TEMPERATURE
    temperature_R = jnp.where(greedy_R, 1.0, temperature_R)
    top_k_R = jnp.zeros((R,), jnp.int32) if top_k_R is None else top_k_R
    top_p_R = jnp.ones((R,), jnp.float32) if top_p_R is None else top_p_R
    min_p_R = jnp.zeros((R,), jnp.float32) if min_p_R is None else min_p_R
    settings = [
        temperature_R,
        jnp.where(greedy_R | (top_k_R >= V), 0, top_k_R),
        jnp.where(greedy_R, 1.0, top_p_R),
        jnp.where(greedy_R, 1.0, min_p_R),  # only the best weigh 1
    ]
    block, G = config.block, pl.cdiv(V, GROUP)
    gather_block, gather_warps = min(4 * block, 4096), min(4 * config.num_warps, 16)
    S = min(pl.cdiv(config.programs, R), pl.cdiv(V, block))
    call = partial(
        pl.pallas_call,
        compiler_params=pltriton.CompilerParams(num_warps=config.num_warps, num_stages=2),
        interpret=interpret,
    )

    def like(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    max_RG, mass_RG = call(
        partial(_survey_kernel, S=S, block=block),
        grid=(R * S,),
        out_shape=[like(R, G), like(R, G)],
        name="sample_survey",
    )(logits_RV, temperature_R)
    group_RG, listed_R, bound_R, max_R, mass_R = call(
        partial(_list_kernel, block=block),
        grid=(R,),
        out_shape=[
            like(R, G + block, dtype=jnp.int32),
            like(R, dtype=jnp.int32),
            like(R, dtype=jnp.int32),
            like(R),
            like(R),
        ],
        name="sample_list",
    )(max_RG, mass_RG, *settings, logits_RV, seed_R2, choice_R, position_R)
    rows = [logits_RV, group_RG, listed_R, max_R, temperature_R]
    top_k_R, top_p_R, min_p_R = settings[1:]
    bracket = _narrow(call, config, rows, bound_R, mass_R, top_k_R, top_p_R, min_p_R, S)
    gathered_RX, count_R = call(
        partial(_gather_kernel, gathered=config.gathered, block=gather_block),
        grid=(R,),
        out_shape=[like(R, config.gathered + gather_block), like(R, dtype=jnp.int32)],
        compiler_params=pltriton.CompilerParams(num_warps=gather_warps, num_stages=1),
        name="sample_gather",
    )(*rows, *bracket[:2], top_k_R, top_p_R, min_p_R)
    key_R = call(
        partial(_threshold_kernel, gathered=config.gathered, block=block),
        grid=(R,),
        out_shape=like(R, dtype=jnp.int32),
        name="sample_threshold",
    )(*rows, gathered_RX, count_R, *bracket, mass_R, top_k_R, top_p_R, min_p_R)
    noisy_RS, token_RS = call(
        partial(_draw_kernel, S=S, block=block),
        grid=(R * S,),
        out_shape=[like(R, S), like(R, S, dtype=jnp.int32)],
        name="sample_draw",
    )(*rows, key_R, min_p_R, greedy_R, seed_R2, choice_R, position_R)
    best_RS = noisy_RS == noisy_RS.max(axis=1, keepdims=True)
    return jnp.minimum(jnp.where(best_RS, token_RS, V).min(axis=1), V - 1)


def _load(ref: Any, r: jax.Array, index: jax.Array, mask: jax.Array, other: Any) -> jax.Array:
    return pltriton.load(ref.at[jnp.full_like(index, r), index], mask=mask, other=other)


def _key(x: jax.Array) -> jax.Array:
    """int32 that grows with the distance -x of an x <= 0; above all others for -inf and NaN."""
    return lax.bitcast_convert_type(jnp.abs(x), jnp.int32)


def _distance(key: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(key, jnp.float32)


def _survey_kernel(
    logits_ref: Any, temperature_ref: Any, max_ref: Any, mass_ref: Any, *, S: int, block: int
) -> None:
    """Largest logit of each group, and its tokens' mass relative to that."""
    V, G = logits_ref.shape[1], max_ref.shape[1]
    pid = pl.program_id(0)
    r, s = lax.div(pid, S), lax.rem(pid, S)
    scale = 1.4426950408889634 / temperature_ref[r]  # of powers of 2
    groups = block // GROUP
    token_XY = jnp.arange(groups)[:, None] * GROUP + jnp.arange(GROUP)[None, :]

    def fold(i: jax.Array, _: Any) -> Any:
        tile = s + i * S
        token = tile * block + token_XY
        logit = _load(logits_ref, r, token, token < V, -jnp.inf)
        largest_X = logit.max(axis=1)
        base_X = jnp.where(largest_X == -jnp.inf, 0.0, largest_X)
        mass_X = jnp.exp2((logit - base_X[:, None]) * scale).sum(axis=1)
        g_X = tile * groups + jnp.arange(groups)
        r_X = jnp.full_like(g_X, r)
        pltriton.store(max_ref.at[r_X, g_X], largest_X, mask=g_X < G)
        pltriton.store(mass_ref.at[r_X, g_X], mass_X, mask=g_X < G)
        return _

    lax.fori_loop(0, lax.div(pl.cdiv(V, block) - s + (S - 1), S), fold, 0)


class _Bracket(NamedTuple):
    """Where a threshold lies: what keys <= low hold is too little, keys <= high hold enough."""

    low: jax.Array
    high: jax.Array
    low_value: jax.Array  # what keys <= low hold, a number or a mass


def _pivots(low: jax.Array, high: jax.Array, linear: jax.Array | bool) -> jax.Array:
    """Keys that divide a bracket in distance, or in key, along a new last axis; `high` is last."""
    nth_P = jnp.arange(PIVOTS) + 1
    low, high = low[..., None], high[..., None]
    nearest = _distance(jnp.maximum(low, 0))
    even_P = _key(nearest + (_distance(high) - nearest) * (nth_P / PIVOTS))
    step = jnp.maximum(lax.div(high - low, PIVOTS), 1)
    pivot_P = jnp.where(linear, even_P, low + step * nth_P)
    pivot_P = jnp.minimum(jnp.maximum(pivot_P, low + 1), high)
    return jnp.where(nth_P == PIVOTS, high, pivot_P)


def _narrow(
    call: Any,
    config: TuningConfig,
    rows: list[jax.Array],
    bound_R: jax.Array,
    mass_R: jax.Array,
    top_k_R: jax.Array,
    top_p_R: jax.Array,
    min_p_R: jax.Array,
    S: int,
) -> _Bracket:
    """Rows that list many groups get a bracket of few tokens; the others all up to their bound."""
    R = bound_R.shape[0]
    by_count_R = top_k_R > 0
    # A bound by number is tight: few more tokens than groups are within it.
    many_R = jnp.where(by_count_R, config.gathered // 2, config.many_groups)
    wide_R = (rows[2] > many_R) & (by_count_R | ((top_p_R < 1) & (min_p_R == 0)))
    need_R = jnp.where(by_count_R, top_k_R.astype(jnp.float32), _needed(top_p_R, mass_R))
    b = _Bracket(jnp.full_like(bound_R, -1), bound_R, jnp.zeros_like(mass_R))
    for _ in range(2):
        pivot_RP = _pivots(b.low, b.high, True)
        part_RSP = call(
            partial(_narrow_kernel, S=S, block=config.block),
            grid=(R * S,),
            out_shape=jax.ShapeDtypeStruct((R, S, PIVOTS), jnp.float32),
            name="sample_narrow",
        )(*rows, pivot_RP, top_k_R, min_p_R, wide_R)
        value_RP = part_RSP.sum(axis=1)
        enough_RP = value_RP >= need_R[:, None]
        # What is too little stays so in other orders of summation: a hair of mass is left over.
        short_RP = value_RP < jnp.where(by_count_R, need_R, need_R * (1 - 1e-5))[:, None]
        low_R = jnp.maximum(b.low, jnp.where(short_RP, pivot_RP, -1).max(axis=1))
        value_R = jnp.maximum(b.low_value, jnp.where(short_RP, value_RP, 0.0).max(axis=1))
        high_R = jnp.where(enough_RP, pivot_RP, b.high[:, None]).min(axis=1)
        b = _Bracket(
            jnp.where(wide_R, low_R, b.low),
            jnp.where(wide_R, high_R, b.high),
            jnp.where(wide_R, value_R, b.low_value),
        )
    return b


def _needed(top_p: jax.Array, mass: jax.Array) -> jax.Array:
    # The best token alone weighs 1: a top_p that rounds to nothing still keeps it.
    return jnp.maximum(top_p * mass, 1e-30)


class _Found(NamedTuple):
    """A bracket in a search, with what it needs to know when to stop."""

    low: jax.Array
    high: jax.Array
    low_count: jax.Array
    high_count: jax.Array
    high_mass: jax.Array
    passes: jax.Array
    done: jax.Array


def _search(
    measure: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
    need: jax.Array,
    high: jax.Array,
    *,
    by_count: bool,
    skip: jax.Array,
    tolerance: int,
    low: jax.Array | int = -1,
) -> _Found:
    """The smallest key above `low` that holds `need` tokens or mass; `high` where none does.

    Args:
        measure: number and mass of what has a key up to each of some pivots.
        skip: no search is wanted.
        tolerance: stop where the bracket holds this many tokens (and a quarter if not 1).
    """

    def divide(b: _Found) -> _Found:
        pivot_P = _pivots(b.low, b.high, b.passes < LINEAR_PASSES)
        count_P, mass_P = measure(pivot_P)
        enough_P = (count_P if by_count else mass_P) >= need
        low = jnp.maximum(b.low, jnp.where(enough_P, -1, pivot_P).max())
        high = jnp.where(enough_P, pivot_P, b.high).min()
        low_count = jnp.maximum(b.low_count, jnp.where(enough_P, 0, count_P).max())
        high_count = jnp.where(enough_P, count_P, NO_KEY).min()
        high_mass = jnp.where(enough_P, mass_P, jnp.inf).min()
        # Not even all of them hold enough.
        none = high_count == NO_KEY
        high_count = jnp.where(none, count_P.max(), high_count)
        high_mass = jnp.where(none, mass_P.max(), high_mass)
        slack = tolerance if tolerance == 1 else tolerance + lax.div(low_count, 4)
        done = none | (high - low <= 1) | (high_count - low_count <= slack)
        if by_count:
            done |= high_count == need
        return _Found(low, high, low_count, high_count, high_mass, b.passes + 1, done)

    zero = jnp.int32(0)
    start = _Found(jnp.int32(low), high, zero, zero, jnp.float32(0), zero, skip)
    return lax.while_loop(lambda b: ~b.done, divide, start)


def _list_kernel(
    max_ref: Any,
    mass_ref: Any,
    temperature_ref: Any,
    top_k_ref: Any,
    top_p_ref: Any,
    min_p_ref: Any,
    logits_ref: Any,
    seed_ref: Any,
    choice_ref: Any,
    position_ref: Any,
    group_ref: Any,
    listed_ref: Any,
    key_ref: Any,
    row_max_ref: Any,
    row_mass_ref: Any,
    *,
    block: int,
) -> None:
    """The groups that may hold a token that is kept, and a key that no such token exceeds."""
    G = max_ref.shape[1]
    r = pl.program_id(0)
    temperature, top_k = temperature_ref[r], top_k_ref[r]
    top_p, min_p = top_p_ref[r], min_p_ref[r]
    tiles = pl.cdiv(G, block)
    g_B = jnp.arange(block)

    def largest(i: jax.Array, other: float = -jnp.inf) -> jax.Array:
        return _load(max_ref, r, i * block + g_B, i * block + g_B < G, other)

    def extremes(i: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        logit_B = largest(i)
        finite_B = jnp.where(logit_B > -jnp.inf, logit_B, jnp.inf)
        return jnp.maximum(state[0], logit_B), jnp.minimum(state[1], finite_B)

    infinite_B = jnp.full((block,), jnp.inf)
    best_B, worst_B = lax.fori_loop(0, tiles, extremes, (-infinite_B, infinite_B))
    best = best_B.max()
    farthest = jnp.minimum(_key((worst_B.min() - best) / temperature), FAR_KEY)

    def x_of(i: jax.Array) -> jax.Array:
        return (largest(i) - best) / temperature

    def mass_of(i: jax.Array, x_B: jax.Array) -> jax.Array:
        g = i * block + g_B
        return _load(mass_ref, r, g, g < G, 0.0) * jnp.exp(x_B)

    def measure(pivot_P: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Mass is at least this: of a group's tokens only those nearer than the pivot count."""
        beyond_P = (GROUP - 1) * jnp.exp(-_distance(pivot_P))

        def fold(i: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            x_B = x_of(i)
            within_PB = _key(x_B)[None, :] <= pivot_P[:, None]
            least_PB = jnp.maximum(
                jnp.exp(x_B)[None, :], mass_of(i, x_B)[None, :] - beyond_P[:, None]
            )
            return (
                state[0] + within_PB.astype(jnp.int32),
                state[1] + jnp.where(within_PB, least_PB, 0.0),
            )

        zeros = (jnp.zeros((PIVOTS, block), jnp.int32), jnp.zeros((PIVOTS, block), jnp.float32))
        count_PB, mass_PB = lax.fori_loop(0, tiles, fold, zeros)
        return count_PB.sum(axis=1), mass_PB.sum(axis=1)

    total_B = lax.fori_loop(
        0, tiles, lambda i, sum_B: sum_B + mass_of(i, x_of(i)), jnp.zeros((block,), jnp.float32)
    )
    total = total_B.sum()
    key = jnp.int32(FAR_KEY)
    search = partial(_search, measure, high=farthest, tolerance=8)
    skip = (top_k <= 0) | (top_k > G)
    found = search(top_k, by_count=True, skip=skip)
    key = jnp.where(skip | (found.high_count < top_k), key, found.high)
    # Top-p's bound is of use if the tokens that it takes its share of need not be listed.
    skip = (top_k > 0) | (min_p > 0) | ~(top_p < 1)
    need = top_p * total * (1 + 1e-5)  # more than rounding takes off
    found = search(need, by_count=False, skip=skip)
    key = jnp.where(skip | ~(found.high_mass >= need), key, found.high)
    # All beyond distance y weigh at most V * exp(-y).
    spare = jnp.maximum((1 - 1e-5) - top_p, 1e-30) * total
    beyond = _key(jnp.maximum(jnp.log(logits_ref.shape[1] / spare), 0.0) + 1e-3)
    key = jnp.where(skip, key, jnp.minimum(key, beyond))
    by_min_p = -jnp.log(jnp.maximum(min_p, 1e-37)) * (1 + 1e-5) + 1e-5
    key = jnp.where(min_p > 0, jnp.minimum(key, _key(by_min_p)), key)

    def by_noise() -> jax.Array:
        """Without filters: noise cannot lift a token beyond this to the best group's height."""

        def first(i: jax.Array, at_B: jax.Array) -> jax.Array:
            return jnp.minimum(at_B, jnp.where(largest(i) == best, i * block + g_B, G - 1))

        best_group = lax.fori_loop(0, tiles, first, jnp.full((block,), G - 1)).min()
        token = best_group * GROUP + jnp.arange(GROUP)
        logit = _load(logits_ref, r, token, token < logits_ref.shape[1], -jnp.inf)
        words = _noise_key(seed_ref, choice_ref, position_ref, r)
        noisy = ((logit - best) / temperature + gumbel(words, token)).max()
        return jnp.minimum(key, _key(MAX_NOISE - noisy))

    filtered = (top_k > 0) | (top_p < 1) | (min_p > 0)
    key = lax.cond(filtered, lambda: key, by_noise)

    def write(i: jax.Array, listed: jax.Array) -> jax.Array:
        wanted_B = _key(x_of(i)) <= key
        ones_B = wanted_B.astype(jnp.int32)
        # Interpret mode writes masked places back: theirs must not be another's.
        place_B = jnp.where(wanted_B, listed + jnp.cumsum(ones_B) - 1, G + g_B)
        place = group_ref.at[jnp.full_like(place_B, r), place_B]
        pltriton.store(place, i * block + g_B, mask=wanted_B)
        return listed + ones_B.sum()

    listed_ref[r] = lax.fori_loop(0, tiles, write, jnp.int32(0))
    key_ref[r] = key
    row_max_ref[r] = best
    row_mass_ref[r] = total


class _Row(NamedTuple):
    """The tokens of a row's listed groups, a tile of `block` at a time."""

    logits_ref: Any
    group_ref: Any
    r: jax.Array
    listed: jax.Array
    best: jax.Array
    temperature: jax.Array
    block: int

    def tiles(self) -> jax.Array:
        groups = self.block // GROUP
        return lax.div(self.listed + (groups - 1), groups)

    def share(self, s: jax.Array, S: int) -> jax.Array:
        """Number of the tiles s, s + S, and so on."""
        return lax.div(jnp.maximum(self.tiles() - s, 0) + (S - 1), S)

    def load(self, i: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Tokens, and x of each."""
        lane_B = jnp.arange(self.block)
        nth_B = i * (self.block // GROUP) + lax.div(lane_B, GROUP)
        live_B = nth_B < self.listed
        group_B = _load(self.group_ref, self.r, nth_B, live_B, 0)
        token_B = group_B * GROUP + lax.rem(lane_B, GROUP)
        live_B &= token_B < self.logits_ref.shape[1]
        logit_B = _load(self.logits_ref, self.r, token_B, live_B, -jnp.inf)
        return token_B, (logit_B - self.best) / self.temperature


def _narrow_kernel(
    logits_ref: Any,
    group_ref: Any,
    listed_ref: Any,
    max_ref: Any,
    temperature_ref: Any,
    pivot_ref: Any,
    top_k_ref: Any,
    min_p_ref: Any,
    wide_ref: Any,
    part_ref: Any,
    *,
    S: int,
    block: int,
) -> None:
    """Number, or mass without top-k, of the tokens of every S-th tile up to each pivot."""
    pid = pl.program_id(0)
    r, s = lax.div(pid, S), lax.rem(pid, S)

    @pl.when(wide_ref[r])
    def _() -> None:
        row = _Row(logits_ref, group_ref, r, listed_ref[r], max_ref[r], temperature_ref[r], block)
        by_count, min_p = top_k_ref[r] > 0, min_p_ref[r]
        nth_P = jnp.arange(PIVOTS)
        pivot_P = pltriton.load(pivot_ref.at[jnp.full_like(nth_P, r), nth_P])

        def fold(i: jax.Array, sum_PB: jax.Array) -> jax.Array:
            x_B = row.load(s + i * S)[1]
            weight_B = jnp.exp(x_B)
            key_B = jnp.where(weight_B >= min_p, _key(x_B), NO_KEY)
            value_B = jnp.where(by_count, 1.0, weight_B)
            return sum_PB + jnp.where(key_B[None, :] <= pivot_P[:, None], value_B[None, :], 0.0)

        zeros_PB = jnp.zeros((PIVOTS, block), jnp.float32)
        sum_P = lax.fori_loop(0, row.share(s, S), fold, zeros_PB).sum(axis=1)
        place = part_ref.at[jnp.full_like(nth_P, r), jnp.full_like(nth_P, s), nth_P]
        pltriton.store(place, sum_P)


def _gather_kernel(
    logits_ref: Any,
    group_ref: Any,
    listed_ref: Any,
    max_ref: Any,
    temperature_ref: Any,
    low_ref: Any,
    high_ref: Any,
    top_k_ref: Any,
    top_p_ref: Any,
    min_p_ref: Any,
    gathered_ref: Any,
    count_ref: Any,
    *,
    gathered: int,
    block: int,
) -> None:
    """x of the tokens within the bracket; with top-k below it as well: top-p sums them up."""
    r = pl.program_id(0)
    row = _Row(logits_ref, group_ref, r, listed_ref[r], max_ref[r], temperature_ref[r], block)
    low, high, min_p = jnp.where(top_k_ref[r] > 0, -1, low_ref[r]), high_ref[r], min_p_ref[r]

    def fold(i: jax.Array, count: jax.Array) -> jax.Array:
        x_B = row.load(i)[1]
        key_B = _key(x_B)
        wanted_B = (key_B > low) & (key_B <= high) & (jnp.exp(x_B) >= min_p)
        ones_B = wanted_B.astype(jnp.int32)

        @pl.when(count <= gathered)
        def _() -> None:
            place_B = count + jnp.cumsum(ones_B) - 1
            fits_B = wanted_B & (place_B < gathered)
            # Interpret mode writes masked places back: theirs must not be another's.
            place_B = jnp.where(fits_B, place_B, gathered + jnp.arange(block))
            pltriton.store(gathered_ref.at[jnp.full_like(place_B, r), place_B], x_B, mask=fits_B)

        return count + ones_B.sum()

    searched = (top_k_ref[r] > 0) | (top_p_ref[r] < 1)
    count_ref[r] = lax.fori_loop(0, jnp.where(searched, row.tiles(), 0), fold, jnp.int32(0))


def _threshold_kernel(
    logits_ref: Any,
    group_ref: Any,
    listed_ref: Any,
    max_ref: Any,
    temperature_ref: Any,
    gathered_ref: Any,
    count_ref: Any,
    low_ref: Any,
    high_ref: Any,
    low_value_ref: Any,
    mass_ref: Any,
    top_k_ref: Any,
    top_p_ref: Any,
    min_p_ref: Any,
    key_ref: Any,
    *,
    gathered: int,
    block: int,
) -> None:
    """The key of the last token that top-k and top-p keep."""
    r = pl.program_id(0)
    row = _Row(logits_ref, group_ref, r, listed_ref[r], max_ref[r], temperature_ref[r], block)
    top_k, top_p, min_p = top_k_ref[r], top_p_ref[r], min_p_ref[r]
    low, high, count = low_ref[r], high_ref[r], count_ref[r]
    fits = count <= gathered

    def gathered_x(i: jax.Array) -> jax.Array:
        lane_B = i * block + jnp.arange(block)
        return _load(gathered_ref, r, lane_B, lane_B < count, -jnp.inf)

    tiles = jnp.where(fits, pl.cdiv(count, block), row.tiles())

    def measure(pivot_P: jax.Array, mass: jax.Array) -> tuple[jax.Array, jax.Array]:
        def fold(i: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            x_B = lax.cond(fits, gathered_x, lambda i: row.load(i)[1], i)
            weight_B = jnp.exp(x_B)
            key_B = jnp.where(weight_B >= min_p, _key(x_B), NO_KEY)
            within_PB = key_B[None, :] <= pivot_P[:, None]
            return (
                state[0] + within_PB.astype(jnp.int32),
                state[1] + jnp.where(within_PB, weight_B[None, :], 0.0),
            )

        zeros = (jnp.zeros((PIVOTS, block), jnp.int32), jnp.zeros((PIVOTS, block), jnp.float32))
        count_PB, mass_PB = lax.fori_loop(0, tiles, fold, zeros)
        return count_PB.sum(axis=1), mass + mass_PB.sum(axis=1)

    by_mass = top_p < 1
    # Min-p alone takes a pass as well, for the mass that it leaves.
    skip = (top_k <= 0) & ~((min_p > 0) & by_mass)
    need = jnp.where(top_k > 0, top_k, NO_KEY)
    whole = partial(measure, mass=jnp.float32(0))
    found = _search(whole, need, high, by_count=True, skip=skip, tolerance=1)
    total = jnp.where(skip, mass_ref[r], found.high_mass)
    # Only what lies within the bracket was gathered, unless top-k made it.
    below = jnp.where(fits & (top_k <= 0), low_value_ref[r], 0.0)
    key_ref[r] = _search(
        partial(measure, mass=below),
        _needed(top_p, total),
        found.high,
        by_count=False,
        skip=~by_mass,
        tolerance=1,
        low=jnp.where(top_k > 0, -1, low),
    ).high


def _draw_kernel(
    logits_ref: Any,
    group_ref: Any,
    listed_ref: Any,
    max_ref: Any,
    temperature_ref: Any,
    key_ref: Any,
    min_p_ref: Any,
    greedy_ref: Any,
    seed_ref: Any,
    choice_ref: Any,
    position_ref: Any,
    noisy_ref: Any,
    token_ref: Any,
    *,
    S: int,
    block: int,
) -> None:
    """The best of every S-th tile by x + noise."""
    pid = pl.program_id(0)
    r, s = lax.div(pid, S), lax.rem(pid, S)
    row = _Row(logits_ref, group_ref, r, listed_ref[r], max_ref[r], temperature_ref[r], block)
    key, min_p, greedy = key_ref[r], min_p_ref[r], greedy_ref[r]
    words = _noise_key(seed_ref, choice_ref, position_ref, r)

    def fold(i: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        token_B, x_B = row.load(s + i * S)
        kept_B = (_key(x_B) <= key) & (jnp.exp(x_B) >= min_p)

        def draw() -> tuple[jax.Array, jax.Array]:
            noise_B = jnp.where(greedy, 0.0, gumbel(words, token_B))
            noisy_B = jnp.where(kept_B, x_B + noise_B, -jnp.inf)
            better_B = noisy_B > state[0]
            return jnp.where(better_B, noisy_B, state[0]), jnp.where(better_B, token_B, state[1])

        return lax.cond(kept_B.astype(jnp.int32).max() > 0, draw, lambda: state)

    V = logits_ref.shape[1]
    start = jnp.full((block,), -jnp.inf), jnp.full((block,), V, jnp.int32)
    noisy_B, token_B = lax.fori_loop(0, row.share(s, S), fold, start)
    noisy = noisy_B.max()
    noisy_ref[r, s] = noisy
    token_ref[r, s] = jnp.where(noisy_B == noisy, token_B, V).min()


def _noise_key(
    seed_ref: Any, choice_ref: Any, position_ref: Any, r: jax.Array
) -> tuple[jax.Array, jax.Array]:
    key = seed_ref[r, 0], seed_ref[r, 1]
    for data in (choice_ref[r], position_ref[r]):
        key = threefry(key, jnp.uint32(0), data.astype(jnp.uint32))
    return key


def threefry(
    key: tuple[jax.Array, jax.Array], x: jax.Array, y: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32 of 20 rounds (Salmon et al., 2011), as in `jax.random`; uint32 throughout."""
    words = (*key, key[0] ^ key[1] ^ jnp.uint32(0x1BD11BDA))
    x, y = x + words[0], y + words[1]
    for i in range(5):
        for turn in ((13, 15, 26, 6), (17, 29, 16, 24))[i % 2]:
            x = x + y
            y = ((y << jnp.uint32(turn)) | (y >> jnp.uint32(32 - turn))) ^ x
        x, y = x + words[(i + 1) % 3], y + words[(i + 2) % 3] + jnp.uint32(i + 1)
    return x, y


def gumbel(key: tuple[jax.Array, jax.Array], token: jax.Array) -> jax.Array:
    """What `jax.random.gumbel` of a float32 array gives to its entry `token`."""
    x, y = threefry(key, jnp.uint32(0), token.astype(jnp.uint32))
    mantissa = ((x ^ y) >> jnp.uint32(9)) | jnp.uint32(0x3F800000)
    uniform = lax.bitcast_convert_type(mantissa, jnp.float32) - 1.0
    return -jnp.log(-jnp.log(jnp.maximum(uniform, jnp.finfo(jnp.float32).tiny)))
