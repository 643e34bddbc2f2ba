"""Matrix products of few rows with what stands around them, in Pallas' Triton dialect.

With few rows and a small matrix, starting kernels costs more than moving bytes, so the norm
before the product and the bias, gated activation and residual after it are done on the way. One
program serves a block of output columns. Where that leaves multiprocessors idle, several share a
block's sum; the last to finish adds up their parts, always in the same order.

A norm between two products costs no pass of its own: the one that makes the rows also multiplies
them by the norm's factors and sums their squares, the other divides by the root at its end.
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

from pallas_kernels.dependents import let_next_start
from pallas_kernels.product_parts import (
    EARLY_ROWS,
    NOT_IN_KERNELS,
    PROGRAMS,
    call_by_name,
    gated,
    load_around,
    result_shapes,
    share_sum,
)
from pallas_kernels.rms_norm import HalfNormed, Rows, row_root

MAX_ROWS = 64
MAX_ELEMENTS = 8 << 20  # of a kernel; XLA streams larger ones as fast, and fuses as much


@dataclass(frozen=True)
class TuningConfig:
    """How a product is laid out on the card.

    Attributes:
        block_out: output columns of a program, a power of two from 16 to 128.
        block_in: terms of the sum that are loaded at once, a power of two from 16 to 1024.
        splits: programs that share the sum.
        num_warps: warps of a program, a power of two up to 8.
        num_stages: depth of the load pipeline.
    """

    block_out: int
    block_in: int
    splits: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        if self.block_out not in (16, 32, 64, 128):
            raise ValueError(f"block_out must be 16, 32, 64 or 128, got {self.block_out}")
        if self.block_in not in (16, 32, 64, 128, 256, 512, 1024):
            raise ValueError(f"block_in must be a power of two up to 1024, got {self.block_in}")
        if not 1 <= self.splits <= 16:
            raise ValueError(f"splits must be from 1 to 16, got {self.splits}")
        if self.num_warps not in (1, 2, 4, 8):
            raise ValueError(f"num_warps must be 1, 2, 4 or 8, got {self.num_warps}")
        if not 1 <= self.num_stages <= 8:
            raise ValueError(f"num_stages must be from 1 to 8, got {self.num_stages}")

    def fits(self, D: int, F: int) -> bool:
        """Whether blocks divide D terms and F columns."""
        return F % self.block_out == 0 and D % (self.block_in * self.splits) == 0


def tuning_config(*, T: int, D: int, F: int, gated: bool) -> TuningConfig:
    """The setting for T rows of D terms and F columns out, as measured on an H200.

    All fit the 99 KiB of shared memory of GPUs of compute capability 8.6 and 8.9.
    """
    blocks, few = F // 32, T <= 32
    if blocks <= PROGRAMS // 2:
        splits = min(4, PROGRAMS // max(blocks, 1))
        return TuningConfig(32, 128, splits, 4, max(1, min(6 if few else 4, D // 128 // splits)))
    return TuningConfig(32, 256 if few else 128, 1, 4, 3 if gated else 4)


def is_faster(x_TD: jax.Array, kernel: jax.Array, activation: str | None) -> bool:
    """Whether `small_batch_linear` takes these operands, and an H200 less time than XLA's way."""
    (T, D), F = x_TD.shape, kernel.shape[-1]
    return (
        x_TD.dtype == kernel.dtype == jnp.bfloat16
        and T <= MAX_ROWS
        and kernel.size <= MAX_ELEMENTS
        and activation != NOT_IN_KERNELS
        and tuning_config(T=T, D=D, F=F, gated=kernel.ndim == 3).fits(D, F)
    )


def small_batch_linear(
    x: jax.Array | HalfNormed,
    kernel: jax.Array,
    *,
    eps: float = 0.0,
    bias: jax.Array | None = None,
    activation: str | None = None,
    residual_TF: jax.Array | None = None,
    next_scale_F: jax.Array | None = None,
    config: TuningConfig | None = None,
    interpret: bool = False,
) -> Rows:
    """residual + activation(gate) * up of x @ kernel + bias; all but the product optional.

    Sums are float32 and rounded once, at the end. A row's result does not depend on other rows.

    Args:
        x: [T, D] bfloat16 rows, T <= 64, or such rows whose norm is to be completed.
        kernel: [D, F], with an activation [D, 2, F], gates first; bfloat16.
        eps: of the norm of x.
        bias: [F] or [2, F], as the kernel has columns.
        activation: a name from `ACTIVATIONS`, but not gelu by the error function.
        residual_TF: added last.
        next_scale_F: factors of the norm of the result, to begin it here.
        config: layout on the card, which must divide D and F; None: `tuning_config`.
        interpret: run on any platform, slowly.

    Returns:
        [T, F] in bfloat16, and the first half of its norm.

    Raises:
        ValueError: operands outside these bounds.
    """
    x_TD, square_XT = x if isinstance(x, HalfNormed) else (x, None)
    T, D = x_TD.shape
    gated, F = activation is not None, kernel.shape[-1]
    config = config or tuning_config(T=T, D=D, F=F, gated=gated)
    if kernel.shape != ((D, 2, F) if gated else (D, F)):
        raise ValueError(f"rows of {D} and {activation} do not fit a kernel of {kernel.shape}")
    if not x_TD.dtype == kernel.dtype == jnp.bfloat16:
        raise ValueError(f"expected bfloat16, got {x_TD.dtype} and {kernel.dtype}")
    if T > MAX_ROWS or not config.fits(D, F):
        raise ValueError(f"{T} rows of {D} to {F} columns do not fit {config}")
    if activation == NOT_IN_KERNELS:
        raise ValueError(f"{activation} has no place in a kernel")
    R, width = max(16, pl.next_power_of_2(T)), config.block_out * (1 + gated)
    blocks = F // config.block_out
    operands = {
        "x": x_TD,
        "kernel": kernel.reshape(D, -1),
        "square": square_XT,
        "bias": None if bias is None else bias.reshape(-1),
        "residual": residual_TF,
        "next_scale": next_scale_F,
    }
    outs = result_shapes((T, F), x_TD.dtype, blocks=blocks, begins_norm=next_scale_F is not None)
    if config.splits > 1:
        # One array serves all calls of a program: each leaves it as it was.
        operands["arrived"] = jnp.zeros((blocks,), jnp.int32)
        outs["part"] = jax.ShapeDtypeStruct((blocks, config.splits, R, width), jnp.float32)
    return call_by_name(
        partial(_kernel, R=R, eps=eps, activation=activation, config=config, on_card=not interpret),
        operands,
        outs,
        name="small_batch_linear",
        programs=blocks * config.splits,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
    )


def _kernel(
    *refs: Any,
    names: tuple[str, ...],
    R: int,
    eps: float,
    activation: str | None,
    config: TuningConfig,
    on_card: bool,
) -> None:
    ref = dict(zip(names, refs, strict=True))
    (T, F), D = ref["out"].shape, ref["x"].shape[1]
    B, C, splits = config.block_out, config.block_in, config.splits
    pid = let_next_start(pl.program_id(0), on_card)
    block, split = lax.div(pid, splits), lax.rem(pid, splits)
    t_R1, f_B = jnp.arange(R)[:, None], block * B + jnp.arange(B)
    # Columns of the kernel: those of the gates, then those of the ups.
    w_W = jnp.arange(B if activation is None else 2 * B)
    column_W = lax.div(w_W, B) * F + block * B + lax.rem(w_W, B)
    steps = D // C // splits

    def step(i: jax.Array, sum_RW: jax.Array) -> jax.Array:
        d_C = (split * steps + i) * C + jnp.arange(C)
        live_RC = jnp.broadcast_to(t_R1 < T, (R, C))
        x_RC = pltriton.load(ref["x"].at[t_R1, d_C[None, :]], mask=live_RC, other=0)
        kernel_CW = ref["kernel"][d_C[:, None], column_W[None, :]]
        return sum_RW + pltriton.dot(x_RC, kernel_CW)

    at_RB, live_RB = (t_R1, f_B[None, :]), jnp.broadcast_to(t_R1 < T, (R, B))

    load = partial(load_around, ref, jnp.arange(R), column_W, at_RB, live_RB)
    # Of few rows it is there when the sum is, of more it would take too many registers.
    early = load() if R <= EARLY_ROWS else {}
    sum_RW = lax.fori_loop(0, steps, step, jnp.zeros((R, w_W.size), jnp.float32))

    def finish(sum_RW: jax.Array) -> None:
        around = early or load()
        if "square" in ref:
            sum_RW *= row_root(around["square"], D, eps)[:, None]
        if "bias" in ref:
            sum_RW += around["bias"][None, :]
        y_RB = sum_RW if activation is None else gated(sum_RW, 1, activation)
        if "residual" in ref:
            y_RB += around["residual"].astype(jnp.float32)
        y_RB = y_RB.astype(ref["out"].dtype)
        pltriton.store(ref["out"].at[at_RB], y_RB, mask=live_RB)
        if "next_scale" in ref:
            # The only rounding, as in the norm: the root is divided by at the end.
            pltriton.store(ref["next"].at[at_RB], y_RB * around["next_scale"], mask=live_RB)
            square_R = jnp.square(y_RB.astype(jnp.float32)).sum(axis=1)
            t_R = jnp.arange(R)
            pltriton.store(ref["next_square"].at[block, t_R], square_R, mask=t_R < T)

    if splits == 1:
        finish(sum_RW)
    else:
        share_sum(sum_RW, ref, block, split, splits, finish, on_card)
