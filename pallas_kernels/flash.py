"""What the paged flash-attention kernels share: reading paged keys and the online softmax.

These functions run inside kernels of Pallas' Triton dialect. Sizes there are powers of two:
head dims that are none are padded, which costs lanes but no memory traffic.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.byte_pairs import even_and_odd, join_columns, split_columns, unpaired
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


Parts = tuple[jax.Array, ...]  # of rows of H: all columns, or the even and the odd ones


class Softmax(NamedTuple):
    """Running softmax of R rows, float32."""

    out: Parts
    max_R: jax.Array
    sum_R: jax.Array

    @classmethod
    def start(cls, R: int, *widths: int) -> Softmax:
        """Nothing seen yet, of columns in parts of these widths."""
        return cls(
            tuple(jnp.zeros((R, width), jnp.float32) for width in widths),
            jnp.full((R,), MASKED, jnp.float32),
            jnp.zeros((R,), jnp.float32),
        )

    def fold(
        self,
        q: Parts,
        k: Parts,
        v: Parts,
        sees_RC: jax.Array | None,
        scoring: Scoring,
        slot_scales: tuple[jax.Array, jax.Array] | None = None,
    ) -> Softmax:
        """Add C keys. `sees_RC` (None: all seen) may have one row for all.

        `slot_scales` [C] are what keys and values are to be multiplied by, if anything.

        A row that has seen no key yet may collect finite rubbish here: the first key that it
        does see, which must come, takes that away.
        """
        product_RC = functools.reduce(
            jnp.add, (dot(q_RD, k_CD, trans_b=True) for q_RD, k_CD in zip(q, k, strict=True))
        )
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
        weight_RC = weight_RC.astype(v[0].dtype)
        out = tuple(
            out_RD * decay_R[:, None] + dot(weight_RC, v_CD)
            for out_RD, v_CD in zip(self.out, v, strict=True)
        )
        return Softmax(out, max_R, sum_R)

    def normalised(self) -> jax.Array:
        """The rows' attention outputs [R, H]."""
        sum_R1 = jnp.maximum(self.sum_R, SMALLEST_SUM)[:, None]
        out = [out_RD / sum_R1 for out_RD in self.out]
        return out[0] if len(out) == 1 else join_columns(*out)

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
    """A KV head's keys and values in a kernel, and how queries meet them.

    Attributes:
        pages_ref: the pool, [P, 2, K, S, H], as `byte_pairs.as_pairs` has it.
        scale_ref: its scales, [2, K] or [P, 2, K, S]; None: it has none.
        page_table_ref: pages of each sequence, [B, M].
        k: the head.
        stored: dtype of the pool.
        dtype: what keys and values are converted to.
        split: pairs become even and odd columns, else whole rows.
        interpret: the kernel does not run on a GPU.
    """

    pages_ref: Any
    scale_ref: Any
    page_table_ref: Any
    k: jax.Array
    stored: Any
    dtype: Any
    split: bool = False
    interpret: bool = False

    @property
    def _scaled_slots(self) -> bool:
        return self.scale_ref is not None and len(self.scale_ref.shape) == 4

    @property
    def _weight_unit(self) -> float:
        """What weights are multiplied by: times a slot's scale, float16 may not hold them."""
        return 256.0 if self.dtype == jnp.float16 else 1.0

    def start(self, R: int, H: int) -> Softmax:
        """Of R rows of which nothing has been seen yet."""
        return Softmax.start(R, H // 2, H // 2) if self.split else Softmax.start(R, H)

    def meet(self, q_RH: jax.Array, scoring: Scoring) -> tuple[Parts, Scoring]:
        """Queries as `fold` wants them, and the scoring of what they give there."""
        scale = scoring.scale
        if self.scale_ref is not None and not self._scaled_slots:
            scale *= self.scale_ref[0, self.k]
        if q_RH.dtype == jnp.bfloat16 and self.dtype == jnp.float16:
            # Queries may exceed that range: over the power of two of each row.
            q_RH = q_RH.astype(jnp.float32)
            largest_R1 = jnp.maximum(jnp.abs(q_RH).max(axis=1), 1e-30)[:, None]
            power_R1 = jnp.exp2(jnp.floor(jnp.log2(largest_R1)))
            q_RH, scale = q_RH / power_R1, scale * power_R1
        q_RH = q_RH.astype(self.dtype)
        q = split_columns(q_RH) if self.split else (q_RH,)
        return q, replace(scoring, scale=scale)

    def fold(
        self,
        softmax: Softmax,
        b: jax.Array,
        key_C: jax.Array,
        q: Parts,
        sees_RC: jax.Array | None,
        scoring: Scoring,
    ) -> Softmax:
        """Add the keys of sequence `b` at positions `key_C`; see `Softmax.fold` and `meet`."""
        S = self.pages_ref.shape[3]
        page_C, slot_C = self.page_table_ref[b, lax.div(key_C, S)], lax.rem(key_C, S)
        loaded = [load_rows(self.pages_ref, page_C, side, self.k, slot_C) for side in (0, 1)]
        k, v = map(self._converted, loaded)
        slot_scales = None
        if self._scaled_slots:
            keys_C, values_C = (self.scale_ref[page_C, side, self.k, slot_C] for side in (0, 1))
            slot_scales = keys_C, values_C * self._weight_unit
        return softmax.fold(q, k, v, sees_RC, scoring, slot_scales)

    def _converted(self, loaded: jax.Array) -> Parts:
        parts: Parts = (loaded,)
        if self.split:
            parts = even_and_odd(loaded, self.stored, interpret=self.interpret)
        elif loaded.dtype == jnp.uint16:
            parts = (unpaired(loaded, self.stored),)
        return tuple(part.astype(self.dtype) for part in parts)

    def normalised(self, softmax: Softmax) -> jax.Array:
        """The rows' attention outputs [R, H]."""
        out_RH = softmax.normalised()
        if self._scaled_slots:
            return out_RH / self._weight_unit
        if self.scale_ref is None:
            return out_RH
        return out_RH * self.scale_ref[1, self.k]


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
