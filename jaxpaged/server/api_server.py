"""One of several server processes: `python -m jaxpaged.server.api_server`.

Reads what it is to do from standard input: settings may hold keys. Ends when its parent has ended.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from socket import socket

import msgspec
import zmq

from jaxpaged.engine.core_client import FrontEnd
from jaxpaged.engine.errors import EngineStartError
from jaxpaged.engine.messages import EngineDead
from jaxpaged.error_log import log_to_stderr
from jaxpaged.server.run import Service, run_server

PARENT_SECONDS = 1.0  # how often it looks whether its parent still lives
LAST_WORDS_MS = 1000  # for its own requests to hear that the parent is gone
FIRST_WORD_SECONDS = 10.0  # for the first server to tell what all of them fail at


class ApiServer(msgspec.Struct):
    """What it is to do.

    Args:
        listener: file descriptor of the socket to listen on.
    """

    service: Service
    listener: int
    front_end: FrontEnd


def main() -> int:
    """Serve; the exit status is that of `jaxpaged serve`."""
    parent = os.getppid()
    told = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=ApiServer)
    threading.Thread(target=_end_with, args=(parent, told.front_end), daemon=True).start()
    index = told.front_end.index
    log_to_stderr(told.service.server.uvicorn_log_level, f"server {index}")
    try:
        with socket(fileno=told.listener) as listener:
            return run_server(told.service, listener, front_end=told.front_end)
    except (ValueError, OSError, ImportError, EngineStartError) as error:
        if index:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # uvloop's handler outlives its loop
            time.sleep(FIRST_WORD_SECONDS)
        print(f"jaxpaged: {' '.join(str(error).split())}", file=sys.stderr)
        return 1 if isinstance(error, EngineStartError) else 2


def _end_with(parent: int, front_end: FrontEnd) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_SECONDS)
    # The cores end with it: nobody else is left to say so to the requests that wait.
    dead = msgspec.msgpack.encode(EngineDead("the server's first process is gone"))
    with zmq.Context() as context:
        context.linger = LAST_WORDS_MS
        for engine in range(front_end.num_engines):
            with context.socket(zmq.PUSH) as socket:
                socket.connect(front_end.from_core(engine))
                socket.send(dead)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
