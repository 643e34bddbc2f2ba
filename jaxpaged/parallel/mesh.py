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


def stage_devices(tensor: int, stages: int) -> list[list[jax.Device]]:
    """The first devices of this host, dealt out to the stages that share one model.

    Args:
        tensor: devices of a stage.

    Raises:
        ValueError: there are fewer.
    """
    devices, needed = jax.local_devices(), tensor * stages
    if len(devices) < needed:
        platform = devices[0].platform
        flags = {"--tensor-parallel-size": tensor, "--pipeline-parallel-size": stages}
        asked = " with ".join(f"{flag} {size}" for flag, size in flags.items() if size > 1)
        hint = f"; JAX_NUM_CPU_DEVICES={needed} splits it" if platform == "cpu" else ""
        raise ValueError(
            f"{asked} needs {needed} devices; this host shows {len(devices)} ({platform}){hint}"
        )
    return [devices[stage * tensor : (stage + 1) * tensor] for stage in range(stages)]


def model_mesh(devices: Sequence[jax.Device]) -> Mesh | None:
    """Of devices that share every layer; None: one device needs no mesh."""
    return None if len(devices) == 1 else make_mesh(model=len(devices), devices=devices)
