from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.layers import linear
from jaxpaged.layers.linear import Linear
from pallas_kernels.rms_norm import Norm, Rows, half_norm
from pallas_kernels.small_batch_linear import small_batch_linear

SPLIT = ("kv_heads", None, None)
RNG = np.random.default_rng(0)


def test_product_and_bias_with_several_axes_out() -> None:
    x, kernel, bias = RNG.normal(size=(5, 4)), RNG.normal(size=(4, 2, 3, 6)), RNG.normal(size=36)
    bias = bias.reshape(2, 3, 6)
    layer = Linear((4,), (2, 3, 6), (None,), SPLIT, use_bias=True)
    y = layer.apply({"params": {"kernel": kernel, "bias": bias}}, Rows(x)).x
    np.testing.assert_allclose(y, np.einsum("td,dkxh->tkxh", x, kernel) + bias, rtol=1e-4)


def test_product_over_several_axes_or_their_merger() -> None:
    x, kernel = RNG.normal(size=(5, 2, 3, 6)), RNG.normal(size=(2, 3, 6, 4))
    layer = Linear((2, 3, 6), (4,), SPLIT, (None,))
    expected = np.einsum("tkgh,kghd->td", x, kernel)
    for shape in ((5, 2, 3, 6), (5, 6, 6)):
        y = layer.apply({"params": {"kernel": kernel}}, Rows(x.reshape(shape))).x
        np.testing.assert_allclose(y, expected, rtol=1e-4)


def test_leaves_carry_logical_axes() -> None:
    layer = Linear((4,), (2, 3, 6), (None,), SPLIT, use_bias=True)
    boxed = jax.eval_shape(layer.init, jax.random.key(0), Rows(jnp.zeros((5, 4))))["params"]
    assert boxed["kernel"].names == (None, *SPLIT)
    assert boxed["bias"].names == SPLIT
    assert boxed["bias"].value.shape == (2, 3, 6)


def test_float32_multiplies_in_float32_and_smaller_types_by_default() -> None:
    for dtype, expected in ((jnp.float32, "HIGHEST"), (jnp.bfloat16, "None")):
        layer = Linear((4,), (3,), ("ffn",), (None,), dtype=dtype)
        params = {"params": {"kernel": jnp.ones((4, 3), dtype)}}
        jaxpr = jax.make_jaxpr(layer.apply)(params, Rows(jnp.ones((2, 4), dtype)))
        (dot,) = [e for e in jaxpr.jaxpr.eqns if e.primitive.name == "dot_general"]
        assert expected in str(dot.params["precision"])


def test_norm_before_and_activation_and_residual_after() -> None:
    x, kernel, residual = (
        RNG.normal(size=(5, 4)),
        RNG.normal(size=(4, 2, 6)),
        RNG.normal(size=(5, 6)),
    )
    norm = Norm(RNG.normal(size=4), 1e-3, True)
    layer = Linear((4,), (2, 6), (None,), (None, "ffn"))
    y = layer.apply(
        {"params": {"kernel": kernel}}, Rows(x), norm=norm, activation="silu", residual=residual
    ).x
    rows = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-3) * (norm.scale_D + 1)
    gate, up = rows @ kernel[:, 0], rows @ kernel[:, 1]
    np.testing.assert_allclose(y, residual + gate / (1 + np.exp(-gate)) * up, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("outputs", "activation"), [((2, 4, 16), None), ((2, 128), "silu"), ((128,), None)]
)
def test_few_rows_in_one_kernel(
    monkeypatch: pytest.MonkeyPatch, outputs: tuple[int, ...], activation: str | None
) -> None:
    """The same numbers, within bfloat16's rounding, from one kernel and nothing else."""
    monkeypatch.setattr(linear, "small_batch_linear", partial(small_batch_linear, interpret=True))
    x, kernel = (jnp.asarray(RNG.normal(size=s), jnp.bfloat16) for s in ((8, 512), (512, *outputs)))
    params = {"params": {"kernel": kernel * 0.05, "bias": jnp.ones(outputs, jnp.bfloat16)}}
    axes = (None,) * len(outputs)
    options = {
        "norm": Norm(jnp.full(512, 1.5, jnp.bfloat16), 1e-6, False),
        "activation": activation,
    }
    if len(outputs) == 1:
        next_norm = Norm(jnp.arange(128, dtype=jnp.bfloat16), 1e-6, False)
        options = {"residual": jnp.ones((8, 128), jnp.bfloat16), "next_norm": next_norm}
    plain, fused = (
        Linear((512,), outputs, (None,), axes, use_bias=True, dtype=jnp.bfloat16, fuse=fuse)
        for fuse in (False, True)
    )
    jaxpr = jax.make_jaxpr(partial(fused.apply, **options))(params, Rows(x)).jaxpr
    names = [equation.primitive.name for equation in jaxpr.eqns]
    assert "pallas_call" in names
    assert "dot_general" not in names
    expected = np.asarray(plain.apply(params, Rows(x), **options).x, np.float32)
    rows = fused.apply(params, Rows(x), **options)
    got = np.asarray(rows.x, np.float32)
    assert got.shape == expected.shape
    np.testing.assert_allclose(got, expected, rtol=3e-2, atol=6e-2)
    if len(outputs) == 1:
        begun = half_norm(rows.x, next_norm.scale_D)
        np.testing.assert_array_equal(rows.half_normed.scaled_TD, begun.scaled_TD)
        squares = (half.square_XT.sum(axis=0) for half in (rows.half_normed, begun))
        np.testing.assert_allclose(*squares, rtol=1e-5)


@pytest.mark.parametrize("fuse", [True, False])
def test_a_norm_that_was_begun_is_completed(monkeypatch: pytest.MonkeyPatch, fuse: bool) -> None:
    monkeypatch.setattr(linear, "small_batch_linear", partial(small_batch_linear, interpret=True))
    x, kernel = (jnp.asarray(RNG.normal(size=s), jnp.bfloat16) for s in ((8, 512), (512, 128)))
    params, norm = (
        {"params": {"kernel": kernel}},
        Norm(jnp.full(512, 1.5, jnp.bfloat16), 0.0, False),
    )
    layer = Linear((512,), (128,), (None,), (None,), dtype=jnp.bfloat16, fuse=fuse)
    x *= 3  # not divided by their roots, rows would be three times as large
    begun = half_norm(x, norm.scale_D)
    thirds = begun._replace(square_XT=jnp.repeat(begun.square_XT, 3, axis=0) / 3)
    expected = layer.apply(params, Rows(x), norm=norm).x
    got = layer.apply(params, Rows(jnp.zeros_like(x), thirds), norm=norm).x
    off = jnp.abs(got.astype(jnp.float32) - expected.astype(jnp.float32)).max()
    assert off < 0.02 * jnp.abs(expected).max()


def test_float32_takes_no_kernel() -> None:
    layer = Linear((512,), (128,), (None,), (None,), fuse=True)
    y = layer.apply({"params": {"kernel": jnp.ones((512, 128))}}, Rows(jnp.ones((8, 512)))).x
    np.testing.assert_array_equal(y, 512)
