"""The KV page array: where keys and values of all sequences live."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.page_scales import FLOAT8

SLOT_SCALE = jnp.dtype(jnp.float32)  # of what int8 pages are multiplied by


@dataclass(frozen=True)
class KVGroup:
    """Layers whose pages are allocated, kept and freed together.

    All groups of a model hold the same number of layers (or one less), so a page of any group has
    the same bytes and one pool serves them all.
    """

    layers: tuple[int, ...]
    window: int | None  # tokens a query sees, itself included; None: all


def group_layers(windows_L: tuple[int | None, ...]) -> tuple[KVGroup, ...]:
    """Split layers by window into groups of equal size: the rarest kind gives the size.

    A kind's layers are dealt out to its groups in turn. So any run of layers has about as many of
    each group, and stages that share the layers have about as many arrays each.
    """
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows_L):
        kinds.setdefault(window, []).append(layer)
    size = min(len(layers) for layers in kinds.values())
    return tuple(
        KVGroup(tuple(layers[i :: -(-len(layers) // size)]), window)
        for window, layers in sorted(kinds.items(), key=lambda kind: kind[0] or 0)
        for i in range(-(-len(layers) // size))
    )


class KVPages(NamedTuple):
    """One array of the pool."""

    values_P2KSH: jax.Array  # keys at 0, values at 1
    scale_P2KS: jax.Array | None  # f32, where they are int8: what each slot is multiplied by


@dataclass(frozen=True)
class KVPagesSpec:
    """Shape of the pool. Layer `l` uses array `array_of(l)` and the page table of `group_of(l)`."""

    groups: tuple[KVGroup, ...]
    num_pages: int  # P, page 0 (the null page) included
    page_size: int  # S
    num_kv_heads: int  # K
    head_dim: int  # H
    dtype: jnp.dtype
    num_devices: int = 1  # that share the KV heads evenly

    @property
    def num_arrays(self) -> int:
        return max(len(group.layers) for group in self.groups)

    @property
    def has_slot_scales(self) -> bool:
        """Whether every slot has a scale of its own."""
        return self.dtype == jnp.int8

    @property
    def has_layer_scales(self) -> bool:
        """Whether a layer's keys and values are scaled by parameters of it."""
        return self.dtype in FLOAT8

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all arrays: what one more page costs each device."""
        heads = self.num_kv_heads // self.num_devices
        row = self.head_dim * jnp.dtype(self.dtype).itemsize
        row += SLOT_SCALE.itemsize if self.has_slot_scales else 0
        return self.num_arrays * self.page_size * 2 * heads * row

    def part(self, layers: range) -> KVPagesSpec:
        """The pool of a device that computes these layers alone: the same pages of all groups."""
        groups = tuple(
            KVGroup(tuple(layer for layer in group.layers if layer in layers), group.window)
            for group in self.groups
        )
        return replace(self, groups=groups)

    def place(self, layer: int) -> tuple[int, int]:
        """(group, array) of a layer."""
        for g, group in enumerate(self.groups):
            if layer in group.layers:
                return g, group.layers.index(layer)
        raise ValueError(f"layer {layer} is in no KV group")

    def zeros(self) -> tuple[KVPages, ...]:
        """One array for each layer of a group."""
        shape = (self.num_pages, 2, self.num_kv_heads, self.page_size)
        return tuple(
            KVPages(
                jnp.zeros((*shape, self.head_dim), self.dtype),
                jnp.zeros(shape, SLOT_SCALE) if self.has_slot_scales else None,
            )
            for _ in range(self.num_arrays)
        )
