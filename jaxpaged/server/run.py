"""Runs a server process: engine first, then HTTP, until a signal or the engine's death."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import logging
import os
import signal
import ssl
import threading
from collections.abc import Generator, Sequence
from pathlib import Path
from socket import socket

import msgspec
import uvicorn
import uvloop

import jaxpaged
from jaxpaged.config import EngineConfig
from jaxpaged.engine.async_llm import AsyncLLM, Observer
from jaxpaged.engine.core_client import FrontEnd
from jaxpaged.engine.core_fleet import CORE_COMMAND
from jaxpaged.engine.metrics import MetricsRegistry
from jaxpaged.model_files import resolve_model
from jaxpaged.server.address import url
from jaxpaged.server.app import create_app
from jaxpaged.server.context import ServerContext
from jaxpaged.server.request_log import log_request, without_routine
from jaxpaged.server.tracing import tracing
from jaxpaged.server_config import ServerConfig

log = logging.getLogger(__name__)

DEMO_NAME = "demo"
LAST_HEALTH_SECONDS = 2.0  # how long /health says 503 before a server without engines ends
ABORT_SECONDS = 10.0  # for the last answers to be sent after their requests were aborted
LAST_SECONDS = 12.0  # for the engine to end and threads to return, after which the process ends
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Service(msgspec.Struct, frozen=True):
    """What every server process of a service is told.

    Args:
        names: what requests may call the model; the first is echoed.
        root: what the model was named at start.
        chat_template: instead of the model's.
    """

    engine: EngineConfig  # with folders for names
    server: ServerConfig
    names: tuple[str, ...]
    root: str
    chat_template: str | None


def prepare(engine_config: EngineConfig, config: ServerConfig) -> Service:
    """Find the files; what is wrong with them is told now, not once the model is loaded.

    Raises:
        ValueError, OSError: settings or files; one line.
    """
    template = _read_template(config.chat_template)
    if config.ssl_certfile is not None:
        ssl.create_default_context().load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    root = engine_config.model or DEMO_NAME
    names = config.served_model_name or (root,)
    return Service(_with_files(engine_config), config, names, root, template)


@contextlib.contextmanager
def engine_behind(
    service: Service,
    *,
    core_command: Sequence[str] = CORE_COMMAND,
    front_end: FrontEnd | None = None,
) -> Generator[ServerContext, None, None]:
    """What the application needs, around an engine that is still to be started.

    Args:
        core_command: what runs an engine's core.
        front_end: this process is one of several, which share cores that run already.
    """
    config, name = service.server, service.names[0]
    observers: list[Observer] = [log_request] if config.enable_log_requests else []
    folder = None if front_end is None else front_end.metrics_folder
    with contextlib.ExitStack() as stack:
        if config.otlp_traces_endpoint is not None:
            observers.append(stack.enter_context(tracing(config.otlp_traces_endpoint, name)))
        engine = AsyncLLM(
            service.engine,
            core_command=core_command,
            front_end=front_end,
            metrics=MetricsRegistry(name, config.metrics_prefix, folder),
            log_stats=not config.disable_log_stats,
            observers=observers,
        )
        template = service.chat_template
        yield ServerContext(engine, config, service.names, service.root, template)


def run_server(
    service: Service,
    listener: socket,
    *,
    core_command: Sequence[str] = CORE_COMMAND,
    front_end: FrontEnd | None = None,
) -> int:
    """Serve until SIGINT or SIGTERM; the exit status: 1 if every engine died.

    Args: those of `engine_behind`.

    Raises:
        ValueError, OSError: settings or files; one line.
        EngineStartError: an engine could not start.
    """
    logging.getLogger("uvicorn.access").addFilter(without_routine)
    with (
        engine_behind(service, core_command=core_command, front_end=front_end) as context,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        return runner.run(_serve(context, listener, greets=not (front_end and front_end.index)))


async def _serve(context: ServerContext, listener: socket, *, greets: bool) -> int:
    engine, loop = context.engine, asyncio.get_running_loop()
    starting = asyncio.create_task(engine.start())
    for number in SIGNALS:
        loop.add_signal_handler(number, starting.cancel)
    try:
        await starting
    except asyncio.CancelledError:
        log.info("stopped before the engine was ready")
        return 0
    server = _Server(context, listener, greets=greets)
    for number in SIGNALS:
        loop.add_signal_handler(number, server.handle_exit, number, None)
    gc.collect()
    gc.freeze()  # what lives for ever is not looked at again: collections stay short
    watching = asyncio.create_task(_end_after(engine, server))
    await server.serve([listener])
    watching.cancel()
    died = engine.dead is not None
    await engine.shutdown()
    return int(died)


class _Server(uvicorn.Server):
    """uvicorn that lets running requests finish for a while, then aborts them politely."""

    def __init__(self, context: ServerContext, listener: socket, *, greets: bool) -> None:
        config = context.config
        self._context, self._engine, self._listener = context, context.engine, listener
        self._greets = greets
        super().__init__(
            uvicorn.Config(
                create_app(context),
                http="httptools",
                ws="none",
                lifespan="off",
                log_config=None,
                log_level=config.uvicorn_log_level,
                access_log=config.enable_log_requests,
                ssl_keyfile=config.ssl_keyfile,
                ssl_certfile=config.ssl_certfile,
                timeout_graceful_shutdown=int(config.shutdown_timeout + ABORT_SECONDS),
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield  # they are handled since before the engine started

    async def startup(self, sockets: list[socket] | None = None) -> None:
        await super().startup(sockets)
        if self._greets:
            _greet(self._context, self._listener)

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        self._end_for_sure()
        draining = asyncio.create_task(self._drain())
        await super().shutdown(sockets)
        draining.cancel()

    def _end_for_sure(self) -> None:
        """End the process even if a thread never returns, say one with a template without end:
        Python waits for them.
        """
        seconds = self._context.config.shutdown_timeout + ABORT_SECONDS + LAST_SECONDS

        def end() -> None:
            log.error("the server does not end within %g s: ended by force", seconds)
            os._exit(1)  # the engine's process ends when it misses this one

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()

    async def _drain(self) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._context.config.shutdown_timeout
        while self._engine.num_requests and loop.time() < deadline:
            await asyncio.sleep(0.05)
        while True:
            self._engine.abort_all()
            await asyncio.sleep(0.1)  # a request may just have passed the tokenizer


async def _end_after(engine: AsyncLLM, server: uvicorn.Server) -> None:
    await engine.wait_dead()
    await asyncio.sleep(LAST_HEALTH_SECONDS)
    server.should_exit = True


def _greet(context: ServerContext, listener: socket) -> None:
    """Say where clients find the server, once they do."""
    engine, config = context.engine, context.config
    if engine.sampling_defaults:
        values = ", ".join(f"{name} {value}" for name, value in engine.sampling_defaults.items())
        log.info(
            "default sampling from the model's generation_config.json: %s "
            "(--generation-config none ignores it)",
            values,
        )
    if config.uds is None and config.host in ("127.0.0.1", "localhost", "::1"):
        log.info("only this machine can connect; --host 0.0.0.0 opens it to others")
    info, count = engine.info, len(engine.replicas)
    engines = f"{count} engines, each with " if count > 1 else ""
    print(
        f"jaxpaged {jaxpaged.__version__} serves {context.model_name} at {url(config, listener)}: "
        f"{engines}"
        f"{info.num_pages} pages of {info.page_size} tokens, up to {info.max_model_len} tokens a "
        f"request, {len(info.buckets)} buckets ({info.buckets[0]} ... {info.buckets[-1]}), "
        f"{info.dtype} on {info.platform}",
        flush=True,
    )


def _with_files(config: EngineConfig) -> EngineConfig:
    """The settings with folders for names. Here, where Ctrl-C still ends a download at once."""
    found = {"revision": config.revision, "download_dir": config.download_dir}
    model = str(resolve_model(config.model, **found))
    tokenizer = config.tokenizer and str(resolve_model(config.tokenizer))
    return dataclasses.replace(config, model=model, tokenizer=tokenizer)


def _read_template(given: str | None) -> str | None:
    """A chat template from a file, or the text itself."""
    if given is None or "{" in given:
        return given
    try:
        return Path(given).read_text("utf-8")
    except OSError as error:
        raise ValueError(f"cannot read the chat template {given!r}: {error.strerror}") from error
