"""Runs a server: engine first, then HTTP, until a signal or the engine's death."""

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

import uvicorn
import uvloop

import jaxpaged
from jaxpaged.config import EngineConfig
from jaxpaged.engine.async_llm import AsyncLLM, Observer
from jaxpaged.engine.core_client import CORE_COMMAND
from jaxpaged.model_files import resolve_model
from jaxpaged.server.address import bind, url
from jaxpaged.server.app import create_app
from jaxpaged.server.context import ServerContext
from jaxpaged.server.request_log import log_request, without_routine
from jaxpaged.server.tracing import tracing
from jaxpaged.server_config import ServerConfig

log = logging.getLogger(__name__)

DEMO_NAME = "demo"
LAST_HEALTH_SECONDS = 2.0  # how long /health says 503 before a server without engine ends
ABORT_SECONDS = 10.0  # for the last answers to be sent after their requests were aborted
LAST_SECONDS = 12.0  # for the engine to end and threads to return, after which the process ends
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def serve(
    engine_config: EngineConfig,
    config: ServerConfig,
    *,
    core_command: Sequence[str] = CORE_COMMAND,
) -> int:
    """Serve until SIGINT or SIGTERM; the exit status: 1 if the engine died.

    Args:
        core_command: what runs the engine's core.

    Raises:
        ValueError, OSError: settings, files or the address; one line.
        EngineStartError: the engine could not start.
    """
    if config.ssl_certfile is not None:  # tells now, not once the model is loaded
        ssl.create_default_context().load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    logging.getLogger("uvicorn.access").addFilter(without_routine)
    with contextlib.ExitStack() as stack:
        context = stack.enter_context(prepared(engine_config, config, core_command))
        listener = stack.enter_context(bind(config))
        runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        return runner.run(_serve(context, listener))


@contextlib.contextmanager
def prepared(
    engine_config: EngineConfig, config: ServerConfig, core_command: Sequence[str] = CORE_COMMAND
) -> Generator[ServerContext, None, None]:
    """What the application needs, around an engine that is still to be started.

    Raises:
        ValueError, OSError: settings or files; one line.
    """
    template = _read_template(config.chat_template)
    root = engine_config.model or DEMO_NAME
    names = config.served_model_name or (root,)
    observers: list[Observer] = [log_request] if config.enable_log_requests else []
    with contextlib.ExitStack() as stack:
        if config.otlp_traces_endpoint is not None:
            observers.append(stack.enter_context(tracing(config.otlp_traces_endpoint, names[0])))
        engine = AsyncLLM(
            _with_files(engine_config),
            core_command=core_command,
            model_name=names[0],
            metrics_prefix=config.metrics_prefix,
            log_stats=not config.disable_log_stats,
            observers=observers,
        )
        yield ServerContext(engine, config, names, root, template)


async def _serve(context: ServerContext, listener: socket) -> int:
    engine, loop = context.engine, asyncio.get_running_loop()
    starting = asyncio.create_task(engine.start())
    for number in SIGNALS:
        loop.add_signal_handler(number, starting.cancel)
    try:
        await starting
    except asyncio.CancelledError:
        log.info("stopped before the engine was ready")
        return 0
    server = _Server(context, listener)
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

    def __init__(self, context: ServerContext, listener: socket) -> None:
        config = context.config
        self._context, self._engine, self._listener = context, context.engine, listener
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
    info = engine.info
    print(
        f"jaxpaged {jaxpaged.__version__} serves {context.model_name} at {url(config, listener)}: "
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
