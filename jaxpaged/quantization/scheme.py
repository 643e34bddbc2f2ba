"""What a way of storing weights in fewer bits consists of."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import quantized_linear_mosaic as mosaic
from pallas_kernels.product_parts import ACTIVATIONS, NOT_IN_KERNELS
from pallas_kernels.quantized_linear import is_supported, quantized_linear
from pallas_kernels.rms_norm import HalfNormed, Norm, Rows

Arrays = dict[str, jax.Array]
Types = tuple[str, ...]  # of numbers, as safetensors spells them
FLOATS: Types = ("F32", "BF16", "F16")

# The array that holds the weights: [*outputs, terms], as 8-bit products want it. Beside it may be
# others: [*outputs], or [terms, *outputs], since a block of outputs is read at once.
KERNEL = "kernel_q"
ORDER = "kernel_order"  # [terms]: which of the inputs each of the terms multiplies


class UnsupportedQuantizationError(ValueError):
    """Quantized weights that nothing here reads; the message says what was found."""


class Around(NamedTuple):
    """What stands around a product; see `layers.linear.Linear`.

    Attributes:
        norm: of the rows.
        bias: [*outputs].
        activation: the outputs are then (2, F), and [T, F] comes out.
        residual: [T, *outputs].
        next_norm: of the result, which may begin here.
    """

    norm: Norm | None = None
    bias: jax.Array | None = None
    activation: str | None = None
    residual: jax.Array | None = None
    next_norm: Norm | None = None


@dataclass(frozen=True)
class ArraySpec:
    """One of the arrays that take a kernel's place.

    Attributes:
        dtype: as it is stored.
        terms: values along the axis that is summed over; None: one value an output.
        unit: of these values, that a device has together.
    """

    dtype: Any
    terms: int | None = None
    unit: int = 1

    def shape(self, name: str, outputs: tuple[int, ...]) -> tuple[int, ...]:
        """Of the array of this name in a product with these outputs."""
        terms = () if self.terms is None else (self.terms,)
        if name == ORDER:
            return terms
        return (*outputs, *terms) if name == KERNEL else (*terms, *outputs)

    def axes(
        self, name: str, outputs: tuple[str | None, ...], terms: str | None, dealt: bool
    ) -> tuple[str | None, ...]:
        """Their logical names; `dealt`: groups of terms go where their terms do, see `divides`."""
        if name == ORDER:
            return (None,)
        if name == KERNEL:
            return (*outputs, terms)
        return outputs if self.terms is None else (terms if dealt else None, *outputs)


def divides(arrays: Mapping[str, ArraySpec], parts: int) -> bool:
    """Whether the terms of a product may be dealt out to so many devices: in their order, and in
    whole groups.
    """
    units = [array.terms // array.unit for array in arrays.values() if array.terms is not None]
    return parts == 1 or (ORDER not in arrays and all(count % parts == 0 for count in units))


def arrange(name: str, rows: jax.Array, has_terms: bool) -> jax.Array:
    """From [*outputs, its terms] to the order in which `ArraySpec` has an array's axes."""
    return jnp.moveaxis(rows, -1, 0) if has_terms and name not in (KERNEL, ORDER) else rows


class Scheme(Protocol):
    """How weights are stored and multiplied with. Frozen and hashable: part of a model's spec."""

    @property
    def storage(self) -> str:
        """The number type of a weight: float8_e4m3fn, int8 or int4."""

    @property
    def rounds_rows(self) -> bool:
        """Whether rows are multiplied in 8-bit floats, too, instead of weights widened."""

    @property
    def packed(self) -> int:
        """Weights in one element of the kernel."""

    def arrays(self, size: int) -> Mapping[str, ArraySpec]:
        """What is stored of a kernel that sums over `size` terms, by name."""

    def quantize(self, weight: jax.Array) -> Arrays:
        """The arrays of weights [..., I], each [..., its terms]; axes before the last are rows.

        All the rows count as one tensor where a scheme has one scale a tensor.
        """

    def product(self, x_TI: jax.Array, arrays: Mapping[str, jax.Array], dtype: Any) -> jax.Array:
        """Rows times the kernel: [T, *outputs].

        Args:
            x_TI: rows.
            arrays: as `arrays` says, with the outputs' axes.
            dtype: of the result: that of the rows, or float32.
        """

    def fused(
        self, rows: Rows, arrays: Mapping[str, jax.Array], around: Around, dtype: Any
    ) -> Rows | None:
        """The same with what stands around it by GPU kernels; None: the plain way is the faster.

        Args:
            rows: [T, I], half normed by `around.norm`, rounded after it, or neither.
        """


class Source(Protocol):
    """Where the arrays of a product's part come from. Frozen and hashable."""

    @property
    def tensors(self) -> Mapping[str, Types]:
        """What a checkpoint stores of a part, by the end of its name, and in which types."""

    @property
    def ignored(self) -> tuple[str, ...]:
        """What it may store beside, that is not needed."""

    @property
    def implied(self) -> Mapping[str, Types]:
        """What it may store beside and has to agree with the settings: see `contradiction`."""
        return {}

    def contradiction(self, kind: str, stored: np.ndarray) -> str | None:
        """Which setting such a tensor contradicts; None: it agrees."""
        return None

    def check(self, parts: Sequence[Mapping[str, np.ndarray]]) -> None:
        """Raise an `UnsupportedQuantizationError` if these parts do not make a product."""
        return

    def unpack(self, scheme: Scheme, tensors: Mapping[str, jax.Array]) -> Arrays:
        """The scheme's arrays of one part, each [O, its terms], but an order [its terms]."""


@dataclass(frozen=True)
class Quantized:
    """How a product's kernel is stored, and what it is made of."""

    scheme: Any  # a Scheme
    source: Any  # a Source


@dataclass(frozen=True)
class FullPrecision(Source):
    """A checkpoint's ordinary weights, quantized tensor by tensor while they are loaded."""

    ignored: tuple[str, ...] = ()

    @property
    def tensors(self) -> Mapping[str, Types]:
        """A matrix."""
        return {"weight": FLOATS}

    def unpack(self, scheme: Scheme, tensors: Mapping[str, jax.Array]) -> Arrays:
        """[O, I] in any float."""
        return scheme.quantize(tensors["weight"].astype(jnp.float32))


def contract(
    x_TI: jax.Array, kernel: jax.Array, precision: Any = None, dtype: Any = None
) -> jax.Array:
    """[T, I] times [*outputs, I] is [T, *outputs]."""
    return jax.lax.dot_general(
        x_TI,
        kernel,
        (((1,), (kernel.ndim - 1,)), ((), ())),
        precision=precision,
        preferred_element_type=dtype,
    )


def finished(
    y: jax.Array,
    dtype: Any,
    bias: jax.Array | None = None,
    activation: str | None = None,
    residual: jax.Array | None = None,
) -> jax.Array:
    """What comes after a product, in `dtype`; see `Around`."""
    if bias is not None:
        y += bias
    if activation is not None:
        y = y.astype(jnp.float32)
        y = ACTIVATIONS[activation](y[:, 0]) * y[:, 1]
    y = y.astype(dtype)
    return y if residual is None else residual + y


def sum_dtype(dtype: Any) -> Any:
    """Of sums that are yet to be scaled: the model's, but float16 could overflow."""
    return jnp.float32 if dtype == jnp.float16 else dtype


def few_rows_fit(
    shape: tuple[int, ...],
    dtype: Any,
    arrays: Mapping[str, jax.Array],
    activation: str | None,
    group: int | None = None,
) -> bool:
    """Whether `few_rows` takes rows of this shape and dtype, and is the faster.

    Args:
        group: terms that share a scale; None: all.
    """
    T, size = shape
    F, group = math.prod(arrays[KERNEL].shape[:-1]), group or size
    fits = is_supported(T=T, D=size, F=F, group=group, rows_dtype=dtype)
    fits = fits or _on_hopper(shape, dtype, arrays, activation is not None, group)
    return fits and activation != NOT_IN_KERNELS


def _on_hopper(
    shape: tuple[int, ...],
    dtype: Any,
    arrays: Mapping[str, jax.Array],
    gated: bool,
    group: int,
) -> bool:
    """Whether the kernel for such GPUs takes them, and is the faster."""
    kernel = arrays[KERNEL]
    return mosaic.is_hopper() and mosaic.is_supported(
        T=shape[0],
        D=shape[1],
        F=math.prod(kernel.shape[:-1]),
        group=group,
        rows_dtype=dtype,
        kernel_dtype=kernel.dtype,
        gated_zeros=gated and "kernel_zero" in arrays,
    )


def in_halves(norm: Norm, dtype: Any) -> bool:
    """Whether products begin and complete a norm: undivided rows could overflow float16."""
    return dtype == jnp.bfloat16 and not norm.plus_one


def few_rows(
    x: jax.Array | HalfNormed,
    arrays: Mapping[str, jax.Array],
    around: Around,
    row_scale_T: jax.Array | None = None,
    *,
    dtype: Any,
) -> Rows:
    """The product and what stands around it by one kernel: [T, *outputs] in `dtype`.

    Args:
        x: [T, I] rows, of which a norm is half done or wholly.
        arrays: the kernel [*outputs, its terms], scales and zeros [*outputs] or [groups, *outputs].
    """
    kernel, scale, zero = arrays[KERNEL], arrays["kernel_scale"], arrays.get("kernel_zero")
    outputs = kernel.shape[:-1]
    F, lead = math.prod(outputs), scale.shape[: scale.ndim - len(outputs)]
    bias, residual, next_norm = around.bias, around.residual, around.next_norm
    if next_norm is not None and not in_halves(next_norm, dtype):
        next_norm = None
    x_TI = x.scaled_TD if isinstance(x, HalfNormed) else x
    group = x_TI.shape[1] // math.prod(lead)
    multiply: Callable[..., Rows] = partial(quantized_linear, row_scale_T=row_scale_T)
    if _on_hopper(x_TI.shape, x_TI.dtype, arrays, around.activation is not None, group):
        multiply = mosaic.quantized_linear_mosaic
    rows = multiply(
        x,
        kernel.reshape(F, -1),
        scale.reshape(*lead, F),
        zero_GF=None if zero is None else zero.reshape(-1, F),
        eps=around.norm.eps if isinstance(x, HalfNormed) and around.norm else 0.0,
        bias_F=None if bias is None else bias.reshape(F),
        activation=around.activation,
        residual_TF=residual,
        next_scale_F=None if next_norm is None else next_norm.scale_D,
        dtype=dtype,
    )
    return rows if around.activation else rows._replace(x=rows.x.reshape(-1, *outputs))
