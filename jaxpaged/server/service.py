"""A service from start to end: one server process or several, and the engines behind them."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from socket import socket

import msgspec

from jaxpaged.config import EngineConfig
from jaxpaged.engine.core_client import FrontEnd
from jaxpaged.engine.core_fleet import CORE_COMMAND, CoreFleet
from jaxpaged.server.address import bind
from jaxpaged.server.api_server import ApiServer
from jaxpaged.server.run import SIGNALS, Service, prepare, run_server
from jaxpaged.server_config import ServerConfig

log = logging.getLogger(__name__)

API_SERVER = (sys.executable, "-m", "jaxpaged.server.api_server")
METRICS_FOLDER = "PROMETHEUS_MULTIPROC_DIR"  # prometheus_client reads it as it is imported


def serve(
    engine_config: EngineConfig,
    config: ServerConfig,
    *,
    core_command: Sequence[str] = CORE_COMMAND,
) -> int:
    """Serve until SIGINT or SIGTERM; the exit status: 1 if a process died that is needed.

    Args:
        core_command: what runs an engine's core.

    Raises:
        ValueError, OSError: settings, files or the address; one line.
        EngineStartError: an engine could not start.
    """
    service = prepare(engine_config, config)
    with bind(config) as listeners:
        if config.api_server_count == 1:
            return run_server(service, listeners[0], core_command=core_command)
        with asyncio.Runner() as runner:
            return runner.run(_serve_by_several(service, listeners, core_command))


async def _serve_by_several(
    service: Service, listeners: Sequence[socket], core_command: Sequence[str]
) -> int:
    """This process starts the others, and ends all of them when one of the servers ends."""
    count, stopped = service.server.api_server_count, asyncio.Event()
    for number in SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    fleet = CoreFleet(service.engine, core_command, count)
    servers: list[asyncio.subprocess.Process] = []
    try:
        for front_end, listener in zip(await fleet.launch(), listeners, strict=True):
            servers.append(await _start_server(service, listener, front_end))
        ends = [asyncio.create_task(server.wait()) for server in servers]
        stopping = asyncio.create_task(stopped.wait())
        await asyncio.wait([stopping, *ends], return_when=asyncio.FIRST_COMPLETED)
        statuses = []
        if not stopped.is_set():
            index = next(index for index, end in enumerate(ends) if end.done())
            statuses.append(ends[index].result() or 1)
            log.error("API server %d ended (exit status %d): ending the others", index, statuses[0])
        for server in servers:
            if server.returncode is None:
                server.send_signal(signal.SIGTERM)
        statuses += await asyncio.gather(*ends)
        stopping.cancel()
        fine = (0, *(-number for number in SIGNALS))  # told to end before it handled signals
        return next((max(status, 1) for status in statuses if status not in fine), 0)
    finally:
        await fleet.stop()


async def _start_server(
    service: Service, listener: socket, front_end: FrontEnd
) -> asyncio.subprocess.Process:
    Path(front_end.metrics_folder).mkdir(exist_ok=True)
    server = await asyncio.create_subprocess_exec(
        *API_SERVER,
        stdin=asyncio.subprocess.PIPE,
        pass_fds=[listener.fileno()],
        env={**os.environ, METRICS_FOLDER: front_end.metrics_folder},
    )
    assert server.stdin is not None
    server.stdin.write(msgspec.msgpack.encode(ApiServer(service, listener.fileno(), front_end)))
    server.stdin.close()  # once it is written
    return server
