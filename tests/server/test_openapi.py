"""/openapi.json, held against what the server answers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from fake_server import running

ROOT = Path(__file__).parents[2]


def test_schemathesis_finds_nothing(model_folder: Path, tmp_path: Path):
    pytest.importorskip("schemathesis")
    with running(str(model_folder), "--enable-admin") as server:
        found = subprocess.run(
            [sys.executable, str(ROOT / "scripts" / "fuzz_api.py"), "--base-url", server.url]
            + ["--max-examples", "3", "--phases", "fuzzing", "--seed", "1"]
            + ["--suppress-health-check", "all", "--no-color"],
            cwd=tmp_path,  # schemathesis keeps what it finds in the current folder
            capture_output=True,
            text=True,
        )
        assert found.returncode == 0, found.stdout
        assert not any("Traceback" in line for line in server.lines), server.lines
