"""A server from start to end: addresses, signals, failures."""

from __future__ import annotations

import dataclasses
import signal
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from fake_server import children, eventually, launch, running

from jaxpaged.server.address import bind
from jaxpaged.server_config import ServerConfig

FAST = ("--skip-tokenizer-init",)
LONG = {"prompt": [5, 6], "max_tokens": 50, "ignore_eos": True}


def refused(*flags: str, core: str = "") -> tuple[int, str]:
    """Exit status and message of a server that does not start."""
    process = launch(*FAST, *flags, core=core)
    _, log = process.communicate(timeout=30)
    lines = [line for line in log.splitlines() if " INFO " not in line]
    assert len(lines) == 1, log
    return process.returncode, lines[0]


def test_the_greeting_names_url_model_pages_and_buckets(tmp_path: Path):
    process = launch(*FAST, "--port", "0", "--served-model-name", "M")
    assert process.stdout is not None
    line = process.stdout.readline()
    for word in ("M at http://127.0.0.1:", "64 pages of 16", "2 buckets", "decode 1x1"):
        assert word in line
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=30)
    assert (rest, process.returncode) == ("", 0)


def test_the_models_own_sampling_is_used_and_told(tmp_path: Path):
    config = tmp_path / "generation_config.json"
    config.write_text('{"temperature": 0.25, "max_new_tokens": 3}')
    for flags, made in (((), 3), (("--generation-config", "none"), 16)):
        with running(str(tmp_path), *FAST, *flags) as server:
            answer = server.post("/v1/completions", prompt=[5, 6]).json()
            assert answer["usage"]["completion_tokens"] == made
            told = any("temperature 0.25" in line for line in server.lines)
            assert told == (not flags)


def test_a_unix_socket(tmp_path: Path):
    path = tmp_path / "server.sock"
    process = launch(*FAST, "--uds", str(path))
    assert process.stdout is not None
    assert str(path) in process.stdout.readline()
    transport = httpx.HTTPTransport(uds=str(path))
    with httpx.Client(transport=transport, base_url="http://server") as client:
        assert client.get("/health").status_code == 200
    assert refused("--uds", str(path))[0] == 2
    process.terminate()
    assert process.wait(30) == 0
    assert not path.exists()


def test_a_port_in_use_is_told_at_once():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        code, message = refused("--port", port)
    assert (code, f"127.0.0.1:{port}" in message) == (2, True)


@pytest.mark.parametrize("count", [1, 2])
def test_an_address_is_taken_before_its_server_listens(count: int, tmp_path: Path):
    free = ServerConfig(port=0, api_server_count=count)
    with bind(free) as listeners:
        port = listeners[0].getsockname()[1]
        with pytest.raises(OSError, match=f":{port}: Address already in use"):
            bind(dataclasses.replace(free, port=port)).__enter__()
    path = ServerConfig(uds=str(tmp_path / "socket"), api_server_count=count)
    with bind(path), pytest.raises(OSError, match="already in use"):
        bind(path).__enter__()
    with bind(path), bind(dataclasses.replace(free, port=port)):
        pass


def test_an_engine_that_cannot_start():
    code, message = refused("--port", "0", core="--refuse no-room-for-pages")
    assert (code, message) == (1, "jaxpaged: no-room-for-pages")


def test_a_missing_model_is_told():
    code, message = refused("/no/such/model")
    assert (code, "/no/such/model" in message) == (2, True)


def test_a_missing_certificate_and_template_are_told():
    code, message = refused("--ssl-keyfile", "/no/key", "--ssl-certfile", "/no/cert")
    assert code == 2
    code, message = refused("--chat-template", "/no/template")
    assert (code, "/no/template" in message) == (2, True)


def test_tls(tmp_path: Path):
    key, certificate = str(tmp_path / "key"), str(tmp_path / "certificate")
    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"]
        + ["-keyout", key, "-out", certificate],
        capture_output=True,
    )
    if made.returncode:
        pytest.skip("no openssl to make a certificate with")
    with running(*FAST, "--ssl-keyfile", key, "--ssl-certfile", certificate) as server:
        assert server.url.startswith("https://")
        assert httpx.get(server.url + "/health", verify=False).status_code == 200


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_abort_what_runs(number: signal.Signals):
    with running(*FAST, core="--step-seconds 0.05") as server, ThreadPoolExecutor() as pool:
        answer = pool.submit(server.post, "/v1/completions", **LONG)
        eventually(lambda: server.metric("num_requests_running") == 1)
        began = time.monotonic()
        assert server.stop(number) == 0
        assert time.monotonic() - began < 3
        assert answer.result().json()["choices"][0]["finish_reason"] == "abort"
        assert not any("Traceback" in line for line in server.lines), server.lines


def test_a_signal_while_the_engine_starts():
    process = launch(*FAST, "--port", "0", core="--start-seconds 30")
    eventually(lambda: children(process.pid), 20)
    core = children(process.pid)[0]
    process.terminate()
    _, log = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "Traceback" not in log
    eventually(lambda: not Path(f"/proc/{core}").exists() or _is_zombie(core))


def test_a_killed_server_ends_the_engine():
    with running(*FAST) as server:
        pid = children(server.process.pid)[0]
        server.process.kill()
        server.process.wait(10)
        eventually(lambda: not Path(f"/proc/{pid}").exists() or _is_zombie(pid))


def _is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"


def test_a_requests_own_template_needs_a_flag(model_folder: Path):
    with running(str(model_folder)) as server:
        messages = [{"role": "user", "content": "x"}]
        answer = server.post("/v1/chat/completions", messages=messages, chat_template="x")
        assert answer.status_code == 400
        assert "--trust-request-chat-template" in answer.json()["error"]["message"]
