"""Integers of 4 and 8 bits as 16-bit floats, in registers: PTX for kernels of both dialects.

As the lower bits of a float integers are its subnormal numbers and the next few: so many times the
smallest. One instruction for two brings them to what they stand for, in units that
`WIDE[...].unit` tells: scales of the products make up for them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp


class Wide(NamedTuple):
    """Of a type of floats.

    Attributes:
        ptx: its name there.
        times: what makes units of the lowest bits, and of four bits above four others; twice.
        less: 8 units and 128, twice each and negative.
        unit: what becomes of 1.
    """

    ptx: str
    times: tuple[int, int]
    less: tuple[int, int]
    unit: float


WIDE = {
    "bfloat16": Wide("bf16", (0x7F007F00, 0x7D007D00), (0xBE00BE00, 0xC000C000), 2.0**-6),
    "float16": Wide("f16", (0x78007800, 0x68006800), (0xA400A400, 0xB400B400), 2.0**-9),
}


def unit(dtype: Any) -> float:
    """What becomes of 1 in this dtype."""
    return WIDE[jnp.dtype(dtype).name].unit


def unpack_4_bits(part: int, dtype: Any, less: str | None = None) -> str:
    """PTX from two elements of four weights, $1, to those at bit 4 * `part`, $0.

    Args:
        less: the operand of what is added, in units; None: -8.
    """
    to = WIDE[jnp.dtype(dtype).name]
    byte, upper = divmod(part, 2)
    return f"""{{
        .reg .b32 a, times, less;
        mov.b32 times, {to.times[upper]};
        mov.b32 less, {less or to.less[0]};
        {"shr.u32 a, $1, 8;" if byte else "mov.b32 a, $1;"}
        and.b32 a, a, {0x00F000F0 if upper else 0x000F000F};
        fma.rn.{to.ptx}x2 $0, a, times, less;
    }}"""


def widen_8_bits(dtype: Any) -> str:
    """PTX from four weights with a sign, $2, to two and two, $0 and $1."""
    to = WIDE[jnp.dtype(dtype).name]
    return f"""{{
        .reg .b32 all, a, b, times, less;
        mov.b32 times, {to.times[0]};
        mov.b32 less, {to.less[1]};
        xor.b32 all, $2, 0x80808080;
        prmt.b32 a, all, 0, 0x4140;
        prmt.b32 b, all, 0, 0x4342;
        fma.rn.{to.ptx}x2 $0, a, times, less;
        fma.rn.{to.ptx}x2 $1, b, times, less;
    }}"""
