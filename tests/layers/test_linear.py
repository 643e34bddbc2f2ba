from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.layers.linear import Linear

SPLIT = ("kv_heads", None, None)
RNG = np.random.default_rng(0)


def test_product_and_bias_with_several_axes_out() -> None:
    x, kernel, bias = RNG.normal(size=(5, 4)), RNG.normal(size=(4, 2, 3, 6)), RNG.normal(size=36)
    bias = bias.reshape(2, 3, 6)
    layer = Linear((4,), (2, 3, 6), (None,), SPLIT, use_bias=True)
    y = layer.apply({"params": {"kernel": kernel, "bias": bias}}, x)
    np.testing.assert_allclose(y, np.einsum("td,dkxh->tkxh", x, kernel) + bias, rtol=1e-4)


def test_product_over_several_axes_or_their_merger() -> None:
    x, kernel = RNG.normal(size=(5, 2, 3, 6)), RNG.normal(size=(2, 3, 6, 4))
    layer = Linear((2, 3, 6), (4,), SPLIT, (None,))
    expected = np.einsum("tkgh,kghd->td", x, kernel)
    for shape in ((5, 2, 3, 6), (5, 6, 6)):
        y = layer.apply({"params": {"kernel": kernel}}, x.reshape(shape))
        np.testing.assert_allclose(y, expected, rtol=1e-4)


def test_leaves_carry_logical_axes() -> None:
    layer = Linear((4,), (2, 3, 6), (None,), SPLIT, use_bias=True)
    boxed = jax.eval_shape(layer.init, jax.random.key(0), jnp.zeros((5, 4)))["params"]
    assert boxed["kernel"].names == (None, *SPLIT)
    assert boxed["bias"].names == SPLIT
    assert boxed["bias"].value.shape == (2, 3, 6)


def test_float32_multiplies_in_float32_and_smaller_types_by_default() -> None:
    for dtype, expected in ((jnp.float32, "HIGHEST"), (jnp.bfloat16, "None")):
        layer = Linear((4,), (3,), ("ffn",), (None,), dtype=dtype)
        params = {"params": {"kernel": jnp.ones((4, 3), dtype)}}
        jaxpr = jax.make_jaxpr(layer.apply)(params, jnp.ones((2, 4), dtype))
        (dot,) = [e for e in jaxpr.jaxpr.eqns if e.primitive.name == "dot_general"]
        assert expected in str(dot.params["precision"])
