"""The sockets that the server processes listen on."""

from __future__ import annotations

import contextlib
import hashlib
import socket
from collections.abc import Generator
from pathlib import Path

from jaxpaged.server_config import ServerConfig


@contextlib.contextmanager
def bind(config: ServerConfig) -> Generator[list[socket.socket], None, None]:
    """Sockets bound to the address, one for each server process, not listening yet: who connects
    too early is refused. The kernel spreads TCP connections over them.

    Raises:
        OSError: the address is taken or not ours; one line.
    """
    place = config.uds or f"{config.host}:{config.port}"
    count = config.api_server_count
    with contextlib.ExitStack() as stack:
        try:
            if config.uds:
                stack.enter_context(_claim(str(Path(config.uds).absolute())))
                listeners = [_bind_unix(config.uds)]
            else:
                listeners = [_bind_tcp(config.host, config.port)]
                stack.enter_context(_claim(str(listeners[0].getsockname()[:2])))
        except OSError as error:
            raise OSError(f"cannot listen on {place}: {error.strerror or error}") from error
        if config.uds:
            stack.callback(Path(config.uds).unlink, missing_ok=True)
        elif count > 1:
            port = listeners[0].getsockname()[1]
            listeners.pop().close()  # the address is nobody else's; now they may share it
            listeners = [_bind_tcp(config.host, port, shared=True) for _ in range(count)]
        for listener in listeners:
            stack.callback(listener.close)
        yield listeners * (count // len(listeners))


def url(config: ServerConfig, listener: socket.socket) -> str:
    """Where clients find the server."""
    scheme = "http" if config.ssl_certfile is None else "https"
    if config.uds:
        return f"{scheme}+unix:{config.uds}"
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"{scheme}://{host}:{listener.getsockname()[1]}{config.root_path}"


def _claim(address: str) -> socket.socket:
    """Holds an address against other servers until it is closed: until somebody listens, Linux
    lets them bind it, too. A name of Linux's own, which ends with the process.
    """
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0jaxpaged-{hashlib.sha256(address.encode()).hexdigest()}")
    except OSError:
        claim.close()
        raise
    return claim


def _bind_tcp(host: str, port: int, *, shared: bool = False) -> socket.socket:
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener


def _bind_unix(path: str) -> socket.socket:
    """Takes the place of a socket file that a server left behind, not of one in use."""
    listener = socket.socket(socket.AF_UNIX)
    if Path(path).is_socket():
        with contextlib.suppress(ConnectionRefusedError), socket.socket(socket.AF_UNIX) as probe:
            probe.connect(path)
            listener.close()
            raise OSError("another server listens there")
        Path(path).unlink()
    listener.bind(path)
    return listener
