"""How long `jaxpaged serve` takes until it is ready.

    python -m benchmarks.startup [--model DIR or CONFIG.json] [--repeats N]

Starts a server with an empty compilation cache, then again with what that start left there, each
`--repeats` times. Counts from the start of the process to the line that says where it serves.
A model that is only a config.json gets random weights and a synthetic tokenizer. Arguments unknown
here are handed on to `jaxpaged serve`. Writes a table and JSON.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import markdown, model_settings, write_results
from benchmarks.make_tokenizer import make_tokenizer

PHASE = re.compile(r"(\w+) (\d+\.\d+)")


def start(arguments: Sequence[str]) -> dict[str, float]:
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


def serve_arguments(model: Path | None, settings: dict[str, Any]) -> list[str]:
    """What `jaxpaged serve` needs to hear of a model of `model_settings`."""
    if model is None:
        return []
    arguments = [settings["model"]]
    if "load_format" in settings:
        make_tokenizer(json.loads(model.read_text()), Path(settings["model"]))
        arguments += ["--load-format", settings["load_format"]]
    return arguments


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="Measure the start-up of `jaxpaged serve`.")
    parser.add_argument(
        "--model", type=Path, help="a config.json (random weights) or a folder (default: built-in)"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--name", help="of the file in benchmarks/results")
    args, more = parser.parse_known_args()
    runs: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    with model_settings(args.model) as settings:
        arguments = serve_arguments(args.model, settings)
        for _ in range(args.repeats):
            with tempfile.TemporaryDirectory() as cache:
                for name, found in runs.items():
                    found.append(start([*arguments, "--compile-cache-dir", cache, *more]))
                    print(name, found[-1], flush=True)
    rows = [
        {"start": name, **{phase: median(run[phase] for run in found) for phase in found[0]}}
        for name, found in runs.items()
    ]
    print(markdown(rows))
    model = "built-in" if args.model is None else args.model.stem
    path = write_results(
        args.name or ("startup" if args.model is None else f"startup_{model}"),
        {
            "model": model,
            "seconds": runs,
            "rows": rows,
            "chart": {"x": "start", "y": ["until ready"], "label": "seconds"},
        },
    )
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
