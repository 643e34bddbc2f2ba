"""Replicas on a local Ray: two of the fake core, which echoes, behind the front and its router."""

from __future__ import annotations

import json
import re
import secrets
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
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
from jaxpaged.server_config import ServerConfig

ray = pytest.importorskip("ray", reason="needs the extra ray")
serve = pytest.importorskip("ray.serve", reason="needs the extra ray")
ray_serve = pytest.importorskip("jaxpaged.ray_serve", reason="needs the extra ray")

CONFIG = Path(__file__).parents[2] / "deploy" / "ray" / "serve_config.yaml"
KEY = "sesame"
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
            found[re.search('replica="(.*?)"', labels)[1]] += float(value)  # type: ignore[index]
        return found

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
        ServerConfig(served_model_name=("M",), api_key=(KEY,)),
        core_command=(*FAKE_CORE, "--step-seconds", "0.02"),
        num_replicas=2,
    )
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory("ray") as folder:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex())  # else it is kept in the home folder
        ray.init(
            num_cpus=4, num_gpus=3, include_dashboard=False, object_store_memory=100 << 20,
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
    with pytest.raises(openai.AuthenticationError, match="a valid API key is needed"):
        openai.OpenAI(base_url=cluster.url + "/v1", api_key="no", max_retries=0).models.list()
    assert httpx.get(cluster.url + "/metrics").status_code == 401
    assert httpx.get(cluster.url + "/health").status_code == 200
    assert (
        "/v1/messages"
        in httpx.get(cluster.url + "/openapi.json", headers={"X-Api-Key": KEY}).json()["paths"]
    )


def test_a_prefix_is_sent_where_it_was_before(cluster: Cluster):
    homes = set()
    for family in ("lazy dog", "brown fox", "Alpha Beta", "Gamma Delta", "Eta Theta"):
        used = set()
        for turn in range(3):
            before = cluster.by_replica("request_success_total")
            body = {"prompt": f"{family} the quick " * 24 + "jumps" * turn, "max_tokens": 1}
            assert cluster.post("/v1/completions", model="M", **body).status_code == 200
            used |= set(cluster.by_replica("request_success_total") - before)
        assert len(used) == 1, family
        homes |= used
    assert len(homes) == 2  # by chance one time in 16 were it not for


def test_a_client_leaves(cluster: Cluster):
    body = WHOLE | {"stream": True}
    key = {"X-Api-Key": KEY}
    url = cluster.url + "/v1/completions"
    with httpx.stream("POST", url, json=body, headers=key) as answer:
        next(answer.iter_lines())
        assert sum(cluster.by_replica("num_requests_running").values()) == 1
    eventually(lambda: sum(cluster.by_replica("num_requests_running").values()) == 0)


def test_a_replica_is_killed_under_load(cluster: Cluster):
    """What runs on it gets an error; the rest, and what comes later, get all they asked for."""
    with ThreadPoolExecutor(16) as pool:
        streams = [pool.submit(cluster.chat, "hello world", 200) for _ in range(8)]
        pieces = [pool.submit(cluster.post, "/v1/completions", **WHOLE) for _ in range(4)]
        half = {replica: 6 for replica in names()}
        eventually(lambda: cluster.by_replica("num_requests_running") == half)
        ray.kill(ray.get_actor(next(iter(names().values())), namespace="serve"), no_restart=True)
        later = [pool.submit(cluster.chat, "hello world", 5) for _ in range(8)]
        errors = [error for stream in streams if (error := stream.exception()) is not None]
        refused = [piece.result() for piece in pieces if not piece.result().is_success]
    assert len(errors) + len(refused) == 6
    for error in errors:
        assert isinstance(error, openai.APIError) and ray_serve.DIED in str(error)
    for answer in refused:
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
        assert answer.json()["error"]["message"] == ray_serve.DIED
    assert len({stream.result() for stream in streams if stream.exception() is None}) == 1
    assert len({stream.result() for stream in later}) == 1
    eventually(lambda: len(cluster.by_replica("num_requests_running")) == 2, 60)


def test_an_engine_fails(cluster: Cluster):
    """Its replica ends at once, and another takes what comes meanwhile."""
    answer = cluster.post("/v1/completions", model="M", prompt=[5, CRASH], max_tokens=3)
    assert answer.status_code == 503
    assert answer.json()["error"]["message"].startswith("the engine core failed: boom")
    for _ in range(20):
        assert cluster.post("/v1/completions", model="M", prompt=[5], max_tokens=1).is_success
        time.sleep(0.05)
    eventually(lambda: len(cluster.by_replica("num_requests_running")) == 2, 60)


def test_what_runs_gets_to_finish_when_the_application_is_taken_down(cluster: Cluster):
    with ThreadPoolExecutor() as pool:
        stream = pool.submit(cluster.chat, "hello world", 100)
        eventually(lambda: sum(cluster.by_replica("num_requests_running").values()) == 1)
        serve.delete("app")
    assert "hello world" in stream.result()


class Replica(SimpleNamespace):
    """As much of Ray's as the router looks at."""


def test_the_router_looks_at_prefix_and_load():
    chosen: list[list[str]] = []


def test_the_config_that_the_documents_name_fits():
    (app,) = yaml.safe_load(CONFIG.read_text())["applications"]
    built = ray_serve.application(app["args"])
    assert built is not None
