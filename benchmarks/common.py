"""What benchmarks share: the model they name, percentiles, results with their circumstances."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results"
SHOWN_PERCENTILES = (50, 90, 99)
REPORTED = ("jaxpaged", "jax", "jaxlib", "flax", "numpy", "torch", "transformers")


def pin_threads(count: int | None) -> int:
    """Bind this process to `count` cores (None: all it may use); returns how many they are.

    Call it before the first computation: thread pools take their size from it.
    """
    cores = sorted(os.sched_getaffinity(0))[:count]
    os.sched_setaffinity(0, cores)
    return len(cores)


@contextlib.contextmanager
def model_settings(model: Path | None) -> Iterator[dict[str, Any]]:
    """Engine settings of the model that a benchmark's `--model` names.

    None is the built-in model, a folder a checkpoint, and a `config.json` under any name a model
    of that shape with random weights: a folder is made of it, which lives as long as the context.
    """
    if model is None:
        yield {}
    elif model.is_dir():
        yield {"model": str(model)}
    else:
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(model, Path(folder) / "config.json")
            yield {"model": folder, "load_format": "dummy"}


def percentiles(name: str, values: Sequence[float]) -> dict[str, float]:
    """{"NAME p50": ...} and so on."""
    found = np.percentile(values, SHOWN_PERCENTILES)
    return {f"{name} p{p}": float(value) for p, value in zip(SHOWN_PERCENTILES, found, strict=True)}


def evenly(total: int, count: int) -> list[int]:
    """At most `count` places out of `total`, evenly spread: the middles of equal slices."""
    count = min(count, total)
    return [(2 * place + 1) * total // (2 * count) for place in range(count)]


def shown(value: Any) -> str:
    """Any value as text; floats to four figures."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table of objects that have the same keys."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(map(shown, row.values()) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


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
        "card": card(),
        "versions": {"python": platform.python_version(), **_versions()},
    }


def write_results(name: str, figures: dict[str, Any]) -> Path:
    """Write `results/NAME.json`: the environment and the figures; returns its path."""
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({**environment(), **figures}, indent=1, allow_nan=False) + "\n")
    return path


def card() -> str | None:
    """The name of the first GPU, asked for without taking it; None where there is none."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        names = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return names.splitlines()[0]


def seconds_since_start() -> float:
    """Age of this process: its imports, too, are part of a start-up."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return uptime - ticks / os.sysconf("SC_CLK_TCK")


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _versions() -> dict[str, str]:
    installed = {dist.name.lower(): dist.version for dist in metadata.distributions()}
    return {name: installed[name] for name in REPORTED if name in installed}
