"""Many small arrays in one int32 buffer, so that a step's input goes up in one transfer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import jax
import numpy as np

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Packing:
    """Named arrays of 32-bit numbers laid end to end.

    `fields` holds (name, shape, dtype) with dtype int32, uint32 or float32.
    """

    fields: tuple[tuple[str, Shape, str], ...]

    @cached_property
    def _places(self) -> dict[str, tuple[int, int, Shape, np.dtype]]:
        """First word, word after the last, shape and dtype of each array."""
        places, start = {}, 0
        for name, shape, dtype in self.fields:
            end = start + math.prod(shape)
            places[name] = start, end, shape, np.dtype(dtype)
            start = end
        return places

    @cached_property
    def size(self) -> int:
        """Length of the buffer in 32-bit words."""
        return sum(math.prod(shape) for _, shape, _ in self.fields)

    def bounds(self, name: str) -> tuple[int, int]:
        """First word of an array, and the word after its last."""
        start, end, _, _ = self._places[name]
        return start, end

    def views(self, buffer: np.ndarray) -> dict[str, np.ndarray]:
        """Writable views, by name, into the front of a host buffer of int32."""
        return {
            name: np.ndarray(shape, dtype, buffer, start * buffer.itemsize)
            for name, (start, _, shape, dtype) in self._places.items()
        }

    def unpack(self, buffer: jax.Array, start: int = 0) -> dict[str, jax.Array]:
        """The same arrays on the device, inside a jitted function; they begin at `start`."""
        arrays = {}
        for name, (first, end, shape, dtype) in self._places.items():
            piece = jax.lax.slice(buffer, (start + first,), (start + end,)).reshape(shape)
            arrays[name] = jax.lax.bitcast_convert_type(piece, dtype)
        return arrays
