"""What lies between a layer's QKV product and its attention, as one kernel.

Queries and keys are normalised (where the model does that) and rotated; keys and values go into
their pages. In Pallas' Triton dialect.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.byte_pairs import as_pairs, from_pairs, paired
from pallas_kernels.dependents import let_next_start
from pallas_kernels.flash import padded
from pallas_kernels.page_scales import check_page_scales, narrowed, slot_scale
from pallas_kernels.rms_norm import Norm, rms_norm
from pallas_kernels.write_kv_pages import write_kv_pages

Halves = tuple[jax.Array, jax.Array]  # of rows of H, [R, padded D]
Written = tuple[jax.Array, jax.Array, jax.Array | None]  # queries, pages, the pages' scales


@dataclass(frozen=True)
class TuningConfig:
    """How the kernel is laid out on the card; never changes what it computes.

    A program takes the queries, the key and the value of one KV head of some tokens.

    Attributes:
        tokens: tokens of a program, a power of two up to 32.
        num_warps: warps of a program, a power of two up to 8.
    """

    tokens: int
    num_warps: int

    def __post_init__(self) -> None:
        if self.tokens not in (1, 2, 4, 8, 16, 32):
            raise ValueError(f"tokens must be a power of two up to 32, got {self.tokens}")
        if self.num_warps not in (1, 2, 4, 8):
            raise ValueError(f"num_warps must be 1, 2, 4 or 8, got {self.num_warps}")


def tuning_config(*, T: int, X: int, H: int, bytes_per_element: int) -> TuningConfig:
    """The setting for a step of T tokens, chosen by what static shapes tell (H200)."""
    if X * padded(H) * bytes_per_element > 4096:  # more than fits the registers of a warp
        return TuningConfig(1, 4)
    tokens = 1 if T <= 16 else 2 if T <= 128 else 4
    return TuningConfig(tokens, tokens)


def rope_write(
    qkv_TKXH: jax.Array,
    cos_TD: jax.Array,
    sin_TD: jax.Array,
    pages_P2KSH: jax.Array,
    page_T: jax.Array,
    slot_T: jax.Array,
    scales: tuple[jax.Array, jax.Array] | None = None,
    *,
    page_scales: jax.Array | None = None,
    eps: float = 0.0,
    plus_one: bool = False,
    config: TuningConfig | None = None,
    interpret: bool = False,
) -> Written:
    """Normalise and rotate queries and keys; write keys and values into their pages.

    Float32 inside; the normalised values are rounded to the activations' dtype before they are
    rotated, and so are the rotated ones.

    Args:
        qkv_TKXH: each KV head's G queries, its key and its value (X = G + 2); float32, bfloat16
            or float16.
        cos_TD, sin_TD: float32 tables of the tokens' positions, D = H / 2; pair i of a row is
            (x[i], x[i + D]).
        pages_P2KSH: the pool, keys at 0 and values at 1; cast to its dtype. In place if donated.
        page_T, slot_T: int32, inside the pool. Several tokens may name the same slot (padding
            does, in page 0); what it holds then may be a mixture.
        scales: factors [H] of the queries' and of the keys' RMS norm; None: no norm.
        page_scales: of pages of one byte; see `page_scales`.
        eps: added to the mean square.
        plus_one: the factors are scales + 1, as Gemma has it.
        config: layout on the card; None: `tuning_config`.
        interpret: run on any platform, slowly.

    Returns:
        The queries [T, K * G, H], the pages and their scales: where they belong to slots, with
        the tokens' own.

    Raises:
        ValueError: shapes or dtypes that do not fit together.
    """
    _check(qkv_TKXH, cos_TD, sin_TD, pages_P2KSH, scales)
    check_page_scales(pages_P2KSH, page_scales)
    T, K, X, H = qkv_TKXH.shape
    config = config or tuning_config(T=T, X=X, H=H, bytes_per_element=qkv_TKXH.dtype.itemsize)
    ins = [qkv_TKXH, cos_TD, sin_TD, page_T, slot_T, *(scales or ())]
    ins += [] if page_scales is None else [page_scales]
    outs = [as_pairs(pages_P2KSH)]
    if page_scales is not None and page_scales.ndim == 4:
        outs.insert(0, ins.pop())
    q_TNH, *updated = pl.pallas_call(
        partial(
            _kernel,
            norms=len(scales or ()),
            given=page_scales is not None and page_scales.ndim == 2,
            stored=pages_P2KSH.dtype,
            tokens=config.tokens,
            eps=eps,
            plus_one=plus_one,
            on_card=not interpret,
        ),
        grid=(pl.cdiv(T, config.tokens) * K,),
        out_shape=(
            jax.ShapeDtypeStruct((T, K * (X - 2), H), qkv_TKXH.dtype),
            *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outs),
        ),
        input_output_aliases={len(ins) + i: 1 + i for i in range(len(outs))},
        compiler_params=pltriton.CompilerParams(num_warps=config.num_warps, num_stages=1),
        interpret=interpret,
        name="rope_write",
    )(*ins, *outs)
    pages_P2KSH = from_pairs(updated[-1], pages_P2KSH.dtype)
    return q_TNH, pages_P2KSH, updated[0] if len(updated) == 2 else page_scales


def rope_write_reference(
    qkv_TKXH: jax.Array,
    cos_TD: jax.Array,
    sin_TD: jax.Array,
    pages_P2KSH: jax.Array,
    page_T: jax.Array,
    slot_T: jax.Array,
    scales: tuple[jax.Array, jax.Array] | None = None,
    *,
    page_scales: jax.Array | None = None,
    eps: float = 0.0,
    plus_one: bool = False,
) -> Written:
    """`rope_write` in plain XLA, for every platform."""
    T, K, X, H = qkv_TKXH.shape
    dtype = qkv_TKXH.dtype
    q_TKGH, k_TKH, v_TKH = qkv_TKXH[:, :, :-2], qkv_TKXH[:, :, -2], qkv_TKXH[:, :, -1]
    if scales is not None:
        q_TKGH, k_TKH = (
            rms_norm(x, Norm(scale, eps, plus_one)).astype(dtype)
            for x, scale in zip((q_TKGH, k_TKH), scales, strict=True)
        )
    q_TKGH, k_TKH = (apply_rope(x, cos_TD, sin_TD).astype(dtype) for x in (q_TKGH, k_TKH))
    written = write_kv_pages(k_TKH, v_TKH, pages_P2KSH, page_T, slot_T, page_scales)
    return q_TKGH.reshape(T, K * (X - 2), H), *written


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate [T, ..., H] by tables [T, H / 2]; pair i is (x[i], x[i + H / 2]). float32 out."""
    middle = (1,) * (x.ndim - 2)
    cos, sin = (t.reshape(t.shape[0], *middle, t.shape[1]) for t in (cos, sin))
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)


def _kernel(
    qkv_ref: Any,
    cos_ref: Any,
    sin_ref: Any,
    page_ref: Any,
    slot_ref: Any,
    *rest: Any,
    norms: int,
    given: bool,
    stored: Any,
    tokens: int,
    eps: float,
    plus_one: bool,
    on_card: bool,
) -> None:
    scale_refs, rest = rest[:norms], rest[norms:]
    given_ref, rest = (rest[0], rest[1:]) if given else (None, rest)
    # The first half of what is left are the inputs that the outputs after the queries alias.
    q_ref, *slot_scale_refs, pages_ref = rest[len(rest) // 2 :]
    T, K, X, H = qkv_ref.shape
    D, G, dtype = H // 2, X - 2, qkv_ref.dtype
    pid = let_next_start(pl.program_id(0), on_card)
    k = lax.rem(pid, K)
    t_R = lax.div(pid, K) * tokens + jnp.arange(tokens)
    lane_L = jnp.arange(padded(D))
    live_R, is_lane_L = t_R < T, lane_L < D
    live_RL = live_R[:, None] & is_lane_L[None, :]

    def place(ref: Any, *index: Any, lane_L: jax.Array) -> Any:
        columns = [jnp.broadcast_to(i, t_R.shape)[:, None] for i in index]
        return ref.at[(*columns, lane_L[None, :])]

    def load(ref: Any, *index: Any, first: int = 0) -> jax.Array:
        at = place(ref, *index, lane_L=first + lane_L)
        return pltriton.load(at, mask=live_RL, other=0)

    def store(ref: Any, *index: Any, halves: Halves) -> None:
        # Pairs are half as many.
        D, lane_L = ref.shape[-1] // 2, jnp.arange(halves[0].shape[1])
        live_RL = live_R[:, None] & (lane_L < D)[None, :]
        for first, half in zip((0, D), halves, strict=True):
            at = place(ref, *index, lane_L=first + lane_L)
            pltriton.store(at, half.astype(ref.dtype), mask=live_RL)

    def factors(scale_ref: Any) -> list[jax.Array]:
        halves = (scale_ref.at[first + lane_L] for first in (0, D))
        loaded = (pltriton.load(half, mask=is_lane_L, other=0) for half in halves)
        return [half[None, :].astype(jnp.float32) + plus_one for half in loaded]

    cos, sin = load(cos_ref, t_R), load(sin_ref, t_R)
    factors_of = [factors(ref) for ref in scale_refs]

    def turned(halves: Halves, is_key: bool) -> Halves:
        a, b = (half.astype(jnp.float32) for half in halves)
        if factors_of:
            square_R = (a * a).sum(axis=1) + (b * b).sum(axis=1)
            root_R1 = lax.rsqrt(square_R / H + eps)[:, None]
            a, b = (
                (half * root_R1 * factor).astype(dtype).astype(jnp.float32)
                for half, factor in zip((a, b), factors_of[is_key], strict=True)
            )
        return (a * cos - b * sin).astype(dtype), (b * cos + a * sin).astype(dtype)

    def narrow(halves: Halves, scale: jax.Array) -> Halves:
        a, b = (paired(narrowed(half, scale, stored)) for half in halves)
        return a, b

    # All are read before the first is written: the compiler does not move reads past writes.
    *queries, key, value = [
        (load(qkv_ref, t_R, k, x), load(qkv_ref, t_R, k, x, first=D)) for x in range(X)
    ]
    # A dead token's page lies outside: in interpret mode its row would be written back.
    page_R = pltriton.load(page_ref.at[t_R], mask=live_R, other=pages_ref.shape[0])
    slot_R = pltriton.load(slot_ref.at[t_R], mask=live_R, other=0)
    for g, query in enumerate(queries):
        store(q_ref, t_R, k * G + g, halves=turned(query, is_key=False))
    for side, halves in enumerate((turned(key, is_key=True), value)):
        if given_ref is not None:
            halves = narrow(halves, given_ref[side, k])
        elif slot_scale_refs:
            largest_R = jnp.maximum(*(jnp.abs(half).max(axis=1) for half in halves))
            scale_R = slot_scale(largest_R)
            at = (page_R, jnp.full_like(page_R, side), jnp.full_like(page_R, k), slot_R)
            pltriton.store(slot_scale_refs[0].at[at], scale_R, mask=live_R)
            halves = narrow(halves, scale_R[:, None])
        store(pages_ref, page_R, side, k, slot_R, halves=halves)


def _check(
    qkv_TKXH: jax.Array,
    cos_TD: jax.Array,
    sin_TD: jax.Array,
    pages_P2KSH: jax.Array,
    scales: tuple[jax.Array, jax.Array] | None,
) -> None:
    if qkv_TKXH.ndim != 4 or qkv_TKXH.shape[2] < 3 or pages_P2KSH.ndim != 5:
        raise ValueError(
            f"expected activations [T, K, G + 2, H] and pages [P, 2, K, S, H], "
            f"got {qkv_TKXH.shape} and {pages_P2KSH.shape}"
        )
    T, K, _, H = qkv_TKXH.shape
    if H % 2 or pages_P2KSH.shape[1:3] != (2, K) or pages_P2KSH.shape[4] != H:
        raise ValueError(f"pages {pages_P2KSH.shape} do not fit activations {qkv_TKXH.shape}")
    if not cos_TD.shape == sin_TD.shape == (T, H // 2):
        raise ValueError(f"expected tables {(T, H // 2)}, got {cos_TD.shape} and {sin_TD.shape}")
    for scale in scales or ():
        if scale.shape != (H,):
            raise ValueError(f"expected scales {(H,)}, got {scale.shape}")
    if qkv_TKXH.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(f"activations must be float32, bfloat16 or float16, got {qkv_TKXH.dtype}")
