"""Products with kernels stored in 8 or 4 bits, in Pallas' Triton dialect.

Few rows cost what reading the kernel costs, so it is read as it is stored and widened in registers.
The kernel is the left operand, [outputs, terms]: its tiles go from registers straight into the
tensor cores, 64 outputs at a time, and the few rows are the right one. One program serves a block
of outputs and of rows; where that leaves multiprocessors idle, several share a block's sum, and the
last to finish adds up their parts, always in the same order.

Sums over a group of terms are scaled as they come out: what is multiplied is small integers or
8-bit floats, exact in 16 bits.

Bias, gated activation and residual are done on the way, and a norm between two products is begun by
the first and completed by the second, as in small_batch_linear.
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
from pallas_kernels.elementwise import elementwise
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
from pallas_kernels.wide_integers import ELEMENT, PACKED, RUN, WIDE, packed, unit, unpack

MAX_ROWS = 64  # beyond, widening the kernel once for all rows costs less
MAX_E4M3_ROWS = 16  # of rows in e4m3, which cuBLASLt multiplies as they are
E4M3 = jnp.float8_e4m3fn


@dataclass(frozen=True)
class TuningConfig:
    """How a product is laid out on the card.

    Attributes:
        block_out: outputs of a program, 32, 64, 128 or 256.
        block_rows: rows of a program, a power of two from 8 to 256.
        block_in: terms of the sum that are loaded at once, a power of two from 32 to 512, of
            integers from 64; groups that share a scale are multiples.
        splits: programs that share the sum, up to 16.
        num_warps: warps of a program, a power of two up to 8.
        num_stages: depth of the load pipeline.
    """

    block_out: int
    block_rows: int
    block_in: int
    splits: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        if self.block_out not in (32, 64, 128, 256):
            raise ValueError(f"block_out must be 32, 64, 128 or 256, got {self.block_out}")
        if self.block_rows not in (8, 16, 32, 64, 128, 256):
            raise ValueError(f"block_rows must be a power of two from 8, got {self.block_rows}")
        if self.block_in not in (32, 64, 128, 256, 512):
            raise ValueError(f"block_in must be a power of two up to 512, got {self.block_in}")
        if not 1 <= self.splits <= 16:
            raise ValueError(f"splits must be from 1 to 16, got {self.splits}")
        if self.num_warps not in (1, 2, 4, 8):
            raise ValueError(f"num_warps must be 1, 2, 4 or 8, got {self.num_warps}")
        if not 1 <= self.num_stages <= 8:
            raise ValueError(f"num_stages must be from 1 to 8, got {self.num_stages}")

    def fits(self, D: int, F: int, group: int) -> bool:
        """Whether blocks divide D terms, of which `group` share a scale, and F outputs."""
        return (
            F % self.block_out == 0
            and D % self.block_in == 0
            and group % self.block_in == 0
            and self.splits <= D // self.block_in
        )


def tuning_config(
    *, T: int, D: int, F: int, group: int, rows_dtype: Any, kernel_dtype: Any
) -> TuningConfig:
    """The setting for T rows in this dtype, of D terms with a scale a group, and F outputs.

    Rows of 8 bits, and few of 16, are multiplied by mma.sync: wgmma, which Triton takes from four
    warps on for rows in 16 bits, waits for weights that are widened in registers, step by step.
    """
    rows = 8 if T <= 8 else 16 if T <= 16 else 32 if T <= 32 else 64
    block_in, block_out, per_core, warps = min(128, group & -group), 64, 2, 4
    if rows_dtype == E4M3:
        per_core = 3
    elif rows > 16:
        block_out = 64 if F % 128 else 128
    elif kernel_dtype != jnp.uint16:
        per_core, warps = 4, 2
    elif rows == 8 or F % 128:
        per_core, warps = 7, 2
    else:
        per_core, block_out = 9, 128
    splits = min(round(per_core * PROGRAMS / (F // block_out)), D // block_in // 2, 16)
    return TuningConfig(block_out, rows, block_in, max(1, splits), warps, num_stages=3)


def is_supported(*, T: int, D: int, F: int, group: int, rows_dtype: Any) -> bool:
    """Whether the kernel takes such a product of rows in this dtype, and is not the slower.

    Integers want groups of `RUN` terms; here all do.
    """
    narrow = rows_dtype in (jnp.bfloat16, jnp.float16, E4M3)
    few = (MAX_E4M3_ROWS if rows_dtype == E4M3 else MAX_ROWS) >= T
    return narrow and few and F % 64 == 0 and D % group == 0 and group % RUN == 0


def quantized_linear(
    x: jax.Array | HalfNormed,
    kernel_FX: jax.Array,
    scale: jax.Array,
    *,
    zero_GF: jax.Array | None = None,
    row_scale_T: jax.Array | None = None,
    eps: float = 0.0,
    bias_F: jax.Array | None = None,
    activation: str | None = None,
    residual_TF: jax.Array | None = None,
    next_scale_F: jax.Array | None = None,
    dtype: Any = None,
    config: TuningConfig | None = None,
    interpret: bool = False,
) -> Rows:
    """x @ ((kernel - zero) * scale).T, times the scales of the rows, and what stands around that.

    Sums are float32 and rounded once, at the end. A row's result does not depend on other rows.

    Args:
        x: [T, D] rows in bfloat16 or float16, or such rows whose norm is to be completed; or rows
            in e4m3 for a kernel of the same type.
        kernel_FX: [F, D] in e4m3, or integers. Those are [F, D / 2] in int16: two weights of 8
            bits, each plus 128, of the two halves of every `RUN` terms; or [F, D / 4] in uint16:
            four weights of 4 bits, each plus 8, of the four quarters.
        scale: float32, [F] or [G, F] for G groups of neighbouring terms.
        zero_GF: int8, subtracted from the kernel.
        row_scale_T: float32.
        eps: of the norm of x.
        bias_F: added to the product.
        activation: a name from `ACTIVATIONS`, but not gelu by the error function. The outputs are
            then gates, and after them as many ups: activation(gate) * up, [T, F / 2], comes out.
        residual_TF: added last, as the result has columns.
        next_scale_F: factors of the norm of the result, to begin it here.
        dtype: of the result; None: that of the rows, or bfloat16 for e4m3.
        config: layout on the card, which must divide D and F; None: `tuning_config`.
        interpret: run on any platform, slowly.

    Returns:
        [T, F] or, with an activation, [T, F / 2], and the first half of its norm.

    Raises:
        ValueError: operands outside these bounds.
    """
    x_TD, square_XT = x if isinstance(x, HalfNormed) else (x, None)
    (T, D), F = x_TD.shape, kernel_FX.shape[0]
    groups = scale.shape[0] if scale.ndim == 2 else 1
    group = D // groups
    if kernel_FX.shape[1] * packed(kernel_FX.dtype) != D or scale.shape[-1] != F:
        raise ValueError(f"rows of {D} do not fit {kernel_FX.shape} with {scale.shape} scales")
    is_float = kernel_FX.dtype == E4M3
    if not is_float and kernel_FX.dtype.name not in PACKED:
        raise ValueError(f"expected a kernel in e4m3, int16 or uint16, got {kernel_FX.dtype}")
    if dtype is None:
        dtype = jnp.bfloat16 if x_TD.dtype == E4M3 else x_TD.dtype
    types = {"rows_dtype": x_TD.dtype, "kernel_dtype": kernel_FX.dtype}
    config = config or tuning_config(T=T, D=D, F=F, group=group, **types)
    if x_TD.dtype.name not in WIDE and not (x_TD.dtype == E4M3 and is_float):
        raise ValueError(f"rows in {x_TD.dtype} do not go with a kernel in {kernel_FX.dtype}")
    if not config.fits(D, F, group) or not is_float and config.block_in % RUN:
        raise ValueError(f"rows of {D} to {F} outputs in groups of {group} do not fit {config}")
    if activation == NOT_IN_KERNELS:
        raise ValueError(f"{activation} has no place in a kernel")
    R, W = config.block_rows, config.block_out
    blocks, row_blocks = F // W, -(-T // R)
    columns = F if activation is None else F // 2
    operands: dict[str, Any] = {
        "x": x_TD,
        "kernel": kernel_FX,
        "scale": scale.reshape(groups, F),
        "row_scale": row_scale_T,
        "zero": zero_GF,
        "square": square_XT,
        "bias": bias_F,
        "residual": residual_TF,
        "next_scale": next_scale_F,
    }
    if zero_GF is not None:
        operands["sum"] = x_TD.astype(jnp.float32).reshape(T, groups, group).sum(-1).T
    outs = result_shapes((T, columns), dtype, blocks=blocks, begins_norm=next_scale_F is not None)
    if config.splits > 1:
        # One array serves all calls of a program: each leaves it as it was.
        operands["arrived"] = jnp.zeros((row_blocks * blocks,), jnp.int32)
        part = (row_blocks * blocks, config.splits, W, R)
        outs["part"] = jax.ShapeDtypeStruct(part, jnp.float32)
    return call_by_name(
        partial(_kernel, eps=eps, activation=activation, config=config, on_card=not interpret),
        operands,
        outs,
        name="quantized_linear",
        programs=row_blocks * blocks * config.splits,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
    )


def _kernel(
    *refs: Any,
    names: tuple[str, ...],
    eps: float,
    activation: str | None,
    config: TuningConfig,
    on_card: bool,
) -> None:
    ref = dict(zip(names, refs, strict=True))
    (T, columns), groups = ref["out"].shape, ref["scale"].shape[0]
    D = ref["x"].shape[1]
    W, R, C, splits = config.block_out, config.block_rows, config.block_in, config.splits
    # Blocks of rows of the same outputs run side by side: the kernel is read from memory once.
    pid = let_next_start(pl.program_id(0), on_card)
    pid, split = lax.div(pid, splits), lax.rem(pid, splits)
    row_blocks = -(-T // R)
    block = lax.div(pid, row_blocks)
    # Rows of the kernel: with an activation those of the gates, then those of the ups.
    B = W if activation is None else W // 2
    w_W = jnp.arange(W)
    f_W = lax.div(w_W, B) * columns + block * B + lax.rem(w_W, B)
    t_R = lax.rem(pid, row_blocks) * R + jnp.arange(R)
    at_R = jnp.minimum(t_R, T - 1)  # rows after the last are computed, but never written
    steps = D // C
    first, end = lax.div(steps * split, splits), lax.div(steps * (split + 1), splits)
    dtype = ref["x"].dtype
    parts = packed(ref["kernel"].dtype)
    is_float = parts == 1
    one = 1.0 if is_float else unit(dtype)  # what comes out of the kernel for it

    def rows(d_C: jax.Array) -> jax.Array:
        # Not the last row over and over: all programs would ask for the same few lines at once.
        live_RC = jnp.broadcast_to(t_R[:, None] < T, (R, d_C.size))
        return pltriton.load(ref["x"].at[t_R[:, None], d_C[None, :]], mask=live_RC)

    def add_product(i: jax.Array, sum_WR: jax.Array) -> jax.Array:
        x_X, run = jnp.arange(C // parts), RUN // parts
        words_WX = ref["kernel"][f_W[:, None], (i * (C // parts) + x_X)[None, :]]
        if is_float:
            return sum_WR + _dot(words_WX.astype(dtype), rows(i * C + x_X))
        first_X = i * C + lax.div(x_X, run) * RUN + lax.rem(x_X, run)
        for part in range(parts):
            part_WX = _unpack(words_WX, part, dtype, on_card)
            sum_WR += _dot(part_WX, rows(first_X + part * run))
        return sum_WR

    def load_group(i: jax.Array) -> dict[str, jax.Array]:
        """What stands around the sum over a step's group."""
        g = lax.div(i, steps // groups)
        found = {"scale": ref["scale"][g, f_W]}
        if "zero" in ref:
            found |= {"zero": ref["zero"][g, f_W], "sum": ref["sum"][g, at_R]}
        return found

    def add_group_step(
        i: jax.Array, carry: tuple[jax.Array, dict[str, jax.Array]]
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        sum_WR, group = carry
        following = load_group(jnp.minimum(i + 1, end - 1))  # is there when its step begins
        new_WR = add_product(i, jnp.zeros_like(sum_WR))
        if "zero" in ref:
            # A step's share of a group's sum of rows is subtracted with its last step.
            last = lax.rem(i, steps // groups) == steps // groups - 1
            zero_W = group["zero"].astype(jnp.float32) * one
            new_WR -= jnp.where(last, zero_W, 0.0)[:, None] * group["sum"][None, :]
        scale_W = group["scale"] * (1 / one)
        return _fused(new_WR, scale_W[:, None], sum_WR, on_card), following

    f_B = block * B + jnp.arange(B)
    at_BR, live_BR = (t_R[None, :], f_B[:, None]), jnp.broadcast_to(t_R[None, :] < T, (B, R))

    def load() -> dict[str, jax.Array]:
        found = load_around(ref, t_R, f_W, at_BR, live_BR)
        if groups == 1:
            found |= load_group(jnp.int32(0))
        if "row_scale" in ref:
            found["row_scale"] = ref["row_scale"][at_R]
        return found

    # Of few rows it is there when the sum is, of more it would take too many registers.
    early = load() if R <= EARLY_ROWS else {}
    sum_WR = jnp.zeros((W, R), jnp.float32)
    if groups == 1:
        sum_WR = lax.fori_loop(first, end, add_product, sum_WR)
    else:
        sum_WR, _ = lax.fori_loop(first, end, add_group_step, (sum_WR, load_group(first)))

    def finish(sum_WR: jax.Array) -> None:
        around = early or load()
        if groups == 1:
            if "zero" in ref:
                zero_W = around["zero"].astype(jnp.float32) * one
                sum_WR -= zero_W[:, None] * around["sum"][None, :]
            sum_WR *= (around["scale"] * (1 / one))[:, None]
        if "square" in around:
            sum_WR *= row_root(around["square"], D, eps)[None, :]
        if "row_scale" in ref:
            sum_WR *= around["row_scale"][None, :]
        if "bias" in ref:
            sum_WR += around["bias"][:, None]
        y_BR = sum_WR if activation is None else gated(sum_WR, 0, activation)
        if "residual" in ref:
            y_BR += around["residual"].astype(jnp.float32)
        y_BR = y_BR.astype(ref["out"].dtype)
        pltriton.store(ref["out"].at[at_BR], y_BR, mask=live_BR)
        if "next_scale" in ref:
            # The only rounding, as in the norm: the root is divided by at the end.
            pltriton.store(ref["next"].at[at_BR], y_BR * around["next_scale"], mask=live_BR)
            square_R = jnp.square(y_BR.astype(jnp.float32)).sum(axis=0)
            pltriton.store(ref["next_square"].at[block, t_R], square_R, mask=t_R < T)

    if splits == 1:
        finish(sum_WR)
    else:
        share_sum(sum_WR, ref, pid, split, splits, finish, on_card)


def _dot(kernel_WC: jax.Array, x_RC: jax.Array) -> jax.Array:
    return lax.dot_general(
        kernel_WC, x_RC, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )


def _unpack(words_WX: jax.Array, part: int, dtype: Any, on_card: bool) -> jax.Array:
    """One of each element's weights, less half their range, in that dtype's units."""
    bits = ELEMENT // packed(words_WX.dtype)
    if on_card:
        return elementwise(unpack(bits, part, dtype), "=r,r", words_WX, dtype=dtype, pack=2)
    weights_WX = (words_WX.astype(jnp.int32) >> bits * part) % 2**bits - 2 ** (bits - 1)
    return (weights_WX * unit(dtype)).astype(dtype)


def _fused(a: jax.Array, b: jax.Array, c: jax.Array, on_card: bool) -> jax.Array:
    """a * b + c: on the card the compiler would take two instructions, with a rounding each."""
    if not on_card:
        return a * b + c
    b = jnp.broadcast_to(b, a.shape)
    return elementwise("fma.rn.f32 $0, $1, $2, $3;", "=r,r,r,r", a, b, c, dtype=a.dtype)
