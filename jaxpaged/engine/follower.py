"""A follower host as the command line sees it: one process to start, and to outlive."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import msgspec

from jaxpaged.config import EngineConfig


def follow(config: EngineConfig) -> int:
    """Run this host's part of an engine until host 0 ends; the exit status: 1 if something failed.

    JAX runs in a process of its own: when host 0 dies it may abort the process, and somebody has
    to say why.
    """
    child = subprocess.Popen(
        [sys.executable, "-m", "jaxpaged.engine.follower_process", str(os.getpid())],
        stdin=subprocess.PIPE,
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        child.communicate(msgspec.msgpack.encode(config))
    finally:
        child.kill()
    code = child.returncode
    if code < 0:
        name = signal.Signals(-code).name
        cause = "host 0, the leader, is gone" if name == "SIGABRT" else "host 0 will end as well"
        print(
            f"jaxpaged: host {config.host_id} was ended by {name}: {cause}",
            file=sys.stderr,
            flush=True,
        )
    return int(code != 0)
