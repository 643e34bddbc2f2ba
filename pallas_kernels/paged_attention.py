"""Attention over paged keys and values in plain XLA: runs on every platform.

The work is proportional to the live tokens: loops with dynamic trip counts run over groups of
decoding sequences, over tiles of prefill rows, and over the blocks of keys that these can see.
Both kinds of work are units of the same shape of problem, "rows at known positions of one
sequence", and share one online softmax. Blocks lie at fixed places of their sequence and are
folded in index order in float32, and a block that a row cannot see changes no bit of it, so
results do not depend on the neighbours in a group.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.page_scales import check_page_scales, computed_dtype

BLOCK = 128  # keys folded at once (a whole page if pages are larger)
MAX_GROUP = 8  # decoding sequences served together ...
GROUP_BYTES = 1 << 20  # ... as long as a block of their keys and values stays in a CPU's cache
TILE = 64  # prefill rows served together
MASKED = -1e30  # score of a key that a row cannot see; finite, so that no row becomes NaN


class _Softmax(NamedTuple):
    """Running softmax of U units' rows."""

    max_UKR: jax.Array
    sum_UKR: jax.Array
    out_UKRH: jax.Array


def paged_attention(
    q_TNH: jax.Array,
    pages_P2KSH: jax.Array,
    page_table_BM: jax.Array,
    *,
    query_start_B1: jax.Array,
    kv_len_B: jax.Array,
    num_decodes: jax.Array,
    num_seqs: jax.Array,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    page_scales: jax.Array | None = None,
    decode_only: bool = False,
) -> jax.Array:
    """Causal attention of every query token to its own sequence's pages.

    The queries of sequence b are rows `query_start_B1[b]` to `query_start_B1[b + 1]`, its last
    `kv_len_B[b]` tokens' last ones; their own keys and values are already in the pages.

    Args:
        q_TNH: queries of all sequences, flat. Head n belongs to KV head n // (N / K).
        pages_P2KSH: the pool, keys at 0 and values at 1. Where its dtype is not the queries', see
            `page_scales.computed_dtype`.
        page_table_BM: int32 pages of each sequence in order of position. Entries that no query
            can see (beyond the length, before the window) may be anything inside the pool.
        query_start_B1: int32, rising.
        kv_len_B: int32, the queries included; 0 for padding.
        num_decodes: int32 scalar, leading sequences that have exactly one query, b in row b.
        num_seqs: int32 scalar, sequences in use; they come first.
        scale: factor of the scores.
        window: tokens a query sees, itself included; None: all.
        softcap: scores become softcap * tanh(score / softcap); None: they stay.
        page_scales: of pages of one byte; see `page_scales`.
        decode_only: promises num_decodes == num_seqs; the prefill part is left out.

    Returns:
        [T, N, H] in the queries' dtype; rows that belong to no sequence are 0.
    """
    check_page_scales(pages_P2KSH, page_scales)
    attend = _Attend(pages_P2KSH, page_scales, scale, window, softcap)
    out_TNH = _decode(attend, q_TNH, page_table_BM, kv_len_B, num_decodes)
    if decode_only:
        return out_TNH
    return _prefill(
        attend, q_TNH, out_TNH, page_table_BM, query_start_B1, kv_len_B, num_decodes, num_seqs
    )


def _decode(
    attend: _Attend,
    q_TNH: jax.Array,
    page_table_BM: jax.Array,
    kv_len_B: jax.Array,
    num_decodes: jax.Array,
) -> jax.Array:
    """Rows 0 to num_decodes; the others are 0. Groups have similar lengths: longest first."""
    B = kv_len_B.shape[0]
    _, N, H = q_TNH.shape
    U = min(attend.group_size, B)
    len_B = jnp.where(jnp.arange(B) < num_decodes, kv_len_B, 0)
    order_B = jnp.argsort(-len_B)

    def group(g: jax.Array, out_TNH: jax.Array) -> jax.Array:
        # The last group may reach back into the one before; its rows come out the same again.
        seq_U = lax.dynamic_slice_in_dim(order_B, g * U, U)
        out_UKRH = attend(
            q_TNH[seq_U].reshape(U, attend.K, N // attend.K, H),
            len_B[seq_U][:, None] - 1,
            page_table_BM[seq_U],
        )
        return out_TNH.at[seq_U].set(out_UKRH.reshape(U, N, H).astype(out_TNH.dtype))

    return lax.fori_loop(0, lax.div(num_decodes + (U - 1), U), group, jnp.zeros_like(q_TNH))


def _prefill(
    attend: _Attend,
    q_TNH: jax.Array,
    out_TNH: jax.Array,
    page_table_BM: jax.Array,
    query_start_B1: jax.Array,
    kv_len_B: jax.Array,
    num_decodes: jax.Array,
    num_seqs: jax.Array,
) -> jax.Array:
    """Fill in the rows of sequences num_decodes to num_seqs."""
    B = kv_len_B.shape[0]
    T, N, H = q_TNH.shape
    Q, K = min(TILE, T), attend.K
    G = N // K
    seq_B = jnp.arange(B)
    queries_B = jnp.diff(query_start_B1)
    tiles_B = jnp.where(
        (seq_B >= num_decodes) & (seq_B < num_seqs), lax.div(queries_B + (Q - 1), Q), 0
    )
    tile_end_B = jnp.cumsum(tiles_B)

    def tile(i: jax.Array, out_TNH: jax.Array) -> jax.Array:
        b = jnp.searchsorted(tile_end_B, i, side="right")
        start = query_start_B1[b] + (i - (tile_end_B[b] - tiles_B[b])) * Q
        end = jnp.minimum(start + Q, query_start_B1[b + 1])
        # Near the end of the batch the Q rows read begin before the tile.
        first = jnp.minimum(start, T - Q)
        row_Q = first + jnp.arange(Q)
        live_Q = (row_Q >= start) & (row_Q < end)
        position_Q = jnp.where(live_Q, kv_len_B[b] - query_start_B1[b + 1] + row_Q, -1)
        q_QNH = lax.dynamic_slice_in_dim(q_TNH, first, Q)
        out_UKRH = attend(
            q_QNH.reshape(Q, K, G, H).transpose(1, 2, 0, 3).reshape(1, K, G * Q, H),
            jnp.tile(position_Q, G)[None],
            page_table_BM[b][None],
        )
        new_QNH = out_UKRH.reshape(K, G, Q, H).transpose(2, 0, 1, 3).reshape(Q, N, H)
        old_QNH = lax.dynamic_slice_in_dim(out_TNH, first, Q)
        merged_QNH = jnp.where(live_Q[:, None, None], new_QNH.astype(old_QNH.dtype), old_QNH)
        return lax.dynamic_update_slice_in_dim(out_TNH, merged_QNH, first, 0)

    return lax.fori_loop(0, tile_end_B[-1], tile, out_TNH)


def _sum(x: jax.Array) -> jax.Array:
    """Over the last axis, a power of two, by halves: in the same order whatever the others are."""
    while x.shape[-1] > 1:
        front, back = jnp.split(x, 2, axis=-1)
        x = front + back
    return x[..., 0]


class _Attend:
    """Attention of U units, each with R rows of one sequence, to that sequence's pages."""

    def __init__(
        self,
        pages_P2KSH: jax.Array,
        page_scales: jax.Array | None,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> None:
        self.pages_P2KSH, self.page_scales = pages_P2KSH, page_scales
        self.scale, self.window, self.softcap = scale, window, softcap
        _, _, self.K, self.S, self.H = pages_P2KSH.shape
        self.pages_per_block = max(1, BLOCK // self.S)
        page_bytes = 2 * self.K * self.S * self.H * pages_P2KSH.dtype.itemsize
        block_bytes = self.pages_per_block * page_bytes
        self.group_size = min(max(GROUP_BYTES // block_bytes, 1), MAX_GROUP)

    def __call__(
        self, q_UKRH: jax.Array, position_UR: jax.Array, page_table_UM: jax.Array
    ) -> jax.Array:
        """float32[U, K, R, H]; `position_UR` is -1 for rows that see nothing and come out 0."""
        U, K, R, H = q_UKRH.shape
        q_UKRH = q_UKRH.astype(computed_dtype(q_UKRH.dtype, self.pages_P2KSH.dtype))
        C = self.pages_per_block * self.S
        last_U = position_UR.max(axis=1)
        first_UR = jnp.zeros_like(position_UR)
        if self.window is not None:
            first_UR = jnp.maximum(position_UR - (self.window - 1), 0)
        seen_first_UR = jnp.where(position_UR < 0, jnp.iinfo(jnp.int32).max, first_UR)
        first_U = seen_first_UR.min(axis=1)

        def fold(i: jax.Array, state: _Softmax) -> _Softmax:
            key_C = i * C + jnp.arange(C)
            # Values that no row sees may be anything, NaN included.
            read_UC = (key_C >= first_U[:, None]) & (key_C <= last_U[:, None])
            k_UKCH, v_UKCH = (x.astype(q_UKRH.dtype) for x in self._read(page_table_UM, i))
            v_UKCH = jnp.where(read_UC[:, None, :, None], v_UKCH, 0)
            sees_URC = (key_C >= first_UR[:, :, None]) & (key_C <= position_UR[:, :, None])
            scales = self._read_scales(page_table_UM, i)
            return self._fold(state, q_UKRH, k_UKCH, v_UKCH, sees_URC[:, None], scales)

        state = _Softmax(
            jnp.full((U, K, R), MASKED, jnp.float32),
            jnp.zeros((U, K, R), jnp.float32),
            jnp.zeros((U, K, R, H), jnp.float32),
        )
        state = lax.fori_loop(lax.div(first_U.min(), C), lax.div(last_U.max() + C, C), fold, state)
        return state.out_UKRH / jnp.maximum(state.sum_UKR, 1e-30)[..., None]

    def _read(self, page_table_UM: jax.Array, block: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys and values of a block: [U, K, C, H] each."""
        page_U1X, U = self._pages_of(page_table_UM, block)[:, None], page_table_UM.shape[0]
        # Naming the head in the gather lays each head's slots end to end in one pass.
        head_K1 = jnp.arange(self.K)[:, None]
        shape = (U, self.K, self.pages_per_block * self.S, self.H)
        k_UKXSH = self.pages_P2KSH[page_U1X, 0, head_K1]
        v_UKXSH = self.pages_P2KSH[page_U1X, 1, head_K1]
        return k_UKXSH.reshape(shape), v_UKXSH.reshape(shape)

    def _pages_of(self, page_table_UM: jax.Array, block: jax.Array) -> jax.Array:
        """[U, X] pages of a block."""
        column_X = block * self.pages_per_block + jnp.arange(self.pages_per_block)
        return page_table_UM[:, jnp.minimum(column_X, page_table_UM.shape[1] - 1)]

    def _read_scales(
        self, page_table_UM: jax.Array, block: jax.Array
    ) -> tuple[jax.Array, jax.Array] | None:
        """Scales of a block's keys and values, [U, K, 1, C] or [K, 1, 1] each."""
        if self.page_scales is None:
            return None
        if self.page_scales.ndim == 2:
            keys_K, values_K = self.page_scales
            return keys_K[:, None, None], values_K[:, None, None]
        scale_UX2KS = self.page_scales[self._pages_of(page_table_UM, block)]
        shape = (scale_UX2KS.shape[0], self.K, 1, self.pages_per_block * self.S)
        scale_2UKXS = scale_UX2KS.transpose(2, 0, 3, 1, 4)
        return scale_2UKXS[0].reshape(shape), scale_2UKXS[1].reshape(shape)

    def _fold(
        self,
        state: _Softmax,
        q_UKRH: jax.Array,
        k_UKCH: jax.Array,
        v_UKCH: jax.Array,
        sees_U1RC: jax.Array,
        scales: tuple[jax.Array, jax.Array] | None,
    ) -> _Softmax:
        """Add one block of keys to the running softmax."""
        precision = lax.Precision.HIGHEST if q_UKRH.dtype == jnp.float32 else None
        score_UKRC = self.scale * jnp.einsum(
            "ukrh,ukch->ukrc",
            q_UKRH,
            k_UKCH,
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        if scales is not None:
            score_UKRC *= scales[0]
        if self.softcap is not None:
            score_UKRC = self.softcap * jnp.tanh(score_UKRC / self.softcap)
        score_UKRC = jnp.where(sees_U1RC, score_UKRC, MASKED)
        max_UKR = jnp.maximum(state.max_UKR, score_UKRC.max(axis=-1))
        # exp(MASKED - MASKED) is 1, hence the second where.
        weight_UKRC = jnp.where(sees_U1RC, jnp.exp(score_UKRC - max_UKR[..., None]), 0)
        decay_UKR = jnp.exp(state.max_UKR - max_UKR)
        sum_UKR = state.sum_UKR * decay_UKR + _sum(weight_UKRC)
        if scales is not None:
            # The scale of a slot that no row sees may be anything, NaN included.
            weight_UKRC = jnp.where(sees_U1RC, weight_UKRC * scales[1], 0)
        new_UKRH = jnp.einsum(
            "ukrc,ukch->ukrh",
            weight_UKRC.astype(v_UKCH.dtype),
            v_UKCH,
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        return _Softmax(max_UKR, sum_UKR, state.out_UKRH * decay_UKR[..., None] + new_UKRH)
