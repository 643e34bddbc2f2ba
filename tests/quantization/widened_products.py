"""Scratch memory of a chain of products whose weights are widened; run by test_scratch.py.

As a program it compiles for an H200 on a machine that has none, and prints a line a scheme.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxpaged.quantization.scheme import arrange
from jaxpaged.quantization.weight_only import WeightOnly

ROWS, WIDTH = 256, 1024
WIDENED = 2 * WIDTH * WIDTH  # bytes of a product's weights in half precision
SCHEMES = (
    WeightOnly("int4", group=128),
    WeightOnly("int4", group=128, has_zero=True),
    WeightOnly("int8", group=128),
    WeightOnly("float8_e4m3fn", group=128),
    WeightOnly("int8"),
)


def scratch_bytes(scheme: WeightOnly, products: int, sharding: Any, options: Any) -> int:
    """What so many products, one after the other, take beside arguments and results."""

    def abstract(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    made = jax.eval_shape(lambda: scheme.quantize(jnp.zeros((WIDTH, WIDTH))))
    made = {
        name: jax.eval_shape(lambda x, name=name: arrange(name, x, x.ndim == 2), x)
        for name, x in made.items()
    }
    weights = [jax.tree.map(abstract, made) for _ in range(products)]

    def chain(x_TI: jax.Array, weights: Any) -> jax.Array:
        for arrays in weights:
            x_TI += scheme.product(x_TI, arrays, x_TI.dtype)
        return x_TI

    rows = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16, sharding=sharding)
    compiled = jax.jit(chain).lower(rows, weights).compile(compiler_options=options)
    return compiled.memory_analysis().temp_size_in_bytes


if __name__ == "__main__":
    from jax.sharding import NamedSharding, PartitionSpec

    from jaxpaged.runtime.compilation import compile_options
    from tests.pallas_kernels.compile_for_h200 import h200_mesh

    options = compile_options("gpu", ROWS, WIDTH, {False})
    with jax.sharding.use_abstract_mesh(h200_mesh().abstract_mesh):
        sharding = NamedSharding(h200_mesh(), PartitionSpec())
        for scheme in SCHEMES:
            print(*(scratch_bytes(scheme, count, sharding, options) for count in (2, 6)))
