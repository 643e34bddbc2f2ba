"""Split-KV flash decoding over pages, in Pallas' Triton dialect.

One program serves all query heads of one KV head of one sequence over one stretch of its keys
(an item). How many items a sequence is cut into follows from the lengths, on the device: the
batch's keys are shared out evenly over as many programs as the card keeps busy, and nothing is
cut where one item a sequence already does that. Items of longer sequences come first. Of a
sequence that is cut, the program that finishes last merges all parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.byte_pairs import as_pairs
from pallas_kernels.flash import (
    MASKED,
    Pages,
    Scoring,
    Softmax,
    check_operands,
    load_rows,
    padded,
    store_rows,
)
from pallas_kernels.page_scales import computed_dtype

FEW = 8  # sequences up to which each may be cut into tens of items
GRAIN = 16  # keys that the items' lengths are multiples of


@dataclass(frozen=True)
class TuningConfig:
    """How decode attention is laid out on the card; never changes what it computes.

    Attributes:
        block_keys: keys folded at once, a power of two from 16 to 256.
        num_warps: warps of a program, a power of two up to 8.
        num_stages: depth of the load pipeline. Page numbers come a stage before what lies in the
            pages, so that an odd depth d keeps (d - 1) / 2 blocks on their way; 2 keeps one.
        programs: programs that the batch's keys are shared out to, over all KV heads; 0: no
            sequence is cut.
    """

    block_keys: int
    num_warps: int
    num_stages: int
    programs: int

    def __post_init__(self) -> None:
        if self.block_keys not in (16, 32, 64, 128, 256):
            raise ValueError(f"block_keys must be 16, 32, 64, 128 or 256, got {self.block_keys}")
        if self.num_warps not in (1, 2, 4, 8):
            raise ValueError(f"num_warps must be 1, 2, 4 or 8, got {self.num_warps}")
        if not 1 <= self.num_stages <= 9:
            raise ValueError(f"num_stages must be from 1 to 9, got {self.num_stages}")
        if self.programs < 0:
            raise ValueError(f"programs must not be negative, got {self.programs}")


def tuning_config(
    *, B: int, K: int, H: int, bytes_per_element: int, narrow: bool = False
) -> TuningConfig:
    """The setting for a batch of B sequences, chosen by what static shapes tell (H200).

    `narrow` pages hold a byte where `bytes_per_element` are computed with: more keys fit on their
    way, and converting them wants more warps.

    Where B * K programs are about two a processor, three blocks on their way let no more than
    two programs into a processor's shared memory, which keeps the processors even.
    """
    wide = bytes_per_element == 4 or padded(H) == 256
    if narrow and not wide:
        return TuningConfig(64, 4, 7, 264) if B <= FEW else TuningConfig(64, 4, 5, 528)
    if B <= FEW:
        return TuningConfig(32 if wide else 64, 4, 5, 132)
    if wide:
        return TuningConfig(32, 4, 2, 528)
    if B * K >= 2048:
        return TuningConfig(128, 4, 2, 528)
    if B * K >= 512:
        return TuningConfig(64, 2, 3, 1056 if B * K >= 1024 else 528)
    return TuningConfig(64, 4, 7, 264)


def paged_attention_decode(
    q_TNH: jax.Array,
    pages_P2KSH: jax.Array,
    page_table_BM: jax.Array,
    *,
    kv_len_B: jax.Array,
    num_decodes: jax.Array,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    page_scales: jax.Array | None = None,
    into_TNH: jax.Array | None = None,
    config: TuningConfig | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Attention of one query a sequence to that sequence's pages.

    Calls of one program with the same lengths and window share a plan of the work, and with it
    counters that each call leaves at zero: let every call depend on the one before, as layers do.

    Args:
        q_TNH: queries; sequence b's is row b. T == B, or T >= B with `into_TNH`. Head n belongs
            to KV head n // (N / K), N / K <= 16, H <= 256.
        pages_P2KSH: the pool, keys at 0 and values at 1, S a power of two. Where its dtype is not
            the queries', see `page_scales.computed_dtype`.
        page_table_BM: int32 pages of each sequence in order of position. Entries that the query
            cannot see (beyond the length, before the window) may be anything.
        kv_len_B: int32 keys of each sequence, the query's own included; 0 gives a row of 0.
        num_decodes: int32 scalar, sequences in use; they come first.
        scale, window, softcap: see `flash.Scoring`.
        page_scales: of pages of one byte; see `page_scales`.
        into_TNH: where the rows go; its other rows stay, in place if it is no longer needed.
        config: layout on the card; None: `tuning_config`.
        interpret: run on any platform, slowly.

    Returns:
        [T, N, H] in the queries' dtype. Without `into_TNH` rows from num_decodes on are 0.

    Raises:
        ValueError: shapes, dtypes or options outside these bounds.
    """
    check_operands(q_TNH, pages_P2KSH, page_table_BM, kv_len_B, page_scales)
    T, N, H = q_TNH.shape
    B, K = kv_len_B.shape[0], pages_P2KSH.shape[2]
    if T != B and (into_TNH is None or T < B):
        raise ValueError(f"{T} queries for {B} sequences")
    dtype = computed_dtype(q_TNH.dtype, pages_P2KSH.dtype)
    narrow = pages_P2KSH.dtype.itemsize == 1
    if narrow and dtype != jnp.float32:
        dtype = jnp.dtype(jnp.float16)
    config = config or tuning_config(B=B, K=K, H=H, bytes_per_element=dtype.itemsize, narrow=narrow)
    plan = _share_out(
        kv_len_B,
        num_decodes,
        K=K,
        window=window,
        config=config,
        fill=into_TNH is None,
        interpret=interpret,
    )
    W = plan.item_W5.shape[0]
    ins = [plan.item_W5, plan.arrived_BK, q_TNH, page_table_BM, as_pairs(pages_P2KSH)]
    ins += [] if page_scales is None else [page_scales]
    outs = [jax.ShapeDtypeStruct(q_TNH.shape, q_TNH.dtype)]
    if config.programs:
        outs += [
            jax.ShapeDtypeStruct((W, N, H), jnp.float32),
            jax.ShapeDtypeStruct((W, N), jnp.float32),
        ]
    return pl.pallas_call(
        partial(
            _decode_kernel,
            scoring=Scoring(scale, window, softcap),
            config=config,
            stored=pages_P2KSH.dtype,
            dtype=dtype,
            has_scales=page_scales is not None,
            has_input=into_TNH is not None,
            interpret=interpret,
        ),
        grid=(W * K,),
        out_shape=outs,
        input_output_aliases={} if into_TNH is None else {len(ins): 0},
        compiler_params=pltriton.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=interpret,
        name="paged_attention_decode",
    )(*ins, *([] if into_TNH is None else [into_TNH]))[0]


class _Plan(NamedTuple):
    """Items in the order in which they start, longest sequences first.

    At most one item a sequence and `programs / K` more, so the grid's size is static.
    """

    item_W5: jax.Array  # int32: sequence (-1: no item), keys from, to, its first item, its items
    arrived_BK: jax.Array  # int32 zeros: items of a sequence and KV head that are done


def _share_out(
    kv_len_B: jax.Array,
    num_decodes: jax.Array,
    *,
    K: int,
    window: int | None,
    config: TuningConfig,
    fill: bool,
    interpret: bool,
) -> _Plan:
    """Cut the sequences into items. Layers of a step share this: XLA computes it once."""
    B, per_head = kv_len_B.shape[0], _ceil_div(config.programs, K)
    kernel = partial(
        _plan_kernel,
        window=window,
        per_head=per_head,
        block=config.block_keys,
        fill=fill,
    )
    return _Plan(
        *pl.pallas_call(
            kernel,
            grid=(B,),
            out_shape=(
                jax.ShapeDtypeStruct((B + per_head, 5), jnp.int32),
                jax.ShapeDtypeStruct((B, K), jnp.int32),
            ),
            compiler_params=pltriton.CompilerParams(num_warps=1, num_stages=1),
            interpret=interpret,
            name="paged_attention_plan",
        )(kv_len_B, jnp.reshape(num_decodes, (1,)))
    )


def _plan_kernel(
    kv_len_ref: Any,
    num_decodes_ref: Any,
    item_ref: Any,
    arrived_ref: Any,
    *,
    window: int | None,
    per_head: int,
    block: int,
    fill: bool,
) -> None:
    """One program a sequence: it writes that sequence's items."""
    B, K = arrived_ref.shape
    W = item_ref.shape[0]
    b = pl.program_id(0)
    seq_X = jnp.arange(_power_of_2(B))
    live_X = seq_X < jnp.minimum(num_decodes_ref[jnp.zeros_like(b)], B)
    len_X = pltriton.load(kv_len_ref.at[seq_X], mask=live_X, other=0)
    first_X = jnp.zeros_like(len_X) if window is None else jnp.maximum(len_X - window, 0)
    keys_X = len_X - first_X
    items_X = jnp.where(seq_X < B if fill else live_X, 1, 0)
    if per_head:
        share = jnp.maximum(_round_up(_ceil_div(keys_X.sum(axis=0), per_head), GRAIN), block)
        cuts_X = lax.div(keys_X + lax.div(share, 2), share)
        items_X = jnp.maximum(items_X, cuts_X)

    def own(of_X: jax.Array) -> jax.Array:
        return jnp.where(seq_X == b, of_X, 0).sum(axis=0)

    begin, keys, items = own(first_X), own(keys_X), own(items_X)
    before_X = (keys_X > keys) | ((keys_X == keys) & (seq_X < b))
    first_item = jnp.where(before_X, items_X, 0).sum(axis=0)
    step = _round_up(_ceil_div(keys, jnp.maximum(items, 1)), GRAIN)

    nth_J = jnp.arange(_power_of_2(1 + per_head))
    done_J = jnp.minimum(nth_J * step, keys)
    end_J = jnp.minimum(done_J + step, keys)
    fields = (b, begin + done_J, begin + end_J, first_item, items)
    for i, field in enumerate(fields):
        place = item_ref.at[first_item + nth_J, jnp.full_like(nth_J, i)]
        pltriton.store(place, jnp.broadcast_to(field, nth_J.shape), mask=nth_J < items)

    k_K = jnp.arange(_power_of_2(K))
    place = arrived_ref.at[jnp.full_like(k_K, b), k_K]
    pltriton.store(place, jnp.zeros_like(k_K), mask=k_K < K)

    @pl.when(b == 0)
    def _() -> None:
        w_W = jnp.arange(_power_of_2(W))
        place = item_ref.at[w_W, jnp.zeros_like(w_W)]
        unused_W = (w_W >= items_X.sum(axis=0)) & (w_W < W)
        pltriton.store(place, jnp.full_like(w_W, -1), mask=unused_W)


def _power_of_2(n: int) -> int:
    """The first power of two from n on."""
    return 1 << (n - 1).bit_length()


def _ceil_div(a: Any, b: Any) -> Any:
    return (a + (b - 1)) // b


def _round_up(a: Any, b: Any) -> Any:
    return _ceil_div(a, b) * b


def _decode_kernel(
    item_ref: Any,
    arrived_ref: Any,
    q_ref: Any,
    page_table_ref: Any,
    pages_ref: Any,
    *rest: Any,
    scoring: Scoring,
    config: TuningConfig,
    stored: Any,
    dtype: Any,
    has_scales: bool,
    has_input: bool,
    interpret: bool,
) -> None:
    scale_ref = rest[0] if has_scales else None
    out_ref, *parts = rest[has_scales + has_input :]
    B, K = arrived_ref.shape
    block = config.block_keys
    pid = pl.program_id(0)
    w, k = lax.div(pid, K), lax.rem(pid, K)
    b, begin, end, first, items = (item_ref[w, i] for i in range(5))
    G = q_ref.shape[1] // K
    R = padded(G)
    g_R = jnp.arange(R)
    live_R, n_R = g_R < G, k * G + g_R

    @pl.when(b >= 0)
    def _() -> None:
        b_R = jnp.full_like(n_R, b)
        q_RH = load_rows(q_ref, b_R, jnp.where(live_R, n_R, 0))
        split = stored.itemsize == 1
        pages = Pages(pages_ref, scale_ref, page_table_ref, k, stored, dtype, split, interpret)
        q, scored = pages.meet(q_RH, scoring)

        def fold(i: jax.Array, softmax: Softmax) -> Softmax:
            key_C = begin + i * block + jnp.arange(block)
            # Only keys that are seen are read: what lies beyond may be anything, NaN included.
            read_C = jnp.minimum(key_C, end - 1)
            return pages.fold(softmax, b, read_C, q, (key_C < end)[None, :], scored)

        blocks = lax.div(end - begin + (block - 1), block)
        softmax = lax.fori_loop(0, blocks, fold, pages.start(R, q_RH.shape[1]))
        out_RH = pages.normalised(softmax)

        @pl.when(items == 1)
        def _() -> None:
            store_rows(out_ref, b_R, n_R, value=out_RH, live_R=live_R)

        if parts:
            part_ref, weight_ref = parts

            @pl.when(items > 1)
            def _() -> None:
                w_R = jnp.full_like(n_R, w)
                store_rows(part_ref, w_R, n_R, value=out_RH, live_R=live_R)
                pltriton.store(weight_ref.at[w_R, n_R], softmax.log2_sum(), mask=live_R)
                if not interpret:
                    pltriton.debug_barrier()  # all of the program's threads have stored
                arrived = pltriton.atomic_add(arrived_ref, (b, k), jnp.ones_like(b))

                @pl.when(arrived == items - 1)
                def _() -> None:
                    # An input, yet as the kernel found it once this is done: the next layer's.
                    arrived_ref[b, k] = jnp.zeros_like(b)
                    g_R = jnp.arange(_power_of_2(G))  # of which a dot wants more
                    live_R, n_R = g_R < G, k * G + g_R
                    held = config.num_warps * (4096 if B <= FEW else 2048)  # values, in registers
                    block = max(1, held // (g_R.shape[0] * q_RH.shape[1]))
                    out_RH = _merge(part_ref, weight_ref, first, items, n_R, live_R, block)
                    b_R = jnp.full_like(n_R, b)
                    store_rows(out_ref, b_R, n_R, value=out_RH, live_R=live_R)


def _merge(
    part_ref: Any,
    weight_ref: Any,
    first: jax.Array,
    items: jax.Array,
    n_R: jax.Array,
    live_R: jax.Array,
    block: int,
) -> jax.Array:
    """[R, padded H]: the parts of `items` items from `first` on, `block` of them at once.

    They are added up in their order, whoever comes last: the result does not vary.
    """
    H = part_ref.shape[2]
    R, L = n_R.shape[0], padded(H)
    live_RL = live_R[:, None] & (jnp.arange(L) < H)[None, :]

    def fold(i: jax.Array, state: Softmax) -> Softmax:
        nth_I = i * block + jnp.arange(block)
        w_I, live_I = first + nth_I, nth_I < items
        # Volatile: others wrote these, and this processor's cache does not hear of it.
        weight_IR = pltriton.load(
            weight_ref.at[w_I[:, None], n_R[None, :]],
            mask=live_I[:, None] & live_R[None, :],
            other=MASKED,
            volatile=True,
        )
        part_IRL = pltriton.load(
            part_ref.at[w_I[:, None, None], n_R[None, :, None], jnp.arange(L)[None, None, :]],
            mask=live_I[:, None, None] & live_RL[None, :, :],
            other=0,
            volatile=True,
        )
        max_R = jnp.maximum(state.max_R, weight_IR.max(axis=0))
        decay_R = jnp.exp2(state.max_R - max_R)
        share_IR = jnp.exp2(weight_IR - max_R[None, :])
        return Softmax(
            (state.out[0] * decay_R[:, None] + (part_IRL * share_IR[:, :, None]).sum(axis=0),),
            max_R,
            state.sum_R * decay_R + share_IR.sum(axis=0),
        )

    blocks = lax.div(items + (block - 1), block)
    return lax.fori_loop(0, blocks, fold, Softmax.start(R, L)).normalised()
