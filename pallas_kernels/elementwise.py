"""The card's own instructions, on every value of an array, in Pallas' Triton dialect."""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental.pallas import triton as pltriton


def elementwise(
    code: str, constraints: str, *args: jax.Array, dtype: Any, pack: int = 1
) -> jax.Array:
    """What PTX makes of arrays of one shape.

    Args:
        code, constraints: as in inline assembly, the result's operand first.
        dtype: of the result.
        pack: values that an execution of the code takes of each array, in as many registers as they
            fill.
    """
    (result,) = pltriton.elementwise_inline_asm(
        code,
        args=args,
        constraints=constraints,
        pack=pack,
        result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, dtype)],
    )
    return result
