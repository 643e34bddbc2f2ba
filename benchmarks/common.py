"""What every benchmark writes beside its figures: command, date, machine and versions."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
REPORTED = ("jaxpaged", "jax", "jaxlib", "flax", "numpy", "torch", "transformers")


def pin_threads(count: int | None) -> int:
    """Bind this process to `count` cores (None: all it may use); returns how many they are.

    Call it before the first computation: thread pools take their size from it.
    """
    cores = sorted(os.sched_getaffinity(0))[:count]
    os.sched_setaffinity(0, cores)
    return len(cores)


def environment() -> dict[str, Any]:
    """The circumstances of this run, JSON-ready."""
    return {
        "command": shlex.join([Path(sys.executable).name, *sys.orig_argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
            "system": platform.platform(),
        },
        "versions": {"python": platform.python_version(), **_versions()},
    }


def write_results(name: str, figures: dict[str, Any]) -> Path:
    """Write `results/NAME.json`: the environment and the figures; returns its path."""
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({**environment(), **figures}, indent=1, allow_nan=False) + "\n")
    return path


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _versions() -> dict[str, str]:
    installed = {dist.name.lower(): dist.version for dist in metadata.distributions()}
    return {name: installed[name] for name in REPORTED if name in installed}
