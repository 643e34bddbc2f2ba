"""One server for most tests: the fake core, which echoes the prompt, and a tiny tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from fake_server import Server, running
from tiny_tokenizer import write_byte_level


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_level(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="session")
def server(model_folder: Path) -> Iterator[Server]:
    flags = (
        "--served-model-name", "M", "also", "--enable-prompt-tokens-details",
        "--trust-request-chat-template",
    )  # fmt: skip
    with running(str(model_folder), *flags) as running_server:
        yield running_server


@pytest.fixture(scope="session")
def slow_server() -> Iterator[Server]:
    """50 tokens a second, one request at a time, two in the queue; token ids only."""
    flags = ("--skip-tokenizer-init", "--max-num-seqs", "1", "--max-num-queued-reqs", "2")
    with running(*flags, core="--step-seconds 0.02") as running_server:
        yield running_server


@pytest.fixture(scope="session")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(autouse=True)
def still_serving(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test of the shared server, it answers a plain request."""
    yield
    if "server" in request.fixturenames or "client" in request.fixturenames:
        shared: Server = request.getfixturevalue("server")
        answer = shared.post("/v1/completions", prompt="ok", max_tokens=5, temperature=0)
        assert answer.status_code == 200, answer.text
