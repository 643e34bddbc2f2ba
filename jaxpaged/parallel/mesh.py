"""The devices of one engine, arranged in a mesh."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.sharding import AxisType, Mesh

DATA, MODEL = "data", "model"


def make_mesh(
    *, data: int = 1, model: int = 1, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """A `data` x `model` mesh: replicas by parts of one replica's weights.

    Raises:
        ValueError: fewer devices than data * model.
    """
    devices = jax.devices() if devices is None else devices
    if len(devices) < data * model:
        raise ValueError(f"{data} x {model} devices are needed, {len(devices)} are present")
    # JAX's default, Explicit, would put shardings into every type; XLA is to choose them here.
    return jax.make_mesh(
        (data, model),
        (DATA, MODEL),
        axis_types=(AxisType.Auto, AxisType.Auto),
        devices=devices[: data * model],
    )


def model_mesh(num_devices: int) -> Mesh | None:
    """The first devices of each host, to share one model; None: one device needs no mesh.

    Args:
        num_devices: of all hosts together; divides by their number.

    Raises:
        ValueError: a host has fewer.
    """
    num_hosts = jax.process_count()
    here = num_devices // num_hosts
    devices: list[jax.Device] = []
    for host_id in range(num_hosts):
        shown = jax.local_devices(process_index=host_id)
        if len(shown) < here:
            platform = shown[0].platform
            hint = f"; JAX_NUM_CPU_DEVICES={here} splits it" if platform == "cpu" else ""
            which = f"host {host_id}" if num_hosts > 1 else "this host"
            needs = f"{here} devices on each host" if num_hosts > 1 else "as many devices"
            raise ValueError(
                f"--tensor-parallel-size {num_devices} needs {needs}; {which} shows "
                f"{len(shown)} ({platform}){hint}"
            )
        devices += shown[:here]
    return None if num_devices == 1 else make_mesh(model=num_devices, devices=devices)
