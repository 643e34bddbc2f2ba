"""What the paged flash-attention kernels share: reading paged keys and the online softmax.

These functions run inside kernels of Pallas' Triton dialect. Sizes there are powers of two:
head dims that are none are padded, which costs lanes but no memory traffic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.page_scales import check_page_scales

MASKED = -1e30  # score of a key that a row cannot see; finite, so that no row becomes NaN
LOG2_E = math.log2(math.e)
SMALLEST_SUM = 1e-30  # rows that see no key have sum 0 and come out 0


@dataclass(frozen=True)
class Scoring:
    """From dot products of queries and keys to scores.

    Attributes:
        scale: factor of the dot products; in a kernel it may be an array.
        window: tokens a query sees, itself included; None: all.
        softcap: scores become softcap * tanh(score / softcap); None: they stay.
    """

    scale: Any
    window: int | None
    softcap: float | None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"window must be at least 1, got {self.window}")
        if self.softcap is not None and self.softcap <= 0:
            raise ValueError(f"softcap must be positive, got {self.softcap}")

    def base2(self, product: jax.Array) -> jax.Array:
        """Scores times log2(e): the softmax below is one of powers of two."""
        if self.softcap is None:
            return product * (self.scale * LOG2_E)
        return jnp.tanh(product * (self.scale / self.softcap)) * (self.softcap * LOG2_E)


class Softmax(NamedTuple):
    """Running softmax of R rows, float32."""

    out_RH: jax.Array
    max_R: jax.Array
    sum_R: jax.Array

    @classmethod
    def start(cls, R: int, H: int) -> Softmax:
        """Nothing seen yet."""
        return cls(
            jnp.zeros((R, H), jnp.float32),
            jnp.full((R,), MASKED, jnp.float32),
            jnp.zeros((R,), jnp.float32),
        )

    def fold(
        self,
        q_RH: jax.Array,
        k_CH: jax.Array,
        v_CH: jax.Array,
        sees_RC: jax.Array | None,
        scoring: Scoring,
        slot_scales: tuple[jax.Array, jax.Array] | None = None,
    ) -> Softmax:
        """Add C keys. `sees_RC` (None: all seen) may have one row for all.

        `slot_scales` [C] are what keys and values are to be multiplied by, if anything.

        A row that has seen no key yet may collect finite rubbish here: the first key that it
        does see, which must come, takes that away.
        """
        product_RC = dot(q_RH, k_CH, trans_b=True)
        if slot_scales is not None:
            product_RC *= slot_scales[0][None, :]
        score_RC = scoring.base2(product_RC)
        if sees_RC is not None:
            score_RC = jnp.where(sees_RC, score_RC, MASKED)
        max_R = jnp.maximum(self.max_R, score_RC.max(axis=1))
        decay_R = jnp.exp2(self.max_R - max_R)
        weight_RC = jnp.exp2(score_RC - max_R[:, None])
        sum_R = self.sum_R * decay_R + weight_RC.sum(axis=1)
        if slot_scales is not None:
            weight_RC *= slot_scales[1][None, :]
        out_RH = self.out_RH * decay_R[:, None] + dot(weight_RC.astype(v_CH.dtype), v_CH)
        return Softmax(out_RH, max_R, sum_R)

    def normalised(self) -> jax.Array:
        """The rows' attention outputs [R, H]."""
        return self.out_RH / jnp.maximum(self.sum_R, SMALLEST_SUM)[:, None]

    def log2_sum(self) -> jax.Array:
        """Log2 of the sum of all powers, [R]: the weight of these keys beside others."""
        return self.max_R + jnp.log2(jnp.maximum(self.sum_R, SMALLEST_SUM))


def dot(a: jax.Array, b: jax.Array, trans_b: bool = False) -> jax.Array:
    """float32 product; operands in float32 are multiplied as such (IEEE, never tf32)."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return pltriton.dot(a, b, trans_b=trans_b, precision=precision)


def padded(H: int) -> int:
    """The next power of two that a tensor core takes."""
    return max(16, 1 << (H - 1).bit_length())


def load_rows(ref: Any, *index: Any) -> jax.Array:
    """[R, padded H] of `ref[*index]`, whose indices are scalars or [R]; the padding is 0."""
    H = ref.shape[-1]
    if padded(H) == H:
        return ref[(*index, slice(None))]
    at, mask = _padded_place(ref, index)
    return pltriton.load(at, mask=mask, other=0)


def store_rows(ref: Any, *index: Any, value: jax.Array, live_R: jax.Array) -> None:
    """Store the live rows of [R, padded H] at `ref[*index]`; all rows' places must differ.

    (In interpret mode a dead row writes back what was there.)
    """
    at, mask = _padded_place(ref, index)
    pltriton.store(at, value.astype(ref.dtype), mask=mask & live_R[:, None])


def _padded_place(ref: Any, index: tuple[Any, ...]) -> tuple[Any, jax.Array]:
    H, R = ref.shape[-1], max(jnp.size(i) for i in index)
    h_1H = jnp.arange(padded(H))[None, :]
    columns = [i if jnp.ndim(i) == 0 else i[:, None] for i in index]
    return ref.at[(*columns, h_1H)], jnp.broadcast_to(h_1H < H, (R, padded(H)))


@dataclass(frozen=True)
class Pages:
    """A KV head's keys and values in a kernel.

    Attributes:
        pages_ref: the pool, [P, 2, K, S, H].
        scale_ref: its scales, [2, K] or [P, 2, K, S]; None: it has none.
        page_table_ref: pages of each sequence, [B, M].
        k: the head.
        dtype: what keys and values are converted to.
    """

    pages_ref: Any
    scale_ref: Any
    page_table_ref: Any
    k: jax.Array
    dtype: Any

    def fold(
        self,
        softmax: Softmax,
        b: jax.Array,
        key_C: jax.Array,
        q_RH: jax.Array,
        sees_RC: jax.Array | None,
        scoring: Scoring,
    ) -> Softmax:
        """Add the keys of sequence `b` at positions `key_C`; see `Softmax.fold`."""
        S = self.pages_ref.shape[3]
        page_C, slot_C = self.page_table_ref[b, lax.div(key_C, S)], lax.rem(key_C, S)
        kv_2CH = [
            load_rows(self.pages_ref, page_C, side, self.k, slot_C).astype(self.dtype)
            for side in (0, 1)
        ]
        slot_scales = None
        if self.scale_ref is not None and len(self.scale_ref.shape) == 4:
            keys_C, values_C = (self.scale_ref[page_C, side, self.k, slot_C] for side in (0, 1))
            slot_scales = keys_C, values_C
        return softmax.fold(q_RH, *kv_2CH, sees_RC, scoring, slot_scales)

    def scored(self, scoring: Scoring) -> Scoring:
        """`scoring` of what is stored, where one scale is all keys'."""
        if self.scale_ref is None or len(self.scale_ref.shape) == 4:
            return scoring
        return replace(scoring, scale=scoring.scale * self.scale_ref[0, self.k])

    def normalised(self, softmax: Softmax) -> jax.Array:
        """The rows' attention outputs [R, H]."""
        if self.scale_ref is None or len(self.scale_ref.shape) == 4:
            return softmax.normalised()
        return softmax.normalised() * self.scale_ref[1, self.k]


def check_operands(
    q_TNH: jax.Array,
    pages_P2KSH: jax.Array,
    page_table_BM: jax.Array,
    kv_len_B: jax.Array,
    page_scales: jax.Array | None = None,
) -> None:
    """Raise ValueError where shapes or dtypes do not fit together."""
    if q_TNH.ndim != 3 or pages_P2KSH.ndim != 5 or pages_P2KSH.shape[1] != 2:
        raise ValueError(
            f"expected queries [T, N, H] and pages [P, 2, K, S, H], "
            f"got {q_TNH.shape} and {pages_P2KSH.shape}"
        )
    _, N, H = q_TNH.shape
    _, _, K, S, page_H = pages_P2KSH.shape
    if page_H != H or N % K or N // K > 16 or H > 256:
        raise ValueError(
            f"heads do not fit: {N} queries of {H}, {K} keys of {page_H}; "
            "a KV head serves at most 16 query heads of at most 256"
        )
    if S & (S - 1):
        raise ValueError(f"the page size must be a power of two, got {S}")
    if page_table_BM.shape[0] != kv_len_B.shape[0]:
        raise ValueError(f"{page_table_BM.shape[0]} rows of pages for {kv_len_B.shape[0]} lengths")
    if q_TNH.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(f"queries must be float32, bfloat16 or float16, got {q_TNH.dtype}")
    check_page_scales(pages_P2KSH, page_scales)
