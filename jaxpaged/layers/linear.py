"""Matrix products with a stored kernel."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jaxpaged.parallel.sharding import num_parts, split_product
from jaxpaged.quantization import Around, ArraySpec, Scheme, divides, finished
from pallas_kernels.peer_sum import Peers, is_supported, peer_sum
from pallas_kernels.rms_norm import Norm, Rows, half_norm, rms_norm, row_root
from pallas_kernels.small_batch_linear import is_faster, small_batch_linear

Leaf = tuple[tuple[int, ...], tuple[str | None, ...], Any, Any]  # shape, axes, initializer, dtype


def matmul_precision(dtype: Any) -> jax.lax.Precision | None:
    """float32 means float32: no TF32, no bfloat16 passes. Smaller types keep the default."""
    return jax.lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else None


class Linear(nn.Module):
    """[T, *inputs] to [T, *outputs] by a kernel of shape [*inputs, *outputs], plus a bias.

    Attributes:
        inputs: sizes of the axes that are summed over.
        outputs: sizes of the axes that come out.
        input_axes, output_axes: their logical names (None: never split), for parallel/sharding.py.
        use_bias: add a vector of shape [*outputs].
        dtype: of the weights and of the result.
        fuse: few rows may take a kernel that does all of this at once, where that is faster.
        scheme: how the kernel is stored instead, in arrays [*outputs, inputs merged].
        mesh: the devices that share the kernel; None: one has all of it.
        result_dtype: of the result of a stored scheme; None: `dtype`.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    input_axes: tuple[str | None, ...]
    output_axes: tuple[str | None, ...]
    use_bias: bool = False
    dtype: Any = jnp.float32
    fuse: bool = False
    scheme: Scheme | None = None
    mesh: Mesh | None = None
    result_dtype: Any = None

    @nn.compact
    def __call__(
        self,
        rows: Rows,
        *,
        norm: Norm | None = None,
        activation: str | None = None,
        residual: jax.Array | None = None,
        next_norm: Norm | None = None,
        peers: Peers | None = None,
    ) -> Rows:
        """The product of normalised rows, made activation(gate) * up, added to a residual.

        Args:
            rows: [T, *inputs], or their merger; plain, half normed by `norm` or
                rounded after it.
            norm: of the rows, over all of the inputs, none of which is split.
            activation: a name from `ACTIVATIONS`; the outputs are then (2, F), gates first, and
                [T, F] comes out.
            residual: [T, *outputs].
            next_norm: of the result, which may begin here.
            peers: where a sum over devices may be made by their own stores; None: by XLA.
        """
        arrays = None if self.scheme is None else self.scheme.arrays(math.prod(self.inputs))
        # Of what cannot be dealt out to the devices, XLA makes what it can.
        dealt = arrays is None or divides(arrays, num_parts(self.input_axes, self.mesh))
        leaves = self._leaves(arrays, dealt)
        product: Callable[..., Rows] = partial(
            _product,
            num_inputs=len(self.inputs),
            scheme=self.scheme,
            dtype=self.dtype,
            result_dtype=self.result_dtype or self.dtype,
            fuse=self.fuse and dealt,
            norm=norm,
            activation=activation,
            residual=residual,
            next_norm=next_norm,
            peers=peers,
        )
        if self.mesh is not None and dealt:
            axes = {name: leaf[1] for name, leaf in leaves.items()}
            outputs = self.output_axes if activation is None else self.output_axes[1:]
            product = split_product(product, self.mesh, axes, self.input_axes, outputs)
        return product(rows, {name: self._param(name, *leaf) for name, leaf in leaves.items()})

    def _leaves(self, arrays: Mapping[str, ArraySpec] | None, dealt: bool) -> dict[str, Leaf]:
        """The kernel, or the arrays in its place, and the bias."""
        leaves: dict[str, Leaf] = {}
        if arrays is None:
            shape, axes = (*self.inputs, *self.outputs), (*self.input_axes, *self.output_axes)
            leaves["kernel"] = shape, axes, nn.initializers.normal(0.02), self.dtype
        else:
            (terms,) = {axis for axis in self.input_axes if axis is not None} or (None,)
            for name, array in arrays.items():
                axes = array.axes(name, self.output_axes, terms, dealt)
                shape = array.shape(name, self.outputs)
                leaves[name] = shape, axes, nn.initializers.zeros, array.dtype
        if self.use_bias:
            leaves["bias"] = self.outputs, self.output_axes, nn.initializers.zeros, self.dtype
        return leaves

    def _param(
        self, name: str, shape: tuple[int, ...], axes: tuple[str | None, ...], init: Any, dtype: Any
    ) -> jax.Array:
        return self.param(name, nn.with_logical_partitioning(init, axes), shape, dtype)


def _product(
    rows: Rows,
    weights: Mapping[str, jax.Array],
    *,
    num_inputs: int,
    scheme: Scheme | None,
    dtype: Any,
    result_dtype: Any,
    fuse: bool,
    norm: Norm | None,
    activation: str | None,
    residual: jax.Array | None,
    next_norm: Norm | None,
    peers: Peers | None,
    axis: str | None = None,
) -> Rows:
    """What `Linear` says, of the rows and weights that this device has.

    Args:
        weights: the kernel, or the arrays in its place, and the bias.
        num_inputs: axes of the kernel that are summed over.
        axis: of the mesh, whose devices have some of the terms each; None: all of them are here.
    """
    x_TI, bias = rows.x.reshape(rows.x.shape[0], -1), weights.get("bias")
    # What follows a sum over devices waits until it is complete.
    around = Around(norm, bias, activation, residual, next_norm) if axis is None else Around(norm)
    if scheme is None:
        # One axis to sum over: given several, XLA may transpose the whole kernel at every step.
        kernel = weights["kernel"]
        kernel = kernel.reshape(x_TI.shape[1], *kernel.shape[num_inputs:])
    found = None
    if fuse:
        here = rows._replace(x=x_TI)
        found = (
            _fused(here, kernel, around)
            if scheme is None
            else scheme.fused(here, weights, around, result_dtype)
        )
    if found is not None and axis is None:
        return found
    if found is not None:
        y = found.x
    elif scheme is not None:
        y = scheme.product(_normed(x_TI, norm, dtype), weights, result_dtype)
    else:
        # What a norm has begun is divided by its roots as the product comes out.
        half = None if norm is None else rows.half_normed
        y = lax.dot_general(
            _normed(x_TI, norm, dtype) if half is None else half.scaled_TD,
            kernel,
            (((1,), (0,)), ((), ())),
            precision=matmul_precision(dtype),
        )
        if half is not None and norm is not None:
            root_T = row_root(half.square_XT, x_TI.shape[1], norm.eps)
            y = y.astype(jnp.float32) * root_T.reshape(-1, *(1,) * (y.ndim - 1))
    if axis is not None:
        if peers is not None and is_supported(y, peers.addresses_N2.shape[0]):
            scale_D = next_norm.scale_D if next_norm and not next_norm.plus_one else None
            return peer_sum(
                y,
                peers,
                lax.axis_index(axis),
                bias_D=bias,
                residual_TD=residual,
                next_scale_D=scale_D,
            )
        y = lax.psum(y, axis)
    return Rows(finished(y, result_dtype, bias, activation, residual))


def _normed(x_TI: jax.Array, norm: Norm | None, dtype: Any) -> jax.Array:
    return x_TI if norm is None else rms_norm(x_TI, norm).astype(dtype)


def _fused(rows: Rows, kernel: jax.Array, around: Around) -> Rows | None:
    """A product of few rows with all around it by one kernel; None: the plain way is the faster.

    Args:
        kernel: [I, *outputs].
    """
    norm, bias, activation, residual, next_norm = around
    gated = activation is not None
    merged = kernel if gated else kernel.reshape(kernel.shape[0], -1)
    if _plus_one(norm, next_norm) or not is_faster(rows.x, merged, activation):
        return None
    half = norm and (rows.half_normed or half_norm(rows.x, norm.scale_D))
    made = small_batch_linear(
        half or rows.x,
        merged,
        eps=norm.eps if norm else 0.0,
        bias=bias,
        activation=activation,
        residual_TF=residual,
        next_scale_F=next_norm.scale_D if next_norm else None,
    )
    return made if gated else made._replace(x=made.x.reshape(-1, *kernel.shape[1:]))


def _plus_one(*norms: Norm | None) -> bool:
    """Whether one has factors that kernels do not know."""
    return any(norm is not None and norm.plus_one for norm in norms)
