"""Replicas over a cluster: the application of `jaxpaged serve` as one of Ray Serve.

    serve run deploy/ray/serve_config.yaml

Each replica of `Engine` is a whole server: an engine in a process of its own, and every route
around it. Ray's proxy would choose a replica before it has read the body, without knowing the
prompt: so `Front` reads the body and hands the request on, and `PrefixRouter` chooses by it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import TypeAdapter, ValidationError
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from jaxpaged.cli import API_KEY_VARIABLE
from jaxpaged.config import EngineConfig
from jaxpaged.engine.core_fleet import CORE_COMMAND
from jaxpaged.engine.errors import EngineDeadError
from jaxpaged.ray_router import PrefixRouter, prefixes
from jaxpaged.server import errors
from jaxpaged.server.app import create_app, guard
from jaxpaged.server.run import engine_behind, prepare
from jaxpaged.server.streaming import event, failure
from jaxpaged.server_config import ServerConfig

log = logging.getLogger(__name__)

# Of a request's scope: what stands in it when a server of HTTP has made it.
SCOPE = (
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string"),
    *("root_path", "headers", "client", "server"),
)
METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
NOT_HERE = {  # settings of a server that replicas cannot have
    **dict.fromkeys(
        ("host", "port", "uds", "ssl_keyfile", "ssl_certfile"),
        "is set in http_options of the Serve config",
    ),
    "shutdown_timeout": "is set as graceful_shutdown_timeout_s of the deployment Engine",
    "data_parallel_size": "is Ray's to set: num_replicas of Engine",
    "num_hosts": "is for `jaxpaged serve`: a replica lies on one machine",
    "api_server_count": "is Ray's to set: num_replicas of Front",
    "enable_admin": "is for one server: its routes would reach one replica of many",
}
ANY_NUMBER = 1_000_000  # of requests at a time: the engine schedules and bounds them
LAST_SECONDS = 0.5  # for the last answers of an engine that died, before its replica ends
RETRY_SECONDS = 0.1  # until a request that a dying replica turned away is sent to another
FULL = "too many requests wait for a replica; send it again later"
DIED = "the replica that answered this request died; send it again"


def application(settings: dict[str, Any]) -> serve.Application:
    """The application that a Serve config names as `jaxpaged.ray_serve:application`.

    Args:
        settings: the flags of `jaxpaged serve` without dashes in front.

    Raises:
        ValueError: a flag that is unknown, does not fit, or that is Ray's to set.
    """
    given = {name.replace("-", "_"): value for name, value in settings.items()}
    for name, reason in NOT_HERE.items():
        if name in given:
            raise ValueError(f"{name} {reason}")
    known = {
        kind: {field.name for field in dataclasses.fields(kind)}
        for kind in (EngineConfig, ServerConfig)
    }
    if unknown := sorted(given.keys() - set.union(*known.values())):
        raise ValueError(f"jaxpaged serve has no such flags: {', '.join(unknown)}")
    if not given.get("api_key") and API_KEY_VARIABLE in os.environ:
        given["api_key"] = (os.environ[API_KEY_VARIABLE],)
    engine_given, server_given = (
        {name: value for name, value in given.items() if name in names} for names in known.values()
    )
    try:
        engine_config = TypeAdapter(EngineConfig).validate_python(engine_given)
        config = TypeAdapter(ServerConfig).validate_python(server_given)
    except ValidationError as error:  # its own words would quote what was given, say a key
        places = [(".".join(map(str, found["loc"])), found["msg"]) for found in error.errors()]
        raise ValueError("; ".join(": ".join(filter(None, place)) for place in places)) from None
    return deployed(engine_config, config)


def deployed(
    engine_config: EngineConfig,
    config: ServerConfig,
    *,
    core_command: Sequence[str] = CORE_COMMAND,
    **options: Any,
) -> serve.Application:
    """The same from Python, for `serve.run`.

    Args:
        options: Ray's for the deployment `Engine`, over those that are set here.

    Raises:
        ValueError: several engines or hosts are set.
    """
    for name in ("data_parallel_size", "num_hosts"):
        if getattr(engine_config, name) > 1:
            raise ValueError(f"{name} {NOT_HERE[name]}")
    gpus = engine_config.num_devices
    quiet = {"enable_access_log": False}  # jaxpaged has its own: --enable-log-requests
    engine = serve.deployment(Engine, name="Engine").options(
        **{
            "ray_actor_options": {"num_cpus": 1, "num_gpus": gpus},
            "max_ongoing_requests": ANY_NUMBER,
            "request_router_config": RequestRouterConfig(request_router_class=PrefixRouter),
            "health_check_period_s": 2,
            "graceful_shutdown_timeout_s": 60,
            "logging_config": quiet,
            **options,
        }
    )
    front = serve.deployment(
        serve.ingress()(Front),
        name="Front",
        max_ongoing_requests=ANY_NUMBER,
        graceful_shutdown_timeout_s=60,
        logging_config=quiet,
    )
    return front.bind(engine.bind(engine_config, config, core_command), config)


class Engine:
    """A replica: an engine and the application of `jaxpaged serve` around it."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, engine_config: EngineConfig, config: ServerConfig, core_command: Sequence[str]
    ) -> None:
        logging.basicConfig(level=logging.INFO)
        inner = dataclasses.replace(  # the front has seen to these
            config, api_key=(), rate_limit=None, max_concurrent_requests=None, allowed_origins=()
        )
        self._stack = contextlib.ExitStack()
        context = self._stack.enter_context(
            engine_behind(prepare(engine_config, inner), core_command=core_command)
        )
        self._engine = context.engine
        await self._engine.start()
        self._app = create_app(context)
        self._ending = asyncio.create_task(self._end_when_dead())

    async def answer(
        self, scope: Scope, body: bytes, keys: list[int]
    ) -> AsyncGenerator[list[Message], None]:
        """What the application sends, as it comes.

        Args:
            keys: the prompt's prefixes, which tell the router on the way where this belongs.

        Raises:
            EngineDeadError: nothing was begun, and another replica may do it.
        """
        if self._engine.dead is not None:
            raise self._engine.dead
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        request: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        gone = asyncio.Event()

        async def receive() -> Message:
            if request:
                return request.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        working = asyncio.create_task(self._app(scope, receive, messages.put))
        working.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            ended = False
            while not ended:
                batch = [await messages.get()]
                while not messages.empty():
                    batch.append(messages.get_nowait())
                ended = batch[-1] is None
                if found := [message for message in batch if message is not None]:
                    yield found
        finally:  # also when Ray cancels this because the client left
            gone.set()
            await asyncio.wait({working})
            if (error := working.exception()) is not None:
                log.error("a request failed", exc_info=error)

    async def metrics(self) -> tuple[str, str]:
        """The replica's name and its metrics for Prometheus."""
        return (
            serve.get_replica_context().replica_id.unique_id,
            self._engine.metrics.text().decode(),
        )

    async def check_health(self) -> None:
        """Called by Ray, which starts another replica when this raises."""
        if self._engine.dead is not None:
            raise self._engine.dead

    async def __del__(self) -> None:
        """Called by Ray when the replica has nothing more to do."""
        self._ending.cancel()
        await self._engine.shutdown()
        self._stack.close()

    async def _end_when_dead(self) -> None:
        """Ray would leave a replica that fails every request at once its share, the largest, until
        it has failed some health checks.
        """
        await self._engine.wait_dead()
        await asyncio.sleep(LAST_SECONDS)
        os._exit(1)


class _Relay(Response):
    """An answer as a replica gives it.

    Args:
        first: messages that are there already.
        rest: those to come.
    """

    def __init__(
        self, scope: Scope, first: list[Message], rest: AsyncIterator[list[Message]]
    ) -> None:
        self._path, self._first, self._rest = errors.route_path(scope), first, rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """If the replica dies: a stream of events ends with an error, anything else is cut off."""
        for message in self._first:
            await send(message)
        try:
            async for batch in self._rest:
                for message in batch:
                    await send(message)
        except (RayError, RayServeException) as error:
            kind = Headers(raw=self._first[0]["headers"]).get("content-type", "")
            if not kind.startswith("text/event-stream"):
                raise
            log.warning("%s", error)
            await send({"type": "http.response.body", "body": self._last_words().encode()})

    def _last_words(self) -> str:
        if self._path.startswith(errors.ANTHROPIC_PATH):
            return event(errors.anthropic_error_body(503, DIED), "error")
        return failure(503, DIED, None)


class _Merged:
    """Metrics of several replicas, as a registry gives them."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = texts

    def collect(self) -> Iterator[Metric]:
        """Each family once, with a label `replica` more on each sample."""
        families: dict[str, Metric] = {}
        for replica, text in self._texts.items():
            for family in text_string_to_metric_families(text):
                merged = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                merged.samples += [
                    sample._replace(labels={**sample.labels, "replica": replica})
                    for sample in family.samples
                ]
        yield from families.values()


class Front:
    """Keys, limits and sizes; then hands each request on to a replica."""

    def __init__(self, engines: DeploymentHandle, config: ServerConfig) -> None:
        self._engines = engines
        self._answers = engines.options(method_name="answer", stream=True)
        self._config = dataclasses.replace(
            config, enable_request_id_headers=False, otlp_traces_endpoint=None
        )

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Ray for what answers HTTP requests."""
        app = FastAPI(openapi_url=None, root_path=self._config.root_path)
        errors.install(app)
        guard(app, self._config)
        app.add_route("/metrics", self.metrics)
        app.add_route("/{path:path}", self.hand_on, METHODS)
        return app

    async def hand_on(self, request: Request) -> Response:
        """What a replica answers. 503 if it dies before it has said anything."""
        scope = {name: request.scope[name] for name in SCOPE if name in request.scope}
        body = await request.body()
        keys = prefixes(body)
        while True:
            answer = self._answers.remote(scope, body, keys)
            try:
                return _Relay(scope, await anext(answer), answer)
            except EngineDeadError:
                await asyncio.sleep(RETRY_SECONDS)
            except (RayError, RayServeException) as error:
                log.warning("%s", error)
                message = FULL if isinstance(error, BackPressureError) else DIED
                return errors.error_response(503, message, scope=scope)

    async def metrics(self, request: Request) -> Response:
        """Those of every replica, by a label `replica`."""
        answers = await self._engines.broadcast("metrics").results_async(return_exceptions=True)
        merged = _Merged({a[0]: a[1] for a in answers if not isinstance(a, BaseException)})
        return Response(generate_latest(merged), media_type=CONTENT_TYPE_LATEST)
