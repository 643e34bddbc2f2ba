"""How many pages fit, and what to tell the user when too few do."""

from __future__ import annotations

import logging
import math
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxpaged.config import GIB, EngineConfig
from jaxpaged.parallel.sharding import HOST

log = logging.getLogger(__name__)

FRAGMENTATION_MARGIN = 0.01  # share of the limit kept free: XLA's allocator can't use every hole
DEFAULT_CPU_PAGE_BYTES = GIB
ALIGNMENT = 256  # bytes; of XLA's allocator
# Pinned host memory that XLA may take: weights with what does not fit between them, and the rest of
# the last layer and arrays on their way (GiB). It grows by doubling, so the limit is what it takes.
HOST_HOLES, HOST_OTHERS = 1.1, 8
# Places kept free for small arrays: how many, of how many bytes. For what is sampled, for the
# input of the host, and for hidden states on their way to another stage.
HOLES = ((32, 8 << 10), (8, 512 << 10), (4, 4 << 20))
HOLE_BYTES = 2 * sum(count * size for count, size in HOLES)  # with what lies between


def claim_memory(config: EngineConfig) -> None:
    """Let XLA take its share of each card, and of the host what offloaded weights need; only before
    the backend starts.

    XLA reads both from the environment alone, and would take 75 % and at most 64 GB by default.
    """
    os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{config.gpu_memory_utilization:.3f}"
    if config.cpu_offload_gb:
        here = config.num_devices // config.num_hosts
        most = HOST_HOLES * config.cpu_offload_gb * here + HOST_OTHERS
        os.environ["XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"] = str(math.ceil(most))


@dataclass(frozen=True)
class PageNeeds:
    """Pages that a sequence needs, in pages of any group."""

    windows: tuple[int | None, ...]  # one a KV group
    page_size: int
    chunk: int  # most tokens of one sequence in a step

    def pages(self, num_tokens: int) -> int:
        """Most pages that a sequence of `num_tokens` holds at any time, all groups together."""
        total = 0
        for window in self.windows:
            span = num_tokens
            if window is not None:
                # the window, a chunk in flight, and one page of slack at either end
                span = min(span, window + self.chunk + 2 * self.page_size)
            total += -(-span // self.page_size)
        return total

    def longest(self, num_pages: int, limit: int) -> int:
        """The longest sequence, at most `limit`, that fits into `num_pages` pages."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            if self.pages(middle) <= num_pages:
                low = middle
            else:
                high = middle - 1
        return low


def scarcest_memory(devices: Sequence[jax.Device]) -> dict[str, int] | None:
    """`memory_stats()` of the device that has least left; None: they don't tell."""
    found = [device.memory_stats() for device in devices]
    known = [stats for stats in found if stats]
    return min(known, key=lambda s: s["bytes_limit"] - s["bytes_in_use"], default=None)


def keep_holes(device: jax.Device) -> list[jax.Array]:
    """Make room for small arrays between others, which are returned and have to be kept.

    XLA's allocator takes the smallest free place that is large enough. Where there is one large
    place alone, what a step has sampled lies at its beginning until the host has read it, and the
    temporaries of the next step begin behind it: somewhere else than those of the step before. A
    GPU is then given its graph anew at every step, which takes the host 1 to 3 ms for 28 layers.
    Elsewhere there are no graphs.
    """
    if device.platform != "gpu":
        return []
    holes: list[jax.Array] = []
    between: list[jax.Array] = []
    for count, size in HOLES:
        for _ in range(count):
            for places in (holes, between):  # of one size: neighbours wherever there is room
                places.append(jax.device_put(np.zeros(size, np.uint8), device))
    jax.block_until_ready(holes)
    return between


def report_outside_pool(device: jax.Device) -> None:
    """Log what of a card is in use beside XLA's pool: CUDA context, graphs, other processes."""
    stats = device.memory_stats() or {}
    pool = stats.get("pool_bytes") or stats.get("bytes_limit")
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i"]
    try:
        card = _card(device.local_hardware_id or 0)
        used = subprocess.run(
            [*command, card], capture_output=True, text=True, timeout=10, check=True
        )
        used_bytes = int(used.stdout) << 20
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return  # no tool to measure with
    if pool is not None:
        log.info(
            "memory: %.2f GiB of card %s are in use outside XLA's pool of %.2f GiB",
            (used_bytes - pool) / GIB,
            card,
            pool / GIB,
        )


def _card(index: int) -> str:
    """What nvidia-smi, which shows all cards, calls this process's card of that number."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return str(index) if visible is None else visible.split(",")[index].strip()


def shard_bytes(leaf: Any) -> int:
    """Bytes of each device's part of a (maybe abstract) array."""
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def resident_bytes(tree: Any) -> int:
    """What XLA's allocator takes on each device for the arrays of a (maybe abstract) pytree; those
    in host memory take nothing there.
    """
    on_devices = [leaf for leaf in jax.tree.leaves(tree) if leaf.sharding.memory_kind != HOST]
    sizes = map(shard_bytes, on_devices)
    return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)


def margin(limit: int) -> int:
    """Bytes of XLA's limit that are left alone: for small arrays, and for what cannot be used."""
    return HOLE_BYTES + int(FRAGMENTATION_MARGIN * limit)


def page_budget(
    *,
    kv_cache_memory_bytes: int | None,
    gpu_memory_utilization: float,
    stats: dict[str, int] | None,
    resident_bytes: int,
    step_temporary_bytes: int,
    step_input_bytes: int,
) -> int:
    """Bytes for KV pages on a device.

    On a GPU: XLA's limit - bytes in use - weights and the rest of the state - the largest
    temporaries of a step - two batches in flight - `margin`. On CPU 1 GiB unless told.

    Args:
        stats: the GPU's `memory_stats()` before anything is loaded; None on a CPU.

    Raises:
        ValueError: nothing is left, naming the smallest utilization that would do.
    """
    if kv_cache_memory_bytes is not None:
        return kv_cache_memory_bytes
    if not stats:
        return DEFAULT_CPU_PAGE_BYTES
    limit, in_use = stats["bytes_limit"], stats["bytes_in_use"] + resident_bytes
    reserved = step_temporary_bytes + 2 * step_input_bytes + margin(limit)
    free = limit - in_use - reserved
    log.info(
        "memory: limit %.2f GiB, weights and state %.2f, step temporaries %.2f, margin %.2f: "
        "%.2f GiB for pages",
        limit / GIB,
        in_use / GIB,
        step_temporary_bytes / GIB,
        margin(limit) / GIB,
        max(free, 0) / GIB,
    )
    if free <= 0:
        needed = gpu_memory_utilization * (in_use + reserved) / limit + 0.01
        advice = (
            f"gpu_memory_utilization {needed:.2f} is the smallest that would do"
            if needed <= 1
            else "the model does not fit this device: see --quantization and --cpu-offload-gb"
        )
        raise ValueError(
            f"No memory is left for KV pages: weights and step temporaries take "
            f"{(in_use + reserved) / GIB:.2f} GiB of {limit / GIB:.2f} GiB; {advice}."
        )
    return free


def check_model_len(needs: PageNeeds, num_pages: int, page_bytes: int, max_model_len: int) -> None:
    """Raise when the pool cannot hold one sequence of `max_model_len`.

    Raises:
        ValueError: needed and available GiB, and the longest length that would fit.
    """
    needed = needs.pages(max_model_len)
    if needed <= num_pages:
        return
    available = max(num_pages, 0) * page_bytes
    raise ValueError(
        f"To serve at least one request with the model's max seq len ({max_model_len}), "
        f"{needed * page_bytes / GIB:.2f} GiB of KV cache is needed, which is more than the "
        f"{available / GIB:.2f} GiB available; the estimated maximum model length "
        f"is {needs.longest(num_pages, max_model_len)}. Decrease --max-model-len (or set it to "
        f"auto), or increase --gpu-memory-utilization or --kv-cache-memory-bytes."
    )
