"""Weights in 8 or 4 bits that are widened inside the product; activations stay as they are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.quantization.scheme import (
    KERNEL,
    ORDER,
    Around,
    Arrays,
    ArraySpec,
    UnsupportedQuantizationError,
    contract,
    few_rows,
    few_rows_fit,
    in_halves,
    sum_dtype,
)
from pallas_kernels.rms_norm import HalfNormed, Rows, half_norm, rms_norm
from pallas_kernels.wide_integers import ELEMENT, PACKED, RUN, packed

E4M3 = "float8_e4m3fn"
# What the largest weight of a scale becomes, whose sign the scale takes. Of 4 bits the sixteenth
# value is worth it, though weights of the other sign may then miss it by a step.
EXTREME = {E4M3: 448.0, "int8": 127.0, "int4": -8.0}
BITS = {"int8": 8, "int4": 4}
_DTYPES = {ELEMENT // count: jnp.dtype(name) for name, count in PACKED.items()}  # by bits


@dataclass(frozen=True)
class WeightOnly:
    """Weights `(kernel_q - kernel_zero) * kernel_scale`.

    Attributes:
        storage: float8_e4m3fn, int8 or int4; of integers two or four share an element, see `pack`.
        group: neighbouring terms of an output that share a scale; None: all of them.
        has_zero: groups have a zero point too, an integer.
        ordered: an array says which input each of the terms belongs to.
    """

    storage: str
    group: int | None = None
    has_zero: bool = False
    ordered: bool = False

    @property
    def rounds_rows(self) -> bool:
        """They stay as they are."""
        return False

    @property
    def packed(self) -> int:
        """As many integers to an element as it has room for."""
        return packed(self._dtype)

    @property
    def _dtype(self) -> Any:
        """Of an element."""
        return jnp.dtype(E4M3) if self.storage == E4M3 else _DTYPES[BITS[self.storage]]

    def group_size(self, size: int) -> int:
        """Terms to a scale where `size` are summed: a group divides them."""
        return size if self.group is None else math.gcd(self.group, size)

    def arrays(self, size: int) -> Mapping[str, ArraySpec]:
        """[*outputs, I / packed]; scales [*outputs] or [groups, *outputs].

        Raises:
            UnsupportedQuantizationError: terms that do not fill their elements.
        """
        if size % self.packed:
            raise UnsupportedQuantizationError(
                f"a product sums over {size} terms: {BITS[self.storage]} bits are packed by "
                f"{self.packed}"
            )
        unit = 1 if self.storage == E4M3 else math.gcd(size, RUN) // self.packed
        groups = None if self.group is None else size // self.group_size(size)
        arrays = {
            KERNEL: ArraySpec(self._dtype, size // self.packed, unit),
            "kernel_scale": ArraySpec(jnp.float32, groups),
        }
        if self.has_zero:
            arrays["kernel_zero"] = ArraySpec(jnp.int8, groups)
        if self.ordered:
            arrays[ORDER] = ArraySpec(jnp.int32, size)
        return arrays

    def quantize(self, weight: jax.Array) -> Arrays:
        """Round to nearest, without zero points: a scale's largest becomes the type's."""
        *rows, size = weight.shape
        groups = weight.reshape(*rows, -1, self.group_size(size))
        high, low = groups.max(-1, keepdims=True), groups.min(-1, keepdims=True)
        extreme = jnp.where(high > -low, high, low)
        scale = jnp.where(extreme != 0, extreme * (1 / EXTREME[self.storage]), 1.0)
        quotient = (groups / scale).reshape(weight.shape)
        if self.storage == E4M3:
            kernel = jnp.clip(quotient, -EXTREME[E4M3], EXTREME[E4M3]).astype(E4M3)
        else:
            bits = BITS[self.storage]
            least = -(2 ** (bits - 1))
            kernel = pack(jnp.clip(jnp.round(quotient), least, -least - 1).astype(jnp.int8), bits)
        arrays = {
            KERNEL: kernel,
            "kernel_scale": scale[..., 0, 0] if self.group is None else scale[..., 0],
        }
        if self.has_zero:
            arrays["kernel_zero"] = jnp.zeros(arrays["kernel_scale"].shape, jnp.int8)
        if self.ordered:
            arrays[ORDER] = jnp.arange(size, dtype=jnp.int32)
        return arrays

    def product(self, x_TI: jax.Array, arrays: Mapping[str, jax.Array], dtype: Any) -> jax.Array:
        """Widen, then multiply."""
        if self.ordered:
            x_TI = jnp.take(x_TI, arrays[ORDER], axis=1)
        precision = jax.lax.Precision.HIGHEST if x_TI.dtype == jnp.float32 else None
        if self.group is None and not self.has_zero and self.storage != "int4":
            # Exact in the dtype of x: XLA may widen them on their way into the product.
            kernel = arrays[KERNEL]
            if self.storage == "int8":
                x_TI, kernel = _in_order_of_bytes(x_TI), _in_bytes(kernel)
            y = contract(x_TI, kernel.astype(x_TI.dtype), precision, sum_dtype(dtype))
            return (y.astype(jnp.float32) * arrays["kernel_scale"]).astype(dtype)
        # Not before x is there: XLA would widen all layers' kernels first, and keep them all.
        x_TI, arrays = jax.lax.optimization_barrier((x_TI, dict(arrays)))
        return contract(x_TI, self.dequantize(arrays, x_TI.dtype), precision, dtype)

    def fused(
        self, rows: Rows, arrays: Mapping[str, jax.Array], around: Around, dtype: Any
    ) -> Rows | None:
        """Widened on the way; norms are halved between products."""
        x_TI, group, norm = rows.x, self.group_size(rows.x.shape[1]), around.norm
        if not few_rows_fit(x_TI.shape, x_TI.dtype, arrays, around.activation, group):
            return None
        square_XT = None
        if norm is not None and in_halves(norm, x_TI.dtype):
            x_TI, square_XT = rows.half_normed or half_norm(x_TI, norm.scale_D)
        elif norm is not None:
            x_TI = rms_norm(x_TI, norm).astype(x_TI.dtype)
        if self.ordered:
            x_TI = jnp.take(x_TI, arrays[ORDER], axis=1)
        x = x_TI if square_XT is None else HalfNormed(x_TI, square_XT)
        return few_rows(x, arrays, around, dtype=dtype)

    def dequantize(self, arrays: Mapping[str, jax.Array], dtype: Any) -> jax.Array:
        """The kernel [*outputs, I], rounded to `dtype` once."""
        kernel = arrays[KERNEL]
        wide = (kernel if self.storage == E4M3 else unpack(kernel)).astype(jnp.float32)
        if self.has_zero:
            wide -= self._along_terms(arrays["kernel_zero"].astype(jnp.float32), wide.shape[-1])
        return (wide * self._along_terms(arrays["kernel_scale"], wide.shape[-1])).astype(dtype)

    def _along_terms(self, x: jax.Array, size: int) -> jax.Array:
        """[*outputs] or [groups, *outputs], a value for each term: [*outputs, I or 1]."""
        if self.group is None:
            return x[..., None]
        return jnp.repeat(jnp.moveaxis(x, 0, -1), self.group_size(size), axis=-1)


def pack(x: jax.Array, bits: int) -> jax.Array:
    """Integers with a sign [..., I] of 4 or 8 bits, four or two to an element of 16.

    Of `RUN` neighbours, or fewer where that does not divide them, the four quarters or two halves
    share elements, the first in the lowest bits: a kernel then multiplies each with a row's terms
    as they lie. Each is stored plus half its range. Elements of four are uint16, of two int16.
    """
    *lead, size = x.shape
    count = ELEMENT // bits
    run = math.gcd(size, RUN) // count
    parts = (x.astype(jnp.int32) + 2 ** (bits - 1)).reshape(*lead, -1, count, run)
    elements = jnp.sum(
        parts.astype(jnp.uint16) << _shifts(bits), axis=-2, dtype=jnp.uint16
    ).reshape(*lead, -1)
    return jax.lax.bitcast_convert_type(elements, _DTYPES[bits])


def unpack(x: jax.Array) -> jax.Array:
    """What `pack` packed, as int8."""
    *lead, size = x.shape
    count = packed(x.dtype)
    bits, run = ELEMENT // count, math.gcd(count * size, RUN) // count
    elements = jax.lax.bitcast_convert_type(x, jnp.uint16).reshape(*lead, -1, 1, run)
    parts = elements >> _shifts(bits) & (2**bits - 1)
    return (parts.astype(jnp.int16) - 2 ** (bits - 1)).astype(jnp.int8).reshape(*lead, -1)


def _shifts(bits: int) -> np.ndarray:
    """Of an element's weights, [packed, 1]."""
    return np.arange(0, ELEMENT, bits, dtype=np.uint16)[:, None]


def _in_bytes(x: jax.Array) -> jax.Array:
    """8-bit weights [..., I / 2] as int8 [..., I], in the order of their bytes.

    XLA takes no pass over them for it.
    """
    stored = jax.lax.bitcast_convert_type(x, jnp.int8).reshape(*x.shape[:-1], -1)
    return stored + jnp.int8(-128)  # beyond the range it wraps around


def _in_order_of_bytes(x_TI: jax.Array) -> jax.Array:
    """Rows whose terms stand as those of `_in_bytes`."""
    T, size = x_TI.shape
    halves = x_TI.reshape(T, -1, 2, math.gcd(size, RUN) // 2)
    return halves.swapaxes(2, 3).reshape(T, size)
