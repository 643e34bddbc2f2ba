"""What `jaxpaged plan` expects beside what was measured, for every committed run it understands.

    python -m benchmarks.plan_accuracy

Needs no GPU. The calibration names the runs that it was fitted to; all others were held out. An
error is expected over measured, less one. Writes results/plan_accuracy.json and the table in
docs/planning.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import markdown, write_results
from benchmarks.planned import Setting, measured_settings
from jaxpaged.planning.hardware import CALIBRATIONS, GPUS, Calibration

DOCUMENT = Path(__file__).parents[1] / "docs" / "planning.md"
BEGIN, END = "<!-- benchmarks/plan_accuracy.py writes from here -->", "<!-- to here -->"


def rows_of(setting: Setting, fitted: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A row for each figure of a setting."""
    calibration = Calibration.of(GPUS[setting.gpu])
    expected = setting.plan(setting.cost_model(calibration))
    for name, measured in setting.measured.items():
        yield {
            "result": setting.file,
            "tp, pp, dp": f"{setting.tp}, {setting.pp}, {setting.dp}",
            "setting": setting.what,
            "figure": name,
            "expected": expected[name],
            "measured": measured,
            "error": f"{expected[name] / measured - 1:+.1%}",
            "run": "fitted" if setting.name in fitted else "held out",
        }


def sizes(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Median and largest error, without their signs."""
    errors = [abs(row["expected"] / row["measured"] - 1) for row in rows]
    return {"figures": len(errors), "median": median(errors), "largest": max(errors)}


def told(errors: dict[str, dict[str, float]]) -> str:
    """The errors as a line a kind."""
    return "\n".join(
        f"- {kind}: {error['figures']} figures, error at the median {error['median']:.1%}, "
        f"at most {error['largest']:.1%}"
        for kind, error in errors.items()
    )


def main() -> None:
    """Plan, print, write."""
    fitted = json.loads((CALIBRATIONS / "h200.json").read_text())["fitted"]
    rows: list[dict[str, Any]] = []
    for setting in measured_settings():
        rows += rows_of(setting, fitted)
    kinds = dict.fromkeys((row["run"], row["figure"]) for row in rows)
    errors = {
        f"{run}, {figure}": sizes([r for r in rows if (r["run"], r["figure"]) == (run, figure)])
        for run, figure in sorted(kinds)
    }
    table = markdown(rows)
    before, rest = DOCUMENT.read_text().split(BEGIN)
    after = rest.split(END)[1]
    DOCUMENT.write_text(f"{before}{BEGIN}\n{table}\n\n{told(errors)}\n{END}{after}")
    print(table, told(errors), sep="\n\n")
    write_results("plan_accuracy", {"errors": errors, "rows": rows})


if __name__ == "__main__":
    main()
