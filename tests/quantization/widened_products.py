"""Scratch memory of a chain of products whose weights are widened; run by test_scratch.py.

As a program it compiles for an H200 on a machine that has none, and prints a line a scheme.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxpaged.quantization.weight_only import WeightOnly

ROWS, WIDTH, INNER = 1024, 2048, 8192
WIDENED = 2 * 2 * INNER * WIDTH  # bytes of a layer's larger product in half precision
SCHEMES = (
    WeightOnly("int4", group=128),
    WeightOnly("int4", group=128, has_zero=True),
    WeightOnly("int8", group=128),
    WeightOnly("float8_e4m3fn", group=128),
    WeightOnly("int8"),
)


def lowered(scheme: WeightOnly, layers: int, sharding: Any) -> jax.stages.Lowered:
    """So many gated products and those back."""

    def weights(outputs: tuple[int, ...], size: int) -> dict[str, jax.ShapeDtypeStruct]:
        return {
            name: jax.ShapeDtypeStruct(x.shape(name, outputs), x.dtype, sharding=sharding)
            for name, x in scheme.arrays(size).items()
        }

    def chain(x_TI: jax.Array, layers: Any) -> jax.Array:
        for wide, back in layers:
            y_T2F = scheme.product(x_TI, wide, x_TI.dtype)
            gated_TF = jax.nn.silu(y_T2F[:, 0]) * y_T2F[:, 1]
            x_TI += scheme.product(gated_TF, back, x_TI.dtype)
        return x_TI

    rows = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16, sharding=sharding)
    all_layers = [(weights((2, INNER), WIDTH), weights((WIDTH,), INNER))] * layers
    return jax.jit(chain).lower(rows, all_layers)


def scratch_bytes(program: jax.stages.Lowered, options: Any) -> int:
    """What it takes beside arguments and results."""
    compiled = program.compile(compiler_options=options)
    return compiled.memory_analysis().temp_size_in_bytes


if __name__ == "__main__":
    from jax.sharding import NamedSharding, PartitionSpec

    from jaxpaged.runtime.compilation import compile_options
    from tests.pallas_kernels.compile_for_h200 import h200_mesh

    options = compile_options("gpu", ROWS, WIDTH, {False})
    with jax.sharding.use_abstract_mesh(h200_mesh().abstract_mesh):
        sharding = NamedSharding(h200_mesh(), PartitionSpec())
        for scheme in SCHEMES:
            programs = [lowered(scheme, count, sharding) for count in (2, 6)]
            print(*(scratch_bytes(program, options) for program in programs))
