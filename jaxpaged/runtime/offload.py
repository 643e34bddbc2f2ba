"""Which layers' matrices stay in host memory, and what that saves and costs."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax

from jaxpaged.config import GIB
from jaxpaged.models.decoder import Decoder
from jaxpaged.models.prefetch import WINDOW, is_matrix
from jaxpaged.runtime.memory import shard_bytes
from jaxpaged.runtime.weights import abstract_leaves

log = logging.getLogger(__name__)

PCIE_BYTES = 55e9  # a second: what is left of PCIe 5.0 x16 (64 GB/s) in large copies


@dataclass(frozen=True)
class Offloaded:
    """Layers whose matrices lie in host memory."""

    layers: tuple[int, ...]
    size: int  # bytes of them all, on each device: what every step copies
    window: int  # bytes that are on the device at any time, at most


def offload(model: Decoder, gib: float, device: jax.Device | None = None) -> Decoder:
    """The model with the matrices of as few layers in host memory as hold `gib` GiB.

    Args:
        gib: of each device.
        device: where the model lies if it has no mesh; None: the first.

    Raises:
        ValueError: see `choose`.
    """
    sizes = dict.fromkeys(model.own_layers, 0)
    for name, leaf in abstract_leaves(model, device).items():
        if name.startswith("layers_") and is_matrix(name):
            sizes[int(name.partition("/")[0].removeprefix("layers_"))] += shard_bytes(leaf)
    found = choose(sizes, gib)
    log.info(
        "the matrices of %d of %d layers, %.2f GiB, stay in host memory, and %.2f GiB of the "
        "device hold %d of them at a time: at most about %.3g steps/s at %.0f GB/s",
        len(found.layers),
        len(sizes),
        found.size / GIB,
        found.window / GIB,
        WINDOW,
        PCIE_BYTES / found.size,
        PCIE_BYTES / 1e9,
    )
    return model.clone(host_layers=found.layers)


def choose(sizes: Mapping[int, int], gib: float) -> Offloaded:
    """As few layers as hold `gib` GiB.

    Args:
        sizes: bytes of the matrices of each layer of a stage, in order.

    Raises:
        ValueError: the layers hold less, or nothing would be saved; one line.
    """
    total = sum(sizes.values())
    if gib * GIB > total:
        unit = 10.0 ** (math.floor(math.log10(total / GIB)) - 2)  # of three digits
        most = math.floor(total / GIB / unit) * unit
        raise ValueError(
            f"--cpu-offload-gb {gib:g} is more than all layers hold: at most {most:.3g} GiB of a "
            "device's weights can be offloaded"
        )
    choices = (spaced(tuple(sizes), count) for count in range(1, len(sizes) + 1))
    layers = next(
        layers for layers in choices if sum(sizes[index] for index in layers) >= gib * GIB
    )
    offloaded = sum(sizes[index] for index in layers)
    on_device = max(
        sum(sizes[index] for index in layers[at : at + WINDOW]) for at in range(len(layers))
    )
    if on_device == offloaded:
        here = min(WINDOW, len(sizes))
        most = sum(sizes[index] for index in spaced(tuple(sizes), here)) / GIB
        useful = "no value does" if here == len(sizes) else f"{1.01 * most:.3g} and more do"
        raise ValueError(
            f"--cpu-offload-gb {gib:g} would save nothing, {useful}: the matrices of {here} of "
            f"{len(sizes)} layers, {most:.3g} GiB, are on the device at any time"
        )
    return Offloaded(layers, offloaded, on_device)


def spaced(layers: Sequence[int], count: int) -> tuple[int, ...]:
    """So many of the layers, evenly spread, the last one among them: until it is needed, all others
    give time to copy.
    """
    return tuple(layers[-(-(at + 1) * len(layers) // count) - 1] for at in range(count))
