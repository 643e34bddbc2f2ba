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
import random
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from cachetools import LRUCache
from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import TypeAdapter
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from jaxpaged.cli import API_KEY_VARIABLE
from jaxpaged.config import EngineConfig
from jaxpaged.engine.core_client import CORE_COMMAND
from jaxpaged.engine.errors import EngineDeadError
from jaxpaged.server import errors
from jaxpaged.server.app import create_app, guard
from jaxpaged.server.run import prepared
from jaxpaged.server.streaming import event, failure
from jaxpaged.server_config import ServerConfig

log = logging.getLogger(__name__)

# Of a request's scope: what stands in it when a server of HTTP has made it.
SCOPE = (
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string"),
    *("root_path", "headers", "client", "server"),
)
METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
RAYS_OWN = {  # settings of a server that have another place on a cluster
    "host": "http_options of the Serve config",
    "port": "http_options of the Serve config",
    "uds": "http_options of the Serve config",
    "ssl_keyfile": "http_options of the Serve config",
    "ssl_certfile": "http_options of the Serve config",
    "shutdown_timeout": "graceful_shutdown_timeout_s of the deployment Engine",
    "enable_admin": "no place: its routes would reach one replica of many",
}
ANY_NUMBER = 1_000_000  # of requests at a time: the engine schedules and bounds them
LAST_SECONDS = 0.5  # for the last answers of an engine that died, before its replica ends
RETRY_SECONDS = 0.1  # until a request that a dying replica turned away is sent to another
DIED = "the replica that answered this request died; send it again"
BLOCK = 256  # bytes of a prompt that are remembered as one
LONGEST = 256  # blocks of a prompt that are looked at
MAX_BLOCKS = 200_000  # that are remembered, those of the latest prompts


def application(settings: dict[str, Any]) -> serve.Application:
    """The application that a Serve config names as `jaxpaged.ray_serve:application`.

    Args:
        settings: the flags of `jaxpaged serve` without dashes in front.

    Raises:
        ValueError: a flag that is unknown, does not fit, or that is Ray's to set.
    """
    given = {name.replace("-", "_"): value for name, value in settings.items()}
    for name, place in RAYS_OWN.items():
        if name in given:
            raise ValueError(
                f"{name} has {place if place[:2] == 'no' else 'its place in ' + place}"
            )
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
    return deployed(
        TypeAdapter(EngineConfig).validate_python(engine_given),
        TypeAdapter(ServerConfig).validate_python(server_given),
    )


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
    """
    quiet = {"enable_access_log": False}  # jaxpaged has its own: --enable-log-requests
    engine = serve.deployment(Engine, name="Engine").options(
        **{
            "ray_actor_options": {"num_cpus": 1, "num_gpus": engine_config.tensor_parallel_size},
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


class _Prompt(msgspec.Struct):
    """What a prompt is made of, in the order of its tokens, as the client spelled it."""

    cache_salt: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()


def prefixes(body: bytes) -> list[int]:
    """A hash of each prefix of a request's prompt that ends with a block, the shortest first."""
    try:
        prompt = msgspec.json.decode(body, type=_Prompt)
    except msgspec.DecodeError:
        return []
    text = b"".join(bytes(part) for part in msgspec.structs.astuple(prompt))
    found = [0]
    for start in range(0, min(len(text), BLOCK * LONGEST) - BLOCK + 1, BLOCK):
        found.append(hash((found[-1], text[start : start + BLOCK])))
    return found[1:]


class PrefixRouter(RequestRouter):
    """Prefers the replica that the longest prefix of the prompt was sent to last.

    Unless it has `slack` requests more than the idlest replica: then, as for a prompt without a
    known prefix, the idler of any two.
    """

    # Ray's 0.1 would give a prefix away when its replica is busy with a long text for a moment.
    queue_len_response_deadline_s = 1.0

    def initialize_state(self, slack: int = 8) -> None:
        """Called by Ray with the router's settings."""
        self._slack = slack
        self._homes: LRUCache[int, ReplicaID] = LRUCache(MAX_BLOCKS)
        self._running: Counter[ReplicaID] = Counter()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Ranks of replicas; of a rank Ray takes the idlest that has room."""
        any_two = random.sample(candidate_replicas, min(2, len(candidate_replicas)))
        if pending_request is None:
            return [any_two]
        pending_request.routing_context.should_backoff = True  # if all of them are full
        idlest = min(self._running[replica.replica_id] for replica in candidate_replicas)
        home = self._home(candidate_replicas, pending_request.args[-1])
        if home is None or self._running[home.replica_id] - idlest >= self._slack:
            return [any_two]
        return [[home], any_two]

    def _home(self, candidates: list[RunningReplica], keys: list[int]) -> RunningReplica | None:
        by_id = {replica.replica_id: replica for replica in candidates}
        found = None
        for key in keys:
            owner = self._homes.get(key)
            if owner is None:
                break
            found = by_id.get(owner, found)
        return found

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Called by Ray when the replica has taken the request."""
        for key in pending_request.args[-1]:
            self._homes[key] = replica_id

    def on_send_request(self, replica_id: ReplicaID) -> None:
        """Called by Ray for everything sent to a replica."""
        super().on_send_request(replica_id)
        self._running[replica_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Called by Ray when it has ended, in whatever way."""
        self._running[replica_id] -= 1
        if self._running[replica_id] <= 0:
            del self._running[replica_id]


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
        context = self._stack.enter_context(prepared(engine_config, inner, core_command))
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
                return errors.error_response(503, DIED, scope=scope)

    async def metrics(self, request: Request) -> Response:
        """Those of every replica, by a label `replica`."""
        answers = await self._engines.broadcast("metrics").results_async(return_exceptions=True)
        merged = _Merged({a[0]: a[1] for a in answers if not isinstance(a, BaseException)})
        return Response(generate_latest(merged), media_type=CONTENT_TYPE_LATEST)
