"""The KV page array: where keys and values of all sequences live."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp


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
    def page_bytes(self) -> int:
        """Bytes of one page over all arrays: what one more page costs each device."""
        heads = self.num_kv_heads // self.num_devices
        slot = 2 * heads * self.head_dim * jnp.dtype(self.dtype).itemsize
        return self.num_arrays * self.page_size * slot

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

    def zeros(self) -> tuple[jax.Array, ...]:
        """One [P, 2, K, S, H] array for each layer of a group; keys at 0, values at 1."""
        shape = (self.num_pages, 2, self.num_kv_heads, self.page_size, self.head_dim)
        return tuple(jnp.zeros(shape, self.dtype) for _ in range(self.num_arrays))
