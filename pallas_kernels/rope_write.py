"""What lies between a layer's QKV product and its attention, as one kernel.

Queries and keys are normalised (where the model does that) and rotated; keys and values go into
their pages. In Pallas' Triton dialect: rows of H, be they a query, a key or a value, lie one
behind the other in the QKV product, and a program takes the next `rows` of them.
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

from pallas_kernels.write_kv_pages import write_kv_pages


@dataclass(frozen=True)
class TuningConfig:
    """How the kernel is laid out on the card; never changes what it computes.

    Attributes:
        rows: rows of H of a program, a power of two up to 128.
        num_warps: warps of a program, a power of two up to 8.
    """

    rows: int
    num_warps: int

    def __post_init__(self) -> None:
        if self.rows not in (1, 2, 4, 8, 16, 32, 64, 128):
            raise ValueError(f"rows must be a power of two up to 128, got {self.rows}")
        if self.num_warps not in (1, 2, 4, 8):
            raise ValueError(f"num_warps must be 1, 2, 4 or 8, got {self.num_warps}")


def tuning_config(*, rows: int, H: int) -> TuningConfig:
    """The setting for a step of `rows` rows of H (H200)."""
    return TuningConfig(4, 1) if rows < 4096 else TuningConfig(32, 4)


def rope_write(
    qkv_TKXH: jax.Array,
    cos_TD: jax.Array,
    sin_TD: jax.Array,
    pages_P2KSH: jax.Array,
    page_T: jax.Array,
    slot_T: jax.Array,
    scales: tuple[jax.Array, jax.Array] | None = None,
    *,
    eps: float = 0.0,
    plus_one: bool = False,
    config: TuningConfig | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
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
        eps: added to the mean square.
        plus_one: the factors are scales + 1, as Gemma has it.
        config: layout on the card; None: `tuning_config`.
        interpret: run on any platform, slowly.

    Returns:
        The queries [T, K * G, H], and the pages.

    Raises:
        ValueError: shapes or dtypes that do not fit together.
    """
    _check(qkv_TKXH, cos_TD, sin_TD, pages_P2KSH, scales)
    T, K, X, H = qkv_TKXH.shape
    rows = T * K * X
    config = config or tuning_config(rows=rows, H=H)
    ins = [qkv_TKXH.reshape(rows, H), cos_TD, sin_TD, page_T, slot_T, *(scales or ()), pages_P2KSH]
    return pl.pallas_call(
        partial(_kernel, X=X, rows=config.rows, eps=eps, plus_one=plus_one),
        grid=(pl.cdiv(rows, config.rows),),
        out_shape=(
            jax.ShapeDtypeStruct((T, K * (X - 2), H), qkv_TKXH.dtype),
            jax.ShapeDtypeStruct(pages_P2KSH.shape, pages_P2KSH.dtype),
        ),
        input_output_aliases={len(ins) - 1: 1},
        compiler_params=pltriton.CompilerParams(num_warps=config.num_warps, num_stages=1),
        interpret=interpret,
        name="rope_write",
    )(*ins)


def rope_write_reference(
    qkv_TKXH: jax.Array,
    cos_TD: jax.Array,
    sin_TD: jax.Array,
    pages_P2KSH: jax.Array,
    page_T: jax.Array,
    slot_T: jax.Array,
    scales: tuple[jax.Array, jax.Array] | None = None,
    *,
    eps: float = 0.0,
    plus_one: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """`rope_write` in plain XLA, for every platform."""
    T, K, X, H = qkv_TKXH.shape
    dtype = qkv_TKXH.dtype
    q_TKGH, k_TKH, v_TKH = qkv_TKXH[:, :, :-2], qkv_TKXH[:, :, -2], qkv_TKXH[:, :, -1]
    if scales is not None:
        norm = partial(_rms_norm, eps=eps, plus_one=plus_one)
        q_TKGH, k_TKH = norm(q_TKGH, scales[0]), norm(k_TKH, scales[1])
    q_TKGH, k_TKH = (apply_rope(x, cos_TD, sin_TD).astype(dtype) for x in (q_TKGH, k_TKH))
    pages_P2KSH = write_kv_pages(k_TKH, v_TKH, pages_P2KSH, page_T, slot_T)
    return q_TKGH.reshape(T, K * (X - 2), H), pages_P2KSH


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate [T, ..., H] by tables [T, H / 2]; pair i is (x[i], x[i + H / 2]). float32 out."""
    middle = (1,) * (x.ndim - 2)
    cos, sin = (t.reshape(t.shape[0], *middle, t.shape[1]) for t in (cos, sin))
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)


def _rms_norm(x: jax.Array, scale: jax.Array, *, eps: float, plus_one: bool) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide *= lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * (scale.astype(jnp.float32) + plus_one)).astype(x.dtype)


def _kernel(
    qkv_ref: Any,
    cos_ref: Any,
    sin_ref: Any,
    page_ref: Any,
    slot_ref: Any,
    *rest: Any,
    X: int,
    rows: int,
    eps: float,
    plus_one: bool,
) -> None:
    *scale_refs, input_ref, q_ref, pages_ref = rest
    del input_ref  # pages_ref's memory
    (total, H), (T, *_), (P, _, K, _, _) = qkv_ref.shape, q_ref.shape, pages_ref.shape
    D, G, dtype = H // 2, X - 2, qkv_ref.dtype
    row_R = pl.program_id(0) * rows + jnp.arange(rows)
    head_R, x_R = lax.div(row_R, X), lax.rem(row_R, X)
    t_R, k_R = lax.div(head_R, K), lax.rem(head_R, K)
    live_R, is_q_R, is_v_R = row_R < total, x_R < G, x_R == G + 1
    lane_L = jnp.arange(1 << (D - 1).bit_length())
    is_lane_1L = (lane_L < D)[None, :]

    def load(ref: Any, live_R: jax.Array, at_R: jax.Array, first: int = 0) -> jax.Array:
        at = ref.at[at_R[:, None], first + lane_L[None, :]]
        return pltriton.load(at, mask=live_R[:, None] & is_lane_1L, other=0).astype(jnp.float32)

    def store(ref: Any, live_R: jax.Array, *index: jax.Array, halves: Any) -> None:
        columns = [i[:, None] for i in index]
        for first, half in zip((0, D), halves, strict=True):
            at = ref.at[(*columns, first + lane_L[None, :])]
            pltriton.store(at, half.astype(ref.dtype), mask=live_R[:, None] & is_lane_1L)

    a, b = load(qkv_ref, live_R, row_R), load(qkv_ref, live_R, row_R, D)
    value = a, b
    if scale_refs:
        square_R = (a * a).sum(axis=1) + (b * b).sum(axis=1)
        root_R1 = lax.rsqrt(square_R / H + eps)[:, None]
        q_scale, k_scale = (
            [
                pltriton.load(ref.at[first + lane_L], mask=lane_L < D, other=0)[None, :].astype(
                    jnp.float32
                )
                + plus_one
                for first in (0, D)
            ]
            for ref in scale_refs
        )
        a, b = (
            (half * root_R1 * jnp.where(is_q_R[:, None], q, k)).astype(dtype).astype(jnp.float32)
            for half, q, k in zip((a, b), q_scale, k_scale, strict=True)
        )
    turns_R = live_R & ~is_v_R
    cos, sin = load(cos_ref, turns_R, t_R), load(sin_ref, turns_R, t_R)
    rotated = [x.astype(dtype) for x in (a * cos - b * sin, b * cos + a * sin)]
    # Dead rows' places lie outside: in interpret mode they would be written back.
    t_q_R = jnp.where(live_R & is_q_R, t_R, T)
    store(q_ref, live_R & is_q_R, t_q_R, k_R * G + x_R, halves=rotated)
    kv_R = live_R & ~is_q_R
    page_R = jnp.where(kv_R, pltriton.load(page_ref.at[t_R], mask=kv_R, other=0), P)
    slot_R = pltriton.load(slot_ref.at[t_R], mask=kv_R, other=0)
    kv = [jnp.where(is_v_R[:, None], *pair) for pair in zip(value, rotated, strict=True)]
    store(pages_ref, kv_R, page_R, x_R - G, k_R, slot_R, halves=kv)


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
    for name, dtype in (("activations", qkv_TKXH.dtype), ("pages", pages_P2KSH.dtype)):
        if dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
            raise ValueError(f"{name} must be float32, bfloat16 or float16, got {dtype}")
