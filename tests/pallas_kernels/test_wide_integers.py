"""Integers as 16-bit floats: the instructions themselves, carried out here."""

from __future__ import annotations

import re

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.wide_integers import ELEMENT, unit, unpack

DTYPES = ("bfloat16", "float16")
Registers = dict[str, np.ndarray]  # uint32


def run(ptx: str, registers: Registers) -> Registers:
    """What a few of PTX's instructions leave in registers, of as many threads as those are long."""

    def value(name: str) -> np.ndarray:
        if name in registers:
            return registers[name]
        return np.full(len(registers["$1"]), int(name, 0), np.uint32)

    def floats(name: str, dtype: str) -> np.ndarray:
        return value(name).view(np.uint16).view(jnp.dtype(dtype)).astype(np.float64)

    for instruction, operands in re.findall(r"^\s*([a-z][\w.]*) ([^;]*);", ptx, re.MULTILINE):
        to, *given = [name.strip() for name in operands.split(",")]
        match instruction.split("."):
            case "mov", _:
                registers[to] = value(given[0])
            case "shr", _:
                registers[to] = value(given[0]) >> value(given[1])
            case "and", _:
                registers[to] = value(given[0]) & value(given[1])
            case "prmt", _:
                pool = np.stack(
                    [value(name).view(np.uint8).reshape(-1, 4) for name in given[:2]], 1
                )
                picked = [int(given[2], 0) >> 4 * i & 15 for i in range(4)]
                registers[to] = np.ascontiguousarray(pool.reshape(-1, 8)[:, picked]).view(
                    np.uint32
                )[:, 0]
            case "fma", "rn", kind:
                dtype = {"bf16x2": "bfloat16", "f16x2": "float16"}[kind]
                a, b, c = (floats(name, dtype) for name in given)
                registers[to] = (a * b + c).astype(jnp.dtype(dtype)).view(np.uint32)
    return registers


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("bits", "part"), [(bits, part) for bits in (4, 8) for part in range(ELEMENT // bits)]
)
@pytest.mark.parametrize("which", [None, 0, -1])
def test_every_element(dtype: str, bits: int, part: int, which: int | None) -> None:
    half = 2 ** (bits - 1)
    zero = None if which is None else range(-half, half)[which]
    words = np.arange(1 << 16, dtype=np.uint16)
    registers: Registers = {"$1": words.view(np.uint32)}
    less = half + (zero or 0)
    if zero is not None:
        registers["$2"] = np.full(words.size, -less * unit(dtype)).astype(dtype).view(np.uint32)
    ptx = unpack(bits, part, dtype, None if zero is None else "$2")
    got = run(ptx, registers)["$0"].view(np.uint16).view(jnp.dtype(dtype)).astype(np.float64)
    weights = (words >> bits * part).astype(int) % 2**bits - less
    np.testing.assert_array_equal(got, weights * unit(dtype))
