"""Replicas on a local Ray: two of the fake core, which echoes, behind the front and its router."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import socket
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
import yaml
from fake_core import CRASH
from fake_server import FAKE_CORE, eventually
from tiny_tokenizer import write_byte_level

from jaxpaged.config import EngineConfig
from jaxpaged.engine.errors import EngineDeadError
from jaxpaged.server_config import ServerConfig

ray = pytest.importorskip("ray", reason="needs the extra ray")
serve = pytest.importorskip("ray.serve", reason="needs the extra ray")
from ray.serve.schema import ServeDeploySchema  # noqa: E402

from jaxpaged import ray_router, ray_serve  # noqa: E402

CONFIG = Path(__file__).parents[2] / "deploy" / "ray" / "serve_config.yaml"
KEY = "sesame"
PATIENCE = {  # of Ray, whose own is short for a machine of two busy cores
    "PROXY_READY_CHECK_TIMEOUT": 60,
    "PROXY_HEALTH_CHECK_TIMEOUT": 60,
    "QUEUE_LENGTH_RESPONSE_DEADLINE": 2,
    "MAX_QUEUE_LENGTH_RESPONSE_DEADLINE": 10,
}
STEP = 0.08  # seconds: what is to be caught while it runs (200 tokens) runs for 16
WHOLE = {"model": "M", "prompt": [5, 6], "max_tokens": 200, "ignore_eos": True}


class Cluster:
    """A local Ray with two replicas."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.client = openai.OpenAI(base_url=self.url + "/v1", api_key=KEY, max_retries=0)

    def post(self, path: str, **body: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {KEY}"}
        return httpx.post(self.url + path, json=body, headers=headers, timeout=60)

    def by_replica(self, name: str) -> Counter[str]:
        """A metric's value on each replica, summed over its other labels."""
        headers = {"Authorization": f"Bearer {KEY}"}
        text = httpx.get(self.url + "/metrics", headers=headers, timeout=60).text
        found: Counter[str] = Counter()
        for labels, value in re.findall(rf"^jaxpaged:{name}{{(.*)}} (\S+)$", text, re.M):
            found[re.search('replica="(.*?)"', labels)[1]] += float(value)
        return found

    def running(self) -> float:
        """The requests that the replicas compute."""
        return sum(self.by_replica("num_requests_running").values())

    def chat(self, text: str, tokens: int) -> str:
        """A streamed answer of so many tokens."""
        stream = self.client.chat.completions.create(
            model="M", messages=[{"role": "user", "content": text}], stream=True,
            max_tokens=tokens, extra_body={"ignore_eos": True},
        )  # fmt: skip
        chunks = [chunk.choices[0] for chunk in stream]
        assert chunks[-1].finish_reason == "length"
        return "".join(chunk.delta.content or "" for chunk in chunks)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    app = ray_serve.deployed(
        EngineConfig(model=str(write_byte_level(tmp_path_factory.mktemp("served")))),
        ServerConfig(served_model_name=("M",), api_key=(KEY,), max_request_bytes=20_000),
        core_command=(*FAKE_CORE, "--step-seconds", str(STEP)),
        num_replicas=2,
    )
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory("ray") as folder:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex())  # else it is kept in the home folder
        for name, seconds in PATIENCE.items():
            patch.setenv(f"RAY_SERVE_{name}_S", str(seconds))
        ray.init(
            num_cpus=3, num_gpus=2, include_dashboard=False, object_store_memory=100 << 20,
            log_to_driver=False, _temp_dir=folder,
        )  # fmt: skip
        try:
            serve.start(http_options={"port": port})
            serve.run(app, name="app")
            yield Cluster(port)
        finally:
            ray.shutdown()


def names() -> dict[str, str]:
    """Ray's name of each replica's actor, by the replica's."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    found = [re.fullmatch("SERVE_REPLICA::app#Engine#(.*)", actor["name"]) for actor in actors]
    return {match[1]: match[0] for match in found if match}


def test_the_openai_client_streams_through_it_and_errors_are_jaxpageds(cluster: Cluster):
    assert "the quick brown fox" in cluster.chat("the quick brown fox", 8)
    answer = cluster.client.completions.create(model="M", prompt="hello", max_tokens=1)
    assert answer.usage is not None and answer.usage.completion_tokens == 1
    with pytest.raises(openai.NotFoundError, match="there is no model 'X' here; served: 'M'"):
        cluster.client.completions.create(model="X", prompt="hello")
    with pytest.raises(openai.APIStatusError, match="longer than 20000 bytes"):
        cluster.client.completions.create(model="M", prompt="hello" * 5000)
    with pytest.raises(openai.AuthenticationError, match="a valid API key is needed"):
        openai.OpenAI(base_url=cluster.url + "/v1", api_key="no", max_retries=0).models.list()
    assert httpx.get(cluster.url + "/metrics").status_code == 401
    assert httpx.get(cluster.url + "/health").status_code == 200
    assert (
        "/v1/messages"
        in httpx.get(cluster.url + "/openapi.json", headers={"X-Api-Key": KEY}).json()["paths"]
    )


def test_a_prefix_is_sent_where_it_was_before(cluster: Cluster):
    homes = Counter()
    while len(homes) < 2 or homes.total() < 4:  # a new prefix goes to any of the two
        assert homes.total() < 20, homes
        used = set()
        for turn in range(3):
            before = cluster.by_replica("request_success_total")
            prompt = f"{homes.total()} the quick " * 24 + "jumps" * turn
            answer = cluster.post("/v1/completions", model="M", prompt=prompt, max_tokens=1)
            assert answer.status_code == 200, answer.text
            used |= set(cluster.by_replica("request_success_total") - before)
        assert len(used) == 1
        homes.update(used)


def test_a_client_leaves(cluster: Cluster):
    body = WHOLE | {"stream": True}
    key = {"X-Api-Key": KEY}
    url = cluster.url + "/v1/completions"
    with httpx.stream("POST", url, json=body, headers=key) as answer:
        first = next(answer.iter_lines())
        assert answer.status_code == 200 and '"error"' not in first, first
        eventually(lambda: cluster.running() == 1)
    eventually(lambda: cluster.running() == 0, 10)


def test_a_replica_is_killed_under_load(cluster: Cluster):
    """What runs on it gets an error; the rest, and what comes later, get all they asked for."""
    with ThreadPoolExecutor(16) as pool:
        streams = [pool.submit(cluster.chat, "hello world", 200) for _ in range(8)]
        pieces = [pool.submit(cluster.post, "/v1/completions", **WHOLE) for _ in range(4)]
        eventually(lambda: cluster.running() == 12)
        ((victim, load),) = cluster.by_replica("num_requests_running").most_common(1)
        ray.kill(ray.get_actor(names()[victim], namespace="serve"), no_restart=True)
        later = [pool.submit(cluster.chat, "hello world", 5) for _ in range(8)]
        errors = [error for stream in streams if (error := stream.exception()) is not None]
        refused = [piece.result() for piece in pieces if not piece.result().is_success]
    assert 6 <= load < 12 and len(errors) + len(refused) == load
    for error in errors:
        assert isinstance(error, openai.APIError) and ray_serve.DIED in str(error)
    for answer in refused:
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
        assert answer.json()["error"]["message"] == ray_serve.DIED
    assert len({stream.result() for stream in streams if stream.exception() is None}) == 1
    assert len({stream.result() for stream in later}) == 1


def test_an_engine_fails(cluster: Cluster):
    """Its replica ends at once, and the other takes what comes meanwhile."""
    eventually(lambda: len(cluster.by_replica("num_requests_running")) == 2, 60)  # after the kill
    answer = cluster.post("/v1/completions", model="M", prompt=[5, CRASH], max_tokens=3)
    assert answer.status_code == 503
    assert answer.json()["error"]["message"].startswith("the engine core failed: boom")
    for _ in range(20):
        assert cluster.post("/v1/completions", model="M", prompt=[5], max_tokens=1).is_success
        time.sleep(0.05)


def test_what_runs_gets_to_finish_when_the_application_is_taken_down(cluster: Cluster):
    with ThreadPoolExecutor() as pool:
        stream = pool.submit(cluster.chat, "hello world", 100)
        eventually(lambda: cluster.running() == 1)
        serve.delete("app")
    assert "hello world" in stream.result()


def scope(path: str) -> dict[str, Any]:
    headers = [(b"content-type", b"application/json")]
    return {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
        "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"",
        "root_path": "", "headers": headers, "client": ("127.0.0.1", 1), "server": ("here", 80),
    }  # fmt: skip


class Replica(ray_serve.Engine):
    """One that Ray does not know."""

    def __del__(self) -> None:
        """Nobody would await that of a replica."""


def test_a_replica_whose_engine_died_is_ill_and_begins_nothing():
    async def check() -> None:
        replica = object.__new__(Replica)
        await replica.__init__(EngineConfig(skip_tokenizer_init=True), ServerConfig(), FAKE_CORE)
        replica._ending.cancel()  # it would end this process
        await replica.check_health()
        body = json.dumps({"model": "demo", "prompt": [5, CRASH]}).encode()
        request = (scope("/v1/completions"), body, [])
        start, *_ = [message async for batch in replica.answer(*request) for message in batch]
        assert start["status"] == 503
        with pytest.raises(EngineDeadError, match="boom"):
            await replica.check_health()
        with pytest.raises(EngineDeadError, match="boom"):
            await anext(replica.answer(*request))
        await ray_serve.Engine.__del__(replica)

    asyncio.run(check())


@pytest.mark.parametrize(
    ("path", "last"),
    [("/v1/completions", b'data: {"error":{'), ("/v1/messages", b'event: error\ndata: {"type"')],
)
def test_a_stream_that_a_replica_leaves_ends_with_an_error(path: str, last: bytes):
    def relay(kind: bytes) -> list[dict[str, Any]]:
        start = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]}
        piece = {"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True}
        sent: list[dict[str, Any]] = []

        async def rest() -> AsyncIterator[list[dict[str, Any]]]:
            yield [piece]
            raise ray.exceptions.ActorDiedError

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        asyncio.run(ray_serve._Relay(scope(path), [start], rest())({}, send, send))
        assert sent[:2] == [start, piece]
        return sent[2:]

    (end,) = relay(b"text/event-stream; charset=utf-8")
    assert end["body"].startswith(last) and ray_serve.DIED.encode() in end["body"]
    assert not end.get("more_body")
    with pytest.raises(ray.exceptions.ActorDiedError):  # the client sees a connection cut off
        relay(b"application/json")


class Routing:
    """The router with replicas that are names, and no Ray around it."""

    def __init__(self, slack: int) -> None:
        self.router = object.__new__(ray_router.PrefixRouter)
        self.router._use_replica_queue_len_cache = False  # of Ray's
        self.router.initialize_state(slack=slack)

    def send(self, to: str, keys: Sequence[int] = ()) -> None:
        self.router.on_send_request(to)
        self.router.on_request_routed(SimpleNamespace(args=({}, b"", keys)), to, None)

    def end(self, at: str) -> None:
        self.router.on_request_completed(at, "id")

    def preferred(self, keys: list[int], *replicas: str) -> str | None:
        """The replica that is asked before any two are, if there is one."""
        request = SimpleNamespace(args=({}, b"", keys), routing_context=SimpleNamespace())
        candidates = [SimpleNamespace(replica_id=name) for name in replicas]
        *first, two = asyncio.run(self.router.choose_replicas(candidates, request))
        assert len(two) == min(2, len(replicas)) and request.routing_context.should_backoff
        return first[0][0].replica_id if first else None


def test_the_router_prefers_the_longest_prefix_within_its_slack():
    routing = Routing(slack=2)
    routing.send("a", [1, 2])
    routing.send("b", [1, 2, 3])
    assert routing.preferred([1, 2, 3, 4], "a", "b", "c") == "b"
    assert routing.preferred([1, 2, 3, 4], "a", "c") is None  # b was sent all of it later
    routing.send("a", [1, 5])
    assert routing.preferred([1, 5], "a", "b") == "a"
    assert routing.preferred([1, 2, 3], "a", "b") == "b"
    assert routing.preferred([6, 2, 3], "a", "b") is None
    assert routing.preferred([1, 5], "a", "b", "c") is None  # a has two, c has none
    routing.end("a")
    assert routing.preferred([1, 5], "a", "b", "c") == "a"
    routing.end("a")
    routing.end("b")
    assert not routing.router._running  # nothing is kept of replicas without requests


def test_prefixes_follow_the_prompt_alone():
    def keys(**body: Any) -> list[int]:
        return ray_router.prefixes(json.dumps(body).encode())

    said = [{"role": "user", "content": "The king is dead. " * 40}]
    first = keys(model="M", messages=said, temperature=1)
    then = keys(messages=[*said, {"role": "assistant", "content": "Long " * 99}], stream=True)
    assert len(first) == 2 and len(then) > 3 and then[:2] == first
    assert keys(messages=said, tools=[{"name": "f"}])[0] != first[0]
    assert keys(messages=said, cache_salt="mine")[0] != first[0]
    assert keys(prompt="short") == ray_router.prefixes(b"no JSON") == ray_router.prefixes(b"") == []
    assert len(keys(prompt="x" * 10**6)) == ray_router.LONGEST


def test_the_config_that_the_documents_name_fits(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAXPAGED_API_KEY", KEY)
    config = ServeDeploySchema.model_validate(yaml.safe_load(CONFIG.read_text()))
    (app,) = config.applications
    assert app.import_path == "jaxpaged.ray_serve:application"
    front = ray_serve.application(app.args)._bound_deployment
    engine = front.init_args[0]._bound_deployment
    assert {d.name for d in app.deployments} == {front.name, engine.name}
    engine_config, server_config, _ = engine.init_args
    assert (engine_config.model, server_config.api_key) == (app.args["model"], (KEY,))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"port": 80}, "port is set in http_options of the Serve config"),
        ({"enable-admin": True}, "enable_admin is for one server"),
        ({"num_hosts": 2}, "num_hosts is for `jaxpaged serve`: a replica lies on one machine"),
        ({"modle": "x"}, "jaxpaged serve has no such flags: modle"),
        ({"block-size": 17}, "block_size"),
        ({"max_num_seqs": "many"}, "^max_num_seqs: Input should be a valid integer"),
        ({"api_key": "secret"}, "^api_key: Input should be a valid tuple$"),
    ],
)
def test_flags_that_do_not_fit(settings: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        ray_serve.application(settings)


def test_a_replica_is_one_engine_on_one_machine():
    for settings in (
        {"data_parallel_size": 2},
        {"num_hosts": 2, "tensor_parallel_size": 2, "distributed_coordinator": "10.0.0.1:9100"},
    ):
        name = next(iter(settings))
        with pytest.raises(ValueError, match=f"^{name} "):
            ray_serve.deployed(EngineConfig(**settings), ServerConfig())


def test_each_replica_asks_for_the_gpus_of_its_engine():
    front = ray_serve.application(
        {"tensor-parallel-size": 4, "pipeline_parallel_size": 2}
    )._bound_deployment
    engine = front.init_args[0]._bound_deployment
    assert engine.ray_actor_options["num_gpus"] == 8
