"""Kernels that let the next one start while they run.

On Hopper and later XLA launches Triton kernels, and those that it makes itself, before the one that
they depend on has ended, and has them wait at their first instruction for all that it writes. How
early is for that one to say: programs of the next then take the places that it has left, and the
launch costs nothing. Kernels in Mosaic and of libraries begin when the one before has ended,
whatever it says.
"""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp

from pallas_kernels.elementwise import elementwise

LANES = 32  # of a warp
LET_NEXT_START = "griddepcontrol.launch_dependents; mov.b32 $0, $1;"


@cache
def is_supported() -> bool:
    """Whether kernels run on a GPU from compute capability 9.0 on."""
    device = jax.devices()[0]
    return device.platform == "gpu" and float(device.compute_capability) >= 9


def let_next_start(program: jax.Array, on_card: bool) -> jax.Array:
    """A program's number, int32, as it was: the instruction is not left out if all hangs on it.

    The dialect's assembly takes arrays alone, so a warp's lanes have the number each.

    Args:
        on_card: not in interpret mode.
    """
    if not on_card or not is_supported():
        return program
    program_L = jnp.full((LANES,), program)
    return elementwise(LET_NEXT_START, "=r,r", program_L, dtype=jnp.int32).max()
