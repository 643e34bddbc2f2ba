"""Matrix products with a stored kernel."""

from __future__ import annotations

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxpaged.quantization import Around, Scheme
from pallas_kernels.product_parts import ACTIVATIONS
from pallas_kernels.rms_norm import Norm, Rows, half_norm, rms_norm
from pallas_kernels.small_batch_linear import is_faster, small_batch_linear


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
    ) -> Rows:
        """The product of normalised rows, made activation(gate) * up, added to a residual.

        Args:
            rows: [T, *inputs], or their merger; half normed by `norm` or not at all.
            norm: of the rows, over all of the inputs.
            activation: a name from `ACTIVATIONS`; the outputs are then (2, F), gates first, and
                [T, F] comes out.
            residual: [T, *outputs].
            next_norm: of the result, which may begin here.
        """
        size = math.prod(self.inputs)
        x_TI = rows.x.reshape(-1, size)
        bias = None
        if self.use_bias:
            bias = self._param("bias", self.outputs, self.output_axes, nn.initializers.zeros)
        if self.scheme is not None:
            arrays = self._quantized(self.scheme, size)
            dtype = self.result_dtype or self.dtype
            if self.fuse:
                around = Around(norm, bias, activation, residual, next_norm)
                found = self.scheme.fused(Rows(x_TI, rows.half_normed), arrays, around, dtype)
                if found is not None:
                    return found
            if norm is not None:
                x_TI = rms_norm(x_TI, norm).astype(self.dtype)
            y = self.scheme.product(x_TI, arrays, dtype)
            return self._finish(y, bias, activation, residual)
        shape, axes = (*self.inputs, *self.outputs), (*self.input_axes, *self.output_axes)
        kernel = self._param("kernel", shape, axes, nn.initializers.normal(0.02))
        # One axis to sum over: given several, XLA may transpose the whole kernel at every step.
        # The axes that come out stay apart, since merging could split one that a mesh shards.
        kernel = kernel.reshape(size, *self.outputs)
        if self.fuse and not (norm and norm.plus_one) and not (next_norm and next_norm.plus_one):
            gated = activation is not None
            merged = kernel if gated else kernel.reshape(size, -1)
            if is_faster(x_TI, merged, activation):
                half = norm and (rows.half_normed or half_norm(x_TI, norm.scale_D))
                y, half_normed = small_batch_linear(
                    half or x_TI,
                    merged,
                    eps=norm.eps if norm else 0.0,
                    bias=bias,
                    activation=activation,
                    residual_TF=residual,
                    next_scale_F=next_norm.scale_D if next_norm else None,
                )
                return Rows(y if gated else y.reshape(-1, *self.outputs), half_normed)
        if norm is not None:
            x_TI = rms_norm(x_TI, norm).astype(self.dtype)
        y = jax.lax.dot_general(
            x_TI, kernel, (((1,), (0,)), ((), ())), precision=matmul_precision(self.dtype)
        )
        return self._finish(y, bias, activation, residual)

    def _finish(
        self,
        y: jax.Array,
        bias: jax.Array | None,
        activation: str | None,
        residual: jax.Array | None,
    ) -> Rows:
        if bias is not None:
            y += bias
        if activation is not None:
            y = y.astype(jnp.float32)
            y = (ACTIVATIONS[activation](y[:, 0]) * y[:, 1]).astype(self.dtype)
        return Rows(y if residual is None else residual + y)

    def _quantized(self, scheme: Scheme, size: int) -> dict[str, jax.Array]:
        (terms,) = {axis for axis in self.input_axes if axis is not None} or (None,)
        return {
            name: self._param(
                name,
                array.shape(name, self.outputs),
                array.axes(name, self.output_axes, terms),
                nn.initializers.zeros,
                array.dtype,
            )
            for name, array in scheme.arrays(size).items()
        }

    def _param(
        self,
        name: str,
        shape: tuple[int, ...],
        axes: tuple[str | None, ...],
        init: Any,
        dtype: Any = None,
    ) -> jax.Array:
        init = nn.with_logical_partitioning(init, axes)
        return self.param(name, init, shape, dtype or self.dtype)
