"""What the formats of quantized checkpoints have in common: names of modules and packed words."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.quantization.scheme import Types, UnsupportedQuantizationError

Settings = Mapping[str, Any]  # quantization_config of config.json
EIGHT_BIT_FLOATS: Types = ("F8_E4M3",)
WORDS: Types = ("I32",)  # of packed numbers
INDICES: Types = ("I32", "I64")
HEAD = "lm_head"  # stays as it is in most formats, whether they say so or not


def contains(name: str, keys: Iterable[str]) -> bool:
    """Whether a key is a module's name, or some of its steps: `mlp`, `layers.0`, `mlp.up_proj`."""
    return any(f".{key.strip('.')}." in f".{name}." for key in keys)


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern is a module's name, a shell pattern of it or `re:` and an expression."""
    for pattern in patterns:
        if pattern.startswith("re:"):
            if re.match(pattern[3:], name):
                return True
        elif fnmatch.fnmatchcase(name, pattern):
            return True
    return False


def require(method: str, key: str, value: Any, supported: Iterable[Any], remedy: str = "") -> None:
    """Raises UnsupportedQuantizationError unless a setting has a value that is supported."""
    supported = tuple(supported)
    if value not in supported:
        raise UnsupportedQuantizationError(
            f"config.json: quantization {method!r} with {key} {value!r} is not supported; "
            f"supported: {', '.join(map(str, supported))}{remedy}"
        )


def require_group(method: str, group: Any) -> None:
    """Raises UnsupportedQuantizationError unless this is a number of terms."""
    if type(group) is not int or group <= 0:
        require(method, "group_size", group, ("a positive number",))


def names(method: str, key: str, value: Any) -> list[str]:
    """Of modules, which a setting lists; null: none.

    Raises:
        UnsupportedQuantizationError: it is no list of names.
    """
    value = value or []
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        require(method, key, value, ("a list of names",))
    return value


def by_output(x_GO: jax.Array, whole: bool) -> jax.Array:
    """Scales or zero points of groups as [O, G], or as [O] where one group is the whole.

    Raises:
        TypeError: there are more.
    """
    if whole and x_GO.shape[0] != 1:
        raise TypeError("there is more than one group")
    return x_GO[0] if whole else x_GO.T


def check_order(orders: Sequence[np.ndarray], groups: int) -> None:
    """Raises UnsupportedQuantizationError unless these are one order of terms, in equal groups.

    Args:
        orders: the group of each term, for each part of a product.
    """
    order, size = orders[0], orders[0].size
    if not np.array_equal(np.sort(order), np.arange(size) // (size // groups)):
        raise UnsupportedQuantizationError("its g_idx makes groups of different sizes")
    if any(not np.array_equal(other, order) for other in orders):
        raise UnsupportedQuantizationError("its g_idx differs between parts of a product")


def in_order(kernel_OI: jax.Array, group_I: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The terms of a kernel group by group, and which they were: [O, I] and [I]."""
    if kernel_OI.shape[1:] != group_I.shape:
        raise TypeError("the order is not of these terms")
    order = jnp.argsort(group_I, stable=True).astype(jnp.int32)
    return kernel_OI[:, order], order


def unpack_words(words: jax.Array, bits: int, axis: int) -> jax.Array:
    """Unsigned numbers of `bits` bits along an axis of int32 words, the lowest bits first."""
    words = jnp.moveaxis(words, axis, -1).astype(jnp.uint32)
    parts = words[..., None] >> jnp.arange(0, 32, bits, dtype=jnp.uint32) & (2**bits - 1)
    numbers = parts.astype(jnp.int32).reshape(*words.shape[:-1], -1)
    return jnp.moveaxis(numbers, -1, axis)


def filled(number: int, bits: int) -> int:
    """A word of one number over and over."""
    return sum(number << place for place in range(0, 32, bits))


def expand_scales(scale: jax.Array, rows: int, block: int, terms: int, group: int) -> jax.Array:
    """Scales of blocks of rows and terms, for each row and smaller groups of terms.

    Args:
        scale: [blocks of rows, blocks of terms], square blocks of `block`.
        rows: outputs; the last block may be a smaller one, and so with the terms.
        group: terms of a group, a divisor of `block` and `terms`.

    Returns:
        [rows, terms / group].

    Raises:
        TypeError: that is another number of blocks.
    """
    if scale.shape != (-(-rows // block), -(-terms // block)):
        raise TypeError("scales are not of these blocks")
    by_row = jnp.repeat(scale, block, axis=0)[:rows]
    return jnp.repeat(by_row, block // group, axis=1)[:, : terms // group]
