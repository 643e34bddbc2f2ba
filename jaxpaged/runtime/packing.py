"""Many small arrays in one int32 buffer, so that a step's input goes up in one transfer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Packing:
    """Named arrays of 32-bit numbers laid end to end.

    `fields` holds (name, shape, dtype) with dtype int32, uint32 or float32.
    """

    fields: tuple[tuple[str, Shape, str], ...]

    @property
    def size(self) -> int:
        """Length of the buffer in 32-bit words."""
        return sum(math.prod(shape) for _, shape, _ in self.fields)

    def bounds(self, name: str) -> tuple[int, int]:
        """First word of an array, and the word after its last."""
        start = 0
        for other, shape, _ in self.fields:
            end = start + math.prod(shape)
            if other == name:
                return start, end
            start = end
        raise KeyError(name)

    def views(self, buffer: np.ndarray) -> dict[str, np.ndarray]:
        """Writable views, by name, into the front of a host buffer of int32."""
        views, start = {}, 0
        for name, shape, dtype in self.fields:
            end = start + math.prod(shape)
            views[name] = buffer[start:end].view(dtype).reshape(shape)
            start = end
        return views

    def unpack(self, buffer: jax.Array, start: int = 0) -> dict[str, jax.Array]:
        """The same arrays on the device, inside a jitted function; they begin at `start`."""
        arrays = {}
        for name, shape, dtype in self.fields:
            end = start + math.prod(shape)
            piece = jax.lax.slice(buffer, (start,), (end,)).reshape(shape)
            arrays[name] = jax.lax.bitcast_convert_type(piece, jnp.dtype(dtype))
            start = end
        return arrays
