from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.layers.linear import Einsum

AXES = (None, "kv_heads", None, None)


def test_product_and_bias_over_the_kernels_output_axes() -> None:
    rng = np.random.default_rng(0)
    x, kernel = rng.normal(size=(5, 4)), rng.normal(size=(4, 2, 3, 6))
    bias = rng.normal(size=(2, 3, 6))
    layer = Einsum("TD,DKXH->TKXH", kernel.shape, AXES, use_bias=True)
    y = layer.apply({"params": {"kernel": kernel, "bias": bias}}, x)
    np.testing.assert_allclose(y, np.einsum("td,dkxh->tkxh", x, kernel) + bias, rtol=1e-4)


def test_leaves_carry_logical_axes() -> None:
    layer = Einsum("TD,DKXH->TKXH", (4, 2, 3, 6), AXES, use_bias=True)
    boxed = jax.eval_shape(layer.init, jax.random.key(0), jnp.zeros((5, 4)))["params"]
    assert boxed["kernel"].names == AXES
    assert boxed["bias"].names == ("kv_heads", None, None)
    assert boxed["bias"].value.shape == (2, 3, 6)


def test_float32_multiplies_in_float32_and_smaller_types_by_default() -> None:
    for dtype, expected in ((jnp.float32, "HIGHEST"), (jnp.bfloat16, "None")):
        layer = Einsum("TF,FD->TD", (4, 3), ("ffn", None), dtype=dtype)
        params = {"params": {"kernel": jnp.ones((4, 3), dtype)}}
        jaxpr = jax.make_jaxpr(layer.apply)(params, jnp.ones((2, 4), dtype))
        (dot,) = [e for e in jaxpr.jaxpr.eqns if e.primitive.name == "dot_general"]
        assert expected in str(dot.params["precision"])
