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
    """The first devices of this host, to share one model; None: one device needs no mesh.

    Raises:
        ValueError: there are fewer.
    """
    devices = jax.local_devices()
    if len(devices) < num_devices:
        platform = devices[0].platform
        hint = f"; JAX_NUM_CPU_DEVICES={num_devices} splits it" if platform == "cpu" else ""
        raise ValueError(
            f"--tensor-parallel-size {num_devices} needs as many devices; this host shows "
            f"{len(devices)} ({platform}){hint}"
        )
    return None if num_devices == 1 else make_mesh(model=num_devices, devices=devices)
