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
    """The first devices of each host, dealt out to the stages that share one model.

    Args:
        tensor: devices of a stage; all of them divide by the number of hosts.

    Raises:
        ValueError: a host has fewer.
    """
    num_hosts = jax.process_count()
    found, needed = [], tensor * stages // num_hosts
    for host_id in range(num_hosts):
        shown = jax.local_devices(process_index=host_id)
        if len(shown) < needed:
            raise ValueError(_too_few(tensor, stages, needed, shown))
        found += shown[:needed]
    return [found[stage * tensor : (stage + 1) * tensor] for stage in range(stages)]


def _too_few(tensor: int, stages: int, needed: int, shown: Sequence[jax.Device]) -> str:
    first, num_hosts = shown[0], jax.process_count()
    flags = {"--tensor-parallel-size": tensor, "--pipeline-parallel-size": stages}
    asked = " with ".join(f"{flag} {size}" for flag, size in flags.items() if size > 1)
    hint = f"; JAX_NUM_CPU_DEVICES={needed} splits it" if first.platform == "cpu" else ""
    on_each, host = "", "this host"
    if num_hosts > 1:
        on_each, host = f" on each of {num_hosts} hosts", f"host {first.process_index}"
    return (
        f"{asked} needs {needed} devices{on_each}; {host} shows {len(shown)} "
        f"({first.platform}){hint}"
    )


def model_mesh(devices: Sequence[jax.Device]) -> Mesh | None:
    """Of devices that share every layer; None: one device needs no mesh."""
    return None if len(devices) == 1 else make_mesh(model=len(devices), devices=devices)
