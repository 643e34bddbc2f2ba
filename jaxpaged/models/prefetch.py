"""Layers whose matrices lie in host memory: they are copied to the device ahead of use."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax

from jaxpaged.quantization import KERNEL

# Layers whose copies are on the device at a time: one is in use while the next arrives.
WINDOW = 2
MATRICES = ("kernel", KERNEL)


def is_matrix(name: str) -> bool:
    """Whether a layer's leaf may go to host memory. Norms, biases and scales are small: to start
    their copies would take longer than to make them.
    """
    return name.rpartition("/")[2] in MATRICES


def fetch(layer: nn.Module, after: Any) -> tuple[Callable[..., Any], Any]:
    """Copy a layer's matrices to the device, while what follows is computed.

    Args:
        layer: a bound module, some of whose variables lie in host memory.
        after: arrays. XLA would start all copies of a step at once, and have memory for them all:
            this one may not start before they are there.

    Returns:
        The layer, which reads the copies, and `after`, from which to go on.
    """
    module, variables = layer.unbind()
    after, variables = jax.lax.optimization_barrier((after, variables))
    return partial(module.apply, jax.tree_util.tree_map_with_path(_on_device, variables)), after


def _on_device(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
    # By name, since a traced array tells where it lies only if its sharding has a mesh.
    is_hosted = is_matrix(jax.tree_util.keystr(path, simple=True, separator="/"))
    return jax.device_put(leaf, jax.memory.Space.Device) if is_hosted else leaf
