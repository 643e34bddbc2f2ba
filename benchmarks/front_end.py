"""Tokens a second that one API server process streams, from an engine that costs nothing.

    python -m benchmarks.front_end                      # 256 connections
    python -m benchmarks.front_end --step-seconds 0.03  # at the pace of a card

The server, the engine (`table_engine.py`) and the client share the machine's cores. A second run
under cProfile tells where the server's time goes.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import pstats
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.common import RESULTS, percentiles, write_results
from benchmarks.http_client import Answer, complete
from jaxpaged.config import EngineConfig
from jaxpaged.server.service import serve
from jaxpaged.server_config import ServerConfig

TOP = 25  # functions shown


def run_server(step_seconds: float, profile: Path | None) -> int:
    """A server on a free port, in this process; its exit status."""
    core = (sys.executable, "-m", "benchmarks.table_engine", "--step-seconds", str(step_seconds))
    settings = EngineConfig(), ServerConfig(port=0, disable_log_stats=True)
    if profile is None:
        return serve(*settings, core_command=core)
    with cProfile.Profile() as profiler:
        status = serve(*settings, core_command=core)
    profiler.dump_stats(profile)
    return status


async def load(url: str, connections: int, tokens: int, rounds: int) -> tuple[list[Answer], float]:
    """The answers of `rounds` requests on each connection, and the seconds they took."""
    body = {"prompt": "the king", "max_tokens": tokens, "ignore_eos": True}

    async def one() -> list[Answer]:
        return [await complete(url, body) for _ in range(rounds)]

    start = time.perf_counter()
    answers = await asyncio.gather(*(one() for _ in range(connections)))
    return [answer for each in answers for answer in each], time.perf_counter() - start


def measure(args: argparse.Namespace, profile: Path | None) -> dict[str, Any]:
    """Figures of one server."""
    command = [sys.executable, "-m", "benchmarks.front_end", "--server"]
    command += ["--step-seconds", str(args.step_seconds)]
    command += ["--profile", str(profile)] if profile else []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        greeting = server.stdout.readline()
        try:
            url = greeting.partition(" at ")[2].split(": ")[0]
            uvloop.run(load(url, 16, 32, 1))
            before = _cpu_seconds(server.pid)
            client = time.process_time()
            answers, seconds = uvloop.run(load(url, args.connections, args.tokens, args.rounds))
            shares = {
                "server's core": (_cpu_seconds(server.pid) - before) / seconds,
                "client's core": (time.process_time() - client) / seconds,
            }
        finally:
            server.terminate()
            server.wait()
    errors = {answer.error for answer in answers if answer.error is not None}
    if errors:
        sys.exit(f"failed: {errors}")
    gaps = [1e3 * (b - a) for each in answers for a, b in pairwise(each.times)]
    made = sum(answer.num_tokens for answer in answers)
    rate = made / seconds
    return {
        "tok/s": rate,
        "tok/s of one core": rate / shares["server's core"],
        "events a token": sum(len(answer.times) for answer in answers) / made,
        **shares,
        **percentiles("ITL", gaps),
    }


def _cpu_seconds(pid: int) -> float:
    """That a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def top_items(profile: Path) -> list[dict[str, Any]]:
    """The functions in which most time was spent, their callees left out."""
    stats = pstats.Stats(str(profile))
    rows: Sequence[Any] = sorted(stats.stats.items(), key=lambda row: -row[1][2])  # type: ignore[attr-defined]
    total = sum(row[1][2] for row in rows)
    return [
        {
            "share": own / total,
            "calls": calls,
            "function": f"{'/'.join(Path(file).parts[-2:])}:{line} {name}" if line else name,
        }
        for (file, line, name), (_, calls, own, _, _) in rows[:TOP]
    ]


def main() -> None:
    """Measure, profile, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--connections", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=400, help="of each answer")
    parser.add_argument("--rounds", type=int, default=2, help="answers on each connection")
    parser.add_argument("--step-seconds", type=float, default=0.005, help="of the engine")
    parser.add_argument("--name", default="front_end", help="of the file in benchmarks/results")
    parser.add_argument("--server", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--profile", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.server:
        sys.exit(run_server(args.step_seconds, args.profile))
    figures = measure(args, None)
    for name, value in figures.items():
        print(f"{name:20} {value:10.2f}")
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "profile"
        measure(args, profile)
        items = top_items(profile)
    for item in items:
        print(f"{item['share']:6.1%} {item['calls']:9} {item['function']}")
    settings = {name: getattr(args, name) for name in ("connections", "tokens", "step_seconds")}
    path = write_results(args.name, {**settings, **figures, "profile": items})
    print(f"wrote {path.relative_to(RESULTS.parent.parent)}")


if __name__ == "__main__":
    main()
