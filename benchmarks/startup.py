"""How long `jaxpaged serve` takes until it is ready.

    python -m benchmarks.startup [--model DIR] [--repeats N]

Starts a server with an empty compilation cache, then again with what that start left there, each
`--repeats` times. Counts from the start of the process to the line that says where it serves.
Writes a table and JSON.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from statistics import median

from benchmarks.common import write_results

PHASE = re.compile(r"(\w+) (\d+\.\d+)")


def start(arguments: list[str]) -> dict[str, float]:
    """Start a server and end it once it is ready; seconds of each phase and of all."""
    began = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-m", "jaxpaged", "serve", "--port", "0", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as server:
        assert server.stdout is not None
        phases: dict[str, float] = {}
        lines = []
        for line in server.stdout:
            lines.append(line)
            if "; seconds: " in line:
                found = PHASE.findall(line.partition("; seconds: ")[2])
                phases = {name: float(seconds) for name, seconds in found}
            if " serves " in line:
                phases["until ready"] = time.perf_counter() - began
                server.terminate()
    if "until ready" not in phases:
        sys.exit("the server did not start:\n" + "".join(lines))
    return phases


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="Measure the start-up of `jaxpaged serve`.")
    parser.add_argument("--model", help="folder of a checkpoint (default: the built-in model)")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    model = [args.model] if args.model else []
    runs: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    for _ in range(args.repeats):
        with tempfile.TemporaryDirectory() as cache:
            for name in runs:
                runs[name].append(start([*model, "--compile-cache-dir", cache]))
    medians = {
        name: {phase: median(run[phase] for run in found) for phase in found[0]}
        for name, found in runs.items()
    }
    path = write_results(
        "startup", {"model": args.model or "built-in", "seconds": runs, "medians": medians}
    )
    for name, phases in medians.items():
        print(f"{name}: " + ", ".join(f"{phase} {value:.1f} s" for phase, value in phases.items()))
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
