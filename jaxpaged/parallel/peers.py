"""GPUs of one host that store into each other's memory: which can, and where they do."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterable

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpaged.parallel.mesh import MODEL
from jaxpaged.parallel.sharding import replicated
from pallas_kernels.peer_sum import boxes


def reach_each_other(devices: Iterable[jax.Device]) -> bool:
    """Whether these are NVIDIA GPUs of this process, each of which reaches the others' memory."""
    devices = list(devices)
    if any(each.platform != "gpu" or each.client is not devices[0].client for each in devices):
        return False
    if any(each.process_index != jax.process_index() for each in devices):
        return False
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    answer = ctypes.c_int()
    for a, b in itertools.permutations([each.local_hardware_id for each in devices], 2):
        if cuda.cuDeviceCanAccessPeer(ctypes.byref(answer), a, b) != 0 or not answer.value:
            return False
    return True


def make_boxes(mesh: Mesh) -> tuple[jax.Array, jax.Array]:
    """Empty boxes on every device, and their addresses [N, 2] as `peer_sum` takes them.

    The boxes have to be kept as long as any sum may use them.
    """
    devices = mesh.shape[MODEL]
    place = NamedSharding(mesh, PartitionSpec(MODEL))
    kept = jax.jit(lambda: boxes(devices), out_shardings=place)()
    jax.block_until_ready(kept)
    shards = sorted(kept.addressable_shards, key=lambda shard: shard.index[0].start or 0)
    found = np.array([shard.data.unsafe_buffer_pointer() for shard in shards], np.uint64)
    return kept, jax.device_put(found.view(np.int32).reshape(-1, 2), replicated(mesh))
