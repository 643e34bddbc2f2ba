"""The load test itself, for a short while and with an engine that costs nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_nothing_is_left_of_many_clients(model_folder: Path):
    fake = f"{sys.executable} {ROOT / 'tests' / 'fixtures' / 'fake_server.py'}"
    found = subprocess.run(
        [sys.executable, "scripts/load_test.py", "--clients", "10", "--seconds", "2"]
        + ["--command", fake, "--", str(model_folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    for deed in ("stream", "leave", "bad_body", "memory of the server"):
        assert deed in found.stdout
