"""Products with kernels stored in 8 or 4 bits, in Pallas' Triton dialect.

Few rows cost what reading the kernel costs, so it is read as it is stored and widened in registers.
The kernel is the left operand, [outputs, terms]: its tiles go from registers straight into the
tensor cores, 64 outputs at a time, and the few rows are the right one. One program serves a block
of outputs and of rows; where that leaves multiprocessors idle, several share a block's sum, and the
last to finish adds up their parts, always in the same order.

Sums over a group of terms are scaled as they come out: what is multiplied is small integers or
8-bit floats, exact in bfloat16.
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

MAX_ROWS = 64  # beyond, widening the kernel once for all rows costs less
PROGRAMS = 132  # multiprocessors of an H100 or H200
E4M3 = jnp.float8_e4m3fn

# The low halves of four bytes, as 16-bit floats: put under the bits of 128 (bfloat16) or 1024
# (float16) they make that plus the weight; that and 8 less is what they stand for. `shift` brings
# the other half down first.
_UNPACK = """{{
    .reg .b32 a, b, one, less;
    mov.b32 one, {one};
    mov.b32 less, {less};
    shr.u32 b, $2, {shift};
    prmt.b32 a, b, 0, 0x4140;
    prmt.b32 b, b, 0, 0x4342;
    lop3.b32 a, a, 0x000F000F, {base}, 0xEA;
    lop3.b32 b, b, 0x000F000F, {base}, 0xEA;
    fma.rn.{type}x2 $0, a, one, less;
    fma.rn.{type}x2 $1, b, one, less;
}}"""
_CONSTANTS = {
    "bfloat16": {"type": "bf16", "base": 0x43004300, "one": 0x3F803F80, "less": 0xC308C308},
    "float16": {"type": "f16", "base": 0x64006400, "one": 0x3C003C00, "less": 0xE408E408},
}


@dataclass(frozen=True)
class TuningConfig:
    """How a product is laid out on the card.

    Attributes:
        block_out: outputs of a program, 64, 128 or 256.
        block_rows: rows of a program, a power of two from 16 to 256.
        block_in: terms of the sum that are loaded at once, a power of two from 32 to 512; groups
            that share a scale are multiples.
        splits: programs that share the sum.
        num_warps: warps of a program, 4 or 8.
        num_stages: depth of the load pipeline.
    """

    block_out: int
    block_rows: int
    block_in: int
    splits: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        if self.block_out not in (64, 128, 256):
            raise ValueError(f"block_out must be 64, 128 or 256, got {self.block_out}")
        if self.block_rows not in (16, 32, 64, 128, 256):
            raise ValueError(f"block_rows must be a power of two to 256, got {self.block_rows}")
        if self.block_in not in (32, 64, 128, 256, 512):
            raise ValueError(f"block_in must be a power of two up to 512, got {self.block_in}")
        if not 1 <= self.splits <= 64:
            raise ValueError(f"splits must be from 1 to 64, got {self.splits}")
        if self.num_warps not in (4, 8):
            raise ValueError(f"num_warps must be 4 or 8, got {self.num_warps}")
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


def tuning_config(*, T: int, D: int, F: int, group: int, rows_dtype: Any) -> TuningConfig:
    """The setting for T rows of D terms and F outputs, `group` terms to a scale."""
    block_in = min(128, group & -group)
    splits = max(1, min(round(2 * PROGRAMS / (F // 64)), D // block_in // 2, 64))
    # 8-bit floats on both sides are multiplied as such by 64 rows, and widened by fewer; but parts
    # of so many rows cost more where a sum is shared out.
    few = 64 if rows_dtype == E4M3 and splits == 1 else 16
    rows = few if few >= T else 32 if T <= 32 else 64
    return TuningConfig(64, rows, block_in, splits, 4, 5)


def is_supported(*, T: int, D: int, F: int, group: int, rows_dtype: Any) -> bool:
    """Whether the kernel takes such a product of rows in this dtype, and is not the slower."""
    narrow = rows_dtype in (jnp.bfloat16, jnp.float16, E4M3)
    return narrow and T <= MAX_ROWS and F % 64 == 0 and D % group == 0 and group % 32 == 0


def quantized_linear(
    x_TD: jax.Array,
    kernel_FX: jax.Array,
    scale: jax.Array,
    *,
    zero_GF: jax.Array | None = None,
    row_scale_T: jax.Array | None = None,
    dtype: Any = None,
    config: TuningConfig | None = None,
    interpret: bool = False,
) -> jax.Array:
    """x @ ((kernel - zero) * scale).T, times the scales of the rows.

    Sums are float32 and rounded once, at the end. A row's result does not depend on other rows.

    Args:
        x_TD: rows in bfloat16 or float16, or in e4m3 for a kernel of the same type.
        kernel_FX: [F, D] in e4m3 or int8, or [F, D / 2] in uint8: two weights, each plus 8, the
            first in the low half.
        scale: float32, [F] or [G, F] for G groups of neighbouring terms.
        zero_GF: int8, subtracted from the kernel.
        row_scale_T: float32.
        dtype: of the result; None: that of the rows, or bfloat16 for e4m3.
        config: layout on the card, which must divide D and F; None: `tuning_config`.
        interpret: run on any platform, slowly.

    Returns:
        [T, F].

    Raises:
        ValueError: operands outside these bounds.
    """
    (T, D), F = x_TD.shape, kernel_FX.shape[0]
    packed = kernel_FX.dtype == jnp.uint8
    groups = scale.shape[0] if scale.ndim == 2 else 1
    group = D // groups
    if dtype is None:
        dtype = jnp.bfloat16 if x_TD.dtype == E4M3 else x_TD.dtype
    if kernel_FX.shape[1] != (D // 2 if packed else D) or scale.shape[-1] != F:
        raise ValueError(f"rows of {D} do not fit {kernel_FX.shape} with {scale.shape} scales")
    if kernel_FX.dtype not in (E4M3, jnp.int8, jnp.uint8):
        raise ValueError(f"expected a kernel in e4m3, int8 or uint8, got {kernel_FX.dtype}")
    config = config or tuning_config(T=T, D=D, F=F, group=group, rows_dtype=x_TD.dtype)
    if x_TD.dtype.name not in _CONSTANTS and not x_TD.dtype == kernel_FX.dtype == E4M3:
        raise ValueError(f"rows in {x_TD.dtype} do not go with a kernel in {kernel_FX.dtype}")
    if not config.fits(D, F, group):
        raise ValueError(f"rows of {D} to {F} outputs in groups of {group} do not fit {config}")
    R, W = config.block_rows, config.block_out
    blocks, row_blocks = F // W, -(-T // R)
    operands: dict[str, Any] = {
        # Terms that share a byte are apart: the first of each pair, then the second.
        "x": jnp.moveaxis(x_TD.reshape(T, D // 2, 2), -1, 0) if packed else x_TD,
        "kernel": kernel_FX,
        "scale": scale.reshape(groups, F),
        "row_scale": row_scale_T,
        "zero": zero_GF,
    }
    if zero_GF is not None:
        operands["sum"] = x_TD.astype(jnp.float32).reshape(T, groups, group).sum(-1).T
    outs = {"out": jax.ShapeDtypeStruct((T, F), dtype)}
    if config.splits > 1:
        # One array serves all calls of a program: each leaves it as it was.
        operands["arrived"] = jnp.zeros((row_blocks * blocks,), jnp.int32)
        part = (row_blocks * blocks, config.splits, W, R)
        outs["part"] = jax.ShapeDtypeStruct(part, jnp.float32)
    names = [name for name, operand in operands.items() if operand is not None]
    return pl.pallas_call(
        partial(_kernel, names=(*names, *outs), config=config, on_card=not interpret),
        grid=(row_blocks * blocks * config.splits,),
        out_shape=list(outs.values()),
        compiler_params=pltriton.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=interpret,
        name="quantized_linear",
    )(*(operands[name] for name in names))[0]


def _kernel(*refs: Any, names: tuple[str, ...], config: TuningConfig, on_card: bool) -> None:
    ref = dict(zip(names, refs, strict=True))
    T, groups = ref["out"].shape[0], ref["scale"].shape[0]
    packed = ref["kernel"].dtype == jnp.uint8
    D = ref["kernel"].shape[1] * (2 if packed else 1)
    W, R, C, splits = config.block_out, config.block_rows, config.block_in, config.splits
    # Blocks of rows of the same outputs run side by side: the kernel is read from memory once.
    pid, split = lax.div(pl.program_id(0), splits), lax.rem(pl.program_id(0), splits)
    row_blocks = -(-T // R)
    f_W = lax.div(pid, row_blocks) * W + jnp.arange(W)
    t_R = lax.rem(pid, row_blocks) * R + jnp.arange(R)
    at_R = jnp.minimum(t_R, T - 1)  # rows after the last are computed, but never written
    steps = D // C

    def product(i: jax.Array) -> jax.Array:
        if not packed:
            d_C = i * C + jnp.arange(C)
            kernel_WC = ref["kernel"][f_W[:, None], d_C[None, :]]
            x_RC = ref["x"][at_R[:, None], d_C[None, :]]
            return _dot(kernel_WC.astype(x_RC.dtype), x_RC)
        c_C = i * (C // 2) + jnp.arange(C // 2)
        bytes_WC = ref["kernel"][f_W[:, None], c_C[None, :]]
        first_WR, second_WR = (
            _dot(
                _unpack(bytes_WC, half, ref["x"].dtype, on_card),
                ref["x"][jnp.full((R, 1), half), at_R[:, None], c_C[None, :]],
            )
            for half in (0, 1)
        )
        return first_WR + second_WR

    def step(i: jax.Array, sum_WR: jax.Array) -> jax.Array:
        new_WR = product(i)
        if groups == 1:
            return sum_WR + new_WR
        g = lax.div(i, steps // groups)
        if "zero" in ref:
            # A step's share of a group's sum of rows is subtracted with its last step.
            last = lax.rem(i, steps // groups) == steps // groups - 1
            sums_R = ref["sum"][g, at_R]
            zero_W = ref["zero"][g, f_W].astype(jnp.float32)
            new_WR -= jnp.where(last, zero_W, 0.0)[:, None] * sums_R[None, :]
        return sum_WR + new_WR * ref["scale"][g, f_W][:, None]

    first, end = lax.div(steps * split, splits), lax.div(steps * (split + 1), splits)
    sum_WR = lax.fori_loop(first, end, step, jnp.zeros((W, R), jnp.float32))

    def finish(sum_WR: jax.Array) -> None:
        if groups == 1:
            if "zero" in ref:
                sums_R = ref["sum"][0, at_R]
                zero_W = ref["zero"][0, f_W].astype(jnp.float32)
                sum_WR -= zero_W[:, None] * sums_R[None, :]
            sum_WR *= ref["scale"][0, f_W][:, None]
        if "row_scale" in ref:
            sum_WR *= ref["row_scale"][at_R][None, :]
        live_WR = jnp.broadcast_to(t_R[None, :] < T, (W, R))
        place = ref["out"].at[t_R[None, :], f_W[:, None]]
        pltriton.store(place, sum_WR.astype(ref["out"].dtype), mask=live_WR)

    if splits == 1:
        finish(sum_WR)
        return
    ref["part"][pid, split] = sum_WR
    if on_card:
        pltriton.debug_barrier()  # all warps' parts are written before one says so
    arrived = pltriton.atomic_add(ref["arrived"], (pid,), jnp.int32(1))

    @pl.when(arrived == splits - 1)
    def _() -> None:
        def add(other: jax.Array, sum_WR: jax.Array) -> jax.Array:
            # Another program's part: past the multiprocessor's own cache.
            place = ref["part"].at[pid, other, jnp.arange(W)[:, None], jnp.arange(R)[None, :]]
            return sum_WR + pltriton.load(place, volatile=True)

        finish(lax.fori_loop(0, splits, add, jnp.zeros((W, R), jnp.float32)))
        ref["arrived"][pid] = jnp.int32(0)


def _dot(kernel_WC: jax.Array, x_RC: jax.Array) -> jax.Array:
    return lax.dot_general(
        kernel_WC, x_RC, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )


def _unpack(bytes_WC: jax.Array, half: int, dtype: Any, on_card: bool) -> jax.Array:
    """The low or the high halves, less 8."""
    if not on_card:
        return ((bytes_WC >> 4 * half & 15).astype(jnp.int32) - 8).astype(dtype)
    (wide_WC,) = pltriton.elementwise_inline_asm(
        _UNPACK.format(shift=4 * half, **_CONSTANTS[jnp.dtype(dtype).name]),
        args=[bytes_WC],
        constraints="=r,=r,r",
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(bytes_WC.shape, dtype)],
    )
    return wide_WC
