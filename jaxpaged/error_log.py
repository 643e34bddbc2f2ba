"""The log of a process: lines on standard error."""

from __future__ import annotations

import logging


def log_to_stderr(level: str, process: str = "") -> None:
    """Write what is logged from now on.

    Args:
        level: critical to debug, or uvicorn's trace.
        process: which of several it is, to stand in each line.
    """
    origin = f"[{process}] " if process else ""
    logging.basicConfig(
        level=logging.DEBUG if level == "trace" else level.upper(),
        format=f"%(asctime)s %(levelname)s {origin}%(name)s: %(message)s",
    )
