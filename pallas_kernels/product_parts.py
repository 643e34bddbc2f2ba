"""What kernels for products of few rows have in common: the ends of a sum, and sharing one out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.rms_norm import HalfNormed, Rows

ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
}
NOT_IN_KERNELS = "gelu"  # the dialect has no erf
PROGRAMS = 132  # multiprocessors of an H100 or H200
EARLY_ROWS = 16  # of a program, for which what stands around a sum is loaded before it


def result_shapes(
    shape: tuple[int, int], dtype: Any, *, blocks: int, begins_norm: bool
) -> dict[str, jax.ShapeDtypeStruct]:
    """Of the rows that a kernel makes, and of the first half of their norm if it begins it.

    Args:
        blocks: parts of a row, each of which has its own sum of squares.
    """
    outs = {"out": jax.ShapeDtypeStruct(shape, dtype)}
    if begins_norm:
        outs["next"] = outs["out"]
        outs["next_square"] = jax.ShapeDtypeStruct((blocks, shape[0]), jnp.float32)
    return outs


def call_by_name(
    kernel: Callable[..., None],
    operands: Mapping[str, jax.Array | None],
    outs: Mapping[str, jax.ShapeDtypeStruct],
    *,
    name: str,
    programs: int,
    num_warps: int,
    num_stages: int,
    interpret: bool,
) -> Rows:
    """Run a kernel that knows its operands and results by name, but for those that are None.

    Args:
        kernel: (*refs, names).
        outs: as `result_shapes` has them, and what the kernel needs beside.
    """
    given = {key: operand for key, operand in operands.items() if operand is not None}
    results = pl.pallas_call(
        partial(kernel, names=(*given, *outs)),
        grid=(programs,),
        out_shape=list(outs.values()),
        compiler_params=pltriton.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
        name=name,
    )(*given.values())
    found = dict(zip(outs, results, strict=True))
    half = HalfNormed(found["next"], found["next_square"]) if "next" in found else None
    return Rows(found["out"], half)


def gated(sums: jax.Array, axis: int, activation: str) -> jax.Array:
    """activation(gate) * up of sums that are gates, then ups, along an axis."""
    shape = sums.shape
    pairs = sums.reshape(*shape[:axis], 2, shape[axis] // 2, *shape[axis + 1 :])
    is_up = lax.broadcasted_iota(jnp.int32, pairs.shape, axis) == 1
    gate = jnp.where(is_up, 0.0, pairs).sum(axis=axis)
    up = jnp.where(is_up, pairs, 0.0).sum(axis=axis)
    return ACTIVATIONS[activation](gate) * up


def load_around(
    ref: Mapping[str, Any],
    t_R: jax.Array,
    f_W: jax.Array,
    at: tuple[jax.Array, jax.Array],
    live: jax.Array,
) -> dict[str, jax.Array]:
    """What stands around a sum, of what is there.

    Args:
        t_R, f_W: rows, and outputs before an activation.
        at, live: indices of the result, rows first, and which of them are there.
    """
    found = {}
    if "square" in ref:  # added up where they are needed: until then nobody waits for them
        X, T = ref["square"].shape
        x_X1, t_1R = jnp.arange(pl.next_power_of_2(X))[:, None], t_R[None, :]
        live_XR = (x_X1 < X) & (t_1R < T)
        found["square"] = pltriton.load(ref["square"].at[x_X1, t_1R], mask=live_XR, other=0)
    if "bias" in ref:
        found["bias"] = ref["bias"][f_W].astype(jnp.float32)
    if "residual" in ref:
        found["residual"] = pltriton.load(ref["residual"].at[at], mask=live, other=0)
    if "next_scale" in ref:
        found["next_scale"] = ref["next_scale"][at[1]]
    return found


def share_sum(
    own: jax.Array,
    ref: Mapping[str, Any],
    block: jax.Array,
    split: jax.Array,
    splits: int,
    finish: Callable[[jax.Array], None],
    on_card: bool,
) -> None:
    """Leave a program's part of a sum; the last to come adds all up, always in the same order.

    Args:
        own: [A, B], float32.
        ref: "part" [blocks, splits, A, B] and "arrived", i32[blocks], zeros before and after.
        block, split: which sum, and which part of it.
        finish: called with the whole sum, by one program.
        on_card: not in interpret mode.
    """
    ref["part"][block, split] = own
    if on_card:
        pltriton.debug_barrier()  # all warps' parts are written before one says so
    arrived = pltriton.atomic_add(ref["arrived"], (block,), jnp.int32(1))

    @pl.when(arrived == splits - 1)
    def _() -> None:
        a_A1, b_1B = jnp.arange(own.shape[0])[:, None], jnp.arange(own.shape[1])[None, :]
        total = jnp.zeros(own.shape, jnp.float32)
        for other in range(splits):
            # Another program's part: past the multiprocessor's own cache.
            total += pltriton.load(ref["part"].at[block, other, a_A1, b_1B], volatile=True)
        finish(total)
        ref["arrived"][block] = jnp.int32(0)
