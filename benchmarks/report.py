"""Figures of results/*.json for readers: a Markdown table and a chart of each.

    python -m benchmarks.report [NAME ...]

A result that has "rows", a list of flat objects with the same keys, gets NAME.md, and NAME.png if
its "chart" says what to draw: {"x": key, "y": [keys], "label": what y is}. Runs wherever
matplotlib is; the machine with the GPU needs none.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks.common import RESULTS, markdown, shown


def draw(figures: Mapping[str, Any], title: str, path: Path) -> None:
    """Bars of every y by x."""
    rows, chart = figures["rows"], figures["chart"]
    names: Sequence[str] = chart["y"]
    figure = Figure(figsize=(max(5.0, 1.2 * len(rows) * len(names) ** 0.5), 3.6))
    figure.set_layout_engine("constrained")
    axes = figure.subplots()
    axes.margins(y=0.12)
    width = 0.8 / len(names)
    for place, name in enumerate(names):
        at = np.arange(len(rows)) + width * (place - (len(names) - 1) / 2)
        heights = [row[name] for row in rows]
        axes.bar_label(axes.bar(at, heights, width, label=name), [*map(shown, heights)])
    axes.set_xticks(range(len(rows)), [str(row[chart["x"]]) for row in rows])
    axes.set_xlabel(chart["x"])
    axes.set_ylabel(chart["label"])
    axes.set_title(title, fontsize="medium")
    if len(names) > 1:
        axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Write the tables and charts of the named results, or of all that have rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="of files in benchmarks/results")
    args = parser.parse_args()
    for name in args.names or sorted(path.stem for path in RESULTS.glob("*.json")):
        figures = json.loads((RESULTS / f"{name}.json").read_text())
        if "rows" not in figures:
            continue
        parts = (name, figures.get("model"), figures["card"], figures["date"][:10])
        title = ", ".join(str(part) for part in parts if part)
        table = markdown(figures["rows"])
        (RESULTS / f"{name}.md").write_text(f"{title}: `{figures['command']}`\n\n{table}\n")
        if "chart" in figures:
            draw(figures, title, RESULTS / f"{name}.png")
        print(f"{title}\n\n{table}\n")


if __name__ == "__main__":
    main()
