"""Integers of 4 and 8 bits as 16-bit floats, in registers: PTX for kernels of both dialects.

An integer in the low bits of a float is that many times the smallest subnormal number. One
multiply-add for two of them scales that, and subtracts what had made them positive, in units that
`WIDE[...].unit` tells: scales of the products make up for them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

ELEMENT = 16  # bits, of several weights
PACKED = {"uint16": 4, "int16": 2}  # how many, which the dtype tells; the first in the lowest bits
RUN = 64  # neighbouring terms: the first part of them is first in its elements, and so on


class Wide(NamedTuple):
    """Of a type of floats.

    Attributes:
        ptx: its name there.
        scale: the power of two that makes units of the lowest bits, and of the four above them;
            each twice, since an instruction takes two numbers.
        offset: 8 units and 128, negative, each twice.
        unit: what becomes of 1.
    """

    ptx: str
    scale: tuple[int, int]
    offset: tuple[int, int]
    unit: float


WIDE = {
    "bfloat16": Wide("bf16", (0x7F007F00, 0x7D007D00), (0xBE00BE00, 0xC000C000), 2.0**-6),
    "float16": Wide("f16", (0x78007800, 0x68006800), (0xA400A400, 0xB400B400), 2.0**-9),
}


def packed(kernel_dtype: Any) -> int:
    """Weights in an element of a kernel."""
    return PACKED.get(jnp.dtype(kernel_dtype).name, 1)


def unit(dtype: Any) -> float:
    """What becomes of 1 in this dtype."""
    return WIDE[jnp.dtype(dtype).name].unit


def unpack(bits: int, part: int, dtype: Any, offset: str | None = None) -> str:
    """PTX from two elements of packed weights, $1, to those at bit `bits` * `part`, $0.

    Args:
        bits: of a weight, 4 or 8; each is greater by half its range.
        offset: the operand of what is added, in units; None: minus half the range.
    """
    to = WIDE[jnp.dtype(dtype).name]
    byte, upper = divmod(bits * part, 8)
    if bits == 8:
        pick = f"prmt.b32 a, $1, 0, {0x4341 if byte else 0x4240};"
    else:
        pick = f"""{"shr.u32 a, $1, 8;" if byte else "mov.b32 a, $1;"}
        and.b32 a, a, {0x00F000F0 if upper else 0x000F000F};"""
    return f"""{{
        .reg .b32 a, scale, offset;
        mov.b32 scale, {to.scale[bool(upper)]};
        mov.b32 offset, {offset or to.offset[bits == 8]};
        {pick}
        fma.rn.{to.ptx}x2 $0, a, scale, offset;
    }}"""
