"""Matrix products of few rows, in Pallas' Triton dialect.

With up to 64 rows such a product takes as long as its weights take to arrive. One program serves
a block of output columns, or a stretch of the sum for it where there are fewer blocks than the
card has multiprocessors; what stands before and after the product (norm, bias, gated activation,
residual) is done on the way, since a kernel of its own would cost more than it does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

MAX_ROWS = 64
COUNTERS = 512

ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
}


@dataclass(frozen=True)
class TuningConfig:
    """How the product is laid out on the card.

    Attributes:
        block_out: output columns of a program.
        block_in: terms of the sum per step of its loop.
        splits: programs that share a block's sum.
        num_warps: warps of a program.
        num_stages: depth of the load pipeline.
    """

    block_out: int
    block_in: int
    splits: int
    num_warps: int
    num_stages: int


class Norm(NamedTuple):
    """RMS norm of the rows before the product; see layers/norm.py."""

    scale_I: jax.Array
    eps: float
    plus_one: bool


def rms_norm(x: jax.Array, norm: Norm) -> jax.Array:
    """x / rms(x) * factor over the last axis, in float32."""
    x = x.astype(jnp.float32)
    x *= lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + norm.eps)
    return x * (norm.scale_I.astype(jnp.float32) + norm.plus_one)


def is_faster(x_TI, kernel, *, gated: bool) -> bool:
    return False


def small_batch_linear(
    x_MI: jax.Array,
    kernel: jax.Array,
    *,
    bias: jax.Array | None = None,
    norm: Norm | None = None,
    activation: str | None = None,
    residual_MO: jax.Array | None = None,
    counters: jax.Array | None = None,
    config: TuningConfig,
    after: jax.Array | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    M = x_MI.shape[0]
    I = kernel.shape[0]
    gated = activation is not None
    O = kernel.shape[-1]
    kernel = kernel.reshape(I, -1)
    R = max(16, 1 << (M - 1).bit_length())
    c = config
    blocks = O // c.block_out
    ins = [x_MI, kernel]
    if norm is not None:
        ins.append(norm.scale_I)
    if bias is not None:
        ins.append(bias.reshape(-1))
    if residual_MO is not None:
        ins.append(residual_MO)
    outs = [jax.ShapeDtypeStruct((M, O), x_MI.dtype)]
    if after is not None:
        ins.append(after)
    aliases = {}
    if c.splits > 1:
        aliases = {len(ins): 1}
        ins.append(counters)
        outs.append(jax.ShapeDtypeStruct(counters.shape, counters.dtype))
        outs.append(jax.ShapeDtypeStruct((c.splits, R, O), jnp.float32))
    else:
        outs.append(jax.ShapeDtypeStruct((COUNTERS,), jnp.int32))
    out = pl.pallas_call(
        partial(
            _kernel,
            config=c,
            R=R,
            eps=None if norm is None else norm.eps,
            plus_one=norm is not None and norm.plus_one,
            has_bias=bias is not None,
            activation=activation,
            has_residual=residual_MO is not None,
            has_after=after is not None,
            interpret=interpret,
        ),
        grid=(blocks * c.splits,),
        out_shape=outs,
        input_output_aliases=aliases,
        compiler_params=pltriton.CompilerParams(
            num_warps=c.num_warps, num_stages=c.num_stages
        ),
        interpret=interpret,
        name="small_batch_linear",
    )(*ins)
    return out[0], out[1]


def _kernel(
    *refs: Any,
    config: TuningConfig,
    R: int,
    eps: float | None,
    plus_one: bool,
    has_bias: bool,
    activation: str | None,
    has_residual: bool,
    has_after: bool,
    interpret: bool,
) -> None:
    refs = list(refs)
    x_ref, w_ref = refs.pop(0), refs.pop(0)
    scale_ref = refs.pop(0) if eps is not None else None
    bias_ref = refs.pop(0) if has_bias else None
    residual_ref = refs.pop(0) if has_residual else None
    if has_after:
        refs.pop(0)
    if config.splits > 1:
        refs.pop(0)
    out_ref, counter_ref = refs.pop(0), refs.pop(0)
    c = config
    M, O = out_ref.shape
    I = w_ref.shape[0]
    dtype = x_ref.dtype
    blocks = O // c.block_out
    pid = pl.program_id(0)
    block = lax.rem(pid, blocks)
    split = lax.div(pid, blocks)
    m_R = jnp.arange(R)
    o_B = block * c.block_out + jnp.arange(c.block_out)
    live_R1 = (m_R < M)[:, None]
    if activation is None:
        width, column_W = c.block_out, o_B
    else:
        width = 2 * c.block_out
        w_W = jnp.arange(width)
        column_W = lax.div(w_W, c.block_out) * O + block * c.block_out + lax.rem(w_W, c.block_out)
    steps = I // c.block_in // c.splits

    def step(i, state):
        acc, square_R = state
        k_K = (split * steps + i) * c.block_in + jnp.arange(c.block_in)
        place = x_ref.at[m_R[:, None], k_K[None, :]]
        if R == M:
            x_RK = pltriton.load(place)
        else:
            mask = jnp.broadcast_to(live_R1, (R, c.block_in))
            x_RK = pltriton.load(place, mask=mask, other=0)
        if scale_ref is not None:
            x32_RK = x_RK.astype(jnp.float32)
            square_R += x32_RK * x32_RK
            scale_K = scale_ref[k_K].astype(jnp.float32) + (1.0 if plus_one else 0.0)
            x_RK = (x32_RK * scale_K[None, :]).astype(dtype)
        w_KB = pltriton.load(w_ref.at[k_K[:, None], column_W[None, :]])
        return acc + pltriton.dot(x_RK, w_KB), square_R

    zero = jnp.zeros((R, width), jnp.float32)
    square = jnp.zeros((R, c.block_in) if eps is not None else (R,), jnp.float32)
    acc, square_R = lax.fori_loop(0, steps, step, (zero, square))

    def finish(acc) -> None:
        if eps is not None:
            factor_R = lax.rsqrt(square_R.sum(axis=1) / I + eps)
            acc = acc * factor_R[:, None]
        if bias_ref is not None:
            acc = acc + bias_ref[column_W].astype(jnp.float32)[None, :]
        y = acc
        if activation is not None:
            y_R2B = acc.reshape(R, 2, c.block_out)
            up = lax.broadcasted_iota(jnp.int32, y_R2B.shape, 1) == 1
            gate_RB = jnp.where(up, 0.0, y_R2B).sum(axis=1)
            up_RB = jnp.where(up, y_R2B, 0.0).sum(axis=1)
            y = ACTIVATIONS[activation](gate_RB) * up_RB
        mask = jnp.broadcast_to(live_R1, y.shape)
        if residual_ref is not None:
            place = residual_ref.at[m_R[:, None], o_B[None, :]]
            y = y + pltriton.load(place, mask=mask, other=0).astype(jnp.float32)
        pltriton.store(out_ref.at[m_R[:, None], o_B[None, :]], y.astype(dtype), mask=mask)

    if c.splits == 1:
        finish(acc)
        per = max(1, COUNTERS // blocks)
        # Counters for the next product.
        @pl.when(pid < COUNTERS // 16)
        def _():
            counter_ref[pid * 16 + jnp.arange(16)] = jnp.zeros((16,), jnp.int32)
        return
    part_ref = refs.pop(0)
    row_RB, o_RB = m_R[:, None], o_B[None, :]
    pltriton.store(part_ref.at[split, row_RB, o_RB], acc)
    if not interpret:
        pltriton.debug_barrier()
    done = pltriton.atomic_add(counter_ref, (block,), jnp.int32(1))

    @pl.when(done == c.splits - 1)
    def _() -> None:
        total = zero
        for s in range(c.splits):
            total += pltriton.load(part_ref.at[s, row_RB, o_RB], volatile=True)
        finish(total)
        counter_ref[block] = 0
