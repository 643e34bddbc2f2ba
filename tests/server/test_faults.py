"""What happens to others, and to the server, when a part or a client fails."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_server import Server, children, eventually, running
from http_checks import check_error, strict_json

PATH = "/v1/completions"
FAST = ("--skip-tokenizer-init",)
LONG = {"prompt": [5, 6], "max_tokens": 200, "ignore_eos": True, "return_token_ids": True}


def lines(server: Server, **body: Any) -> list[str]:
    """A whole stream."""
    body = {**LONG, "stream": True, **body}
    with httpx.stream("POST", server.url + PATH, json=body, timeout=60) as answer:
        return [line for line in answer.iter_lines() if line]


def raw(server: Server, body: bytes, *headers: str) -> socket.socket:
    """A request written by hand."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(30)
    connection.connect((host, int(port)))
    kind = "Content-Type: application/json"
    head = "\r\n".join([f"POST {PATH} HTTP/1.1", f"Host: {host}", kind, *headers])
    connection.sendall(head.encode() + b"\r\n\r\n" + body)
    return connection


def resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.fixture(scope="module")
def shared() -> Iterator[Server]:
    with running(*FAST) as server:
        yield server
        assert server.post(PATH, prompt=[5], max_tokens=1).status_code == 200
        assert not any("Traceback" in line for line in server.lines), server.lines


def test_the_engine_is_killed_in_the_middle():
    with running(*FAST, core="--step-seconds 0.02") as server, ThreadPoolExecutor() as pool:
        streams = [pool.submit(lines, server) for _ in range(2)]
        whole = pool.submit(server.post, PATH, **LONG)
        eventually(lambda: server.metric("num_requests_running") == 3)
        os.kill(children(server.process.pid)[0], signal.SIGKILL)
        check_error(whole.result(10), 503, "-9")
        for stream in streams:
            first, *_, failure, done = stream.result(10)
            assert strict_json(first.removeprefix("data: "))["choices"]
            assert strict_json(failure.removeprefix("data: "))["error"]["code"] == 503
            assert done == "data: [DONE]"
        check_error(server.get("/health"), 503, "-9")
        check_error(server.post(PATH, **LONG), 503, "-9")
        assert server.process.wait(10) == 1


@pytest.mark.parametrize(("timeout", "end"), [("20", "length"), ("0.5", "abort")])
def test_sigterm_in_the_middle(timeout: str, end: str):
    flags = (*FAST, "--shutdown-timeout", timeout)
    with running(*flags, core="--step-seconds 0.02") as server, ThreadPoolExecutor() as pool:
        streams = [pool.submit(lines, server) for _ in range(3)]
        whole = pool.submit(server.post, PATH, **LONG)
        eventually(lambda: server.metric("num_requests_running") == 4)
        began = time.monotonic()
        assert server.stop() == 0
        took = time.monotonic() - began
        for stream in streams:
            *_, last, done = stream.result(10)
            (choice,) = strict_json(last.removeprefix("data: "))["choices"]
            assert (choice["finish_reason"], done) == (end, "data: [DONE]")
        assert whole.result(10).json()["choices"][0]["finish_reason"] == end
        assert took < (3 if end == "abort" else 10), "it drains that long, and no longer"


def test_sigterm_while_a_template_never_ends(model_folder: Path):
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    flags = (str(model_folder), "--chat-template", loop)
    with running(*flags, env={"FAKE_PATIENCE": "0.5"}) as server, ThreadPoolExecutor() as pool:
        core = children(server.process.pid)[0]
        body = {"messages": [{"role": "user", "content": "x"}]}
        asked = pool.submit(server.post, "/v1/chat/completions", **body)
        time.sleep(0.5)
        assert server.get("/health").status_code == 200
        assert server.stop() == 1
        eventually(lambda: any("ended by force" in line for line in server.lines))
        eventually(lambda: not Path(f"/proc/{core}").exists())
        assert isinstance(asked.exception(10), httpx.TransportError) or asked.result().is_error


def test_a_client_that_reads_a_byte_a_second(shared: Server):
    body = {**LONG, "n": 8, "logprobs": 20, "stream": True}
    content = json.dumps(body).encode()
    before = resident_mib(shared.process.pid)
    with raw(shared, content, f"Content-Length: {len(content)}") as slow:
        assert slow.recv(1) == b"H"
        began = time.monotonic()
        assert shared.post(PATH, **LONG).status_code == 200
        assert len(lines(shared)) == 201
        assert slow.recv(1) == b"T"
        assert time.monotonic() - began < 5
        # The engine does not wait for it either.
        eventually(lambda: shared.metric("num_requests_running") == 0)
        assert resident_mib(shared.process.pid) - before < 100
    eventually(lambda: shared.metric("num_requests_running") == 0)


def test_a_body_of_100_mb_is_refused_before_it_is_read(shared: Server):
    before = resident_mib(shared.process.pid)
    with raw(shared, b" " * 100_000, "Content-Length: 100000000") as client:
        answer = client.recv(4096)
        while b"}}" not in answer:
            answer += client.recv(4096)
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"33554432 bytes" in answer
    assert resident_mib(shared.process.pid) - before < 20


def test_a_body_of_100_mb_that_does_not_say_so(shared: Server):
    piece = b"%x\r\n%b\r\n" % (1 << 20, b" " * (1 << 20))
    sent = 0
    with raw(shared, b"", "Transfer-Encoding: chunked") as client:
        answer = b""
        while not answer and sent < 100:
            client.settimeout(30)
            client.sendall(piece)
            sent += 1
            client.settimeout(0.005 if sent <= 32 else 1)
            try:
                answer = client.recv(4096)
            except TimeoutError:
                continue
    assert answer.startswith(b"HTTP/1.1 413")
    assert 32 <= sent <= 34


def test_ten_thousand_stop_strings(server: Server):
    for path, said in ((PATH, {"prompt": "x"}), ("/v1/chat/completions", None)):
        body = said or {"messages": [{"role": "user", "content": "x"}]}
        body["stop"] = [f"s{i}" for i in range(10_000)]
        for streamed in (False, True):
            began = time.monotonic()
            error = check_error(server.post(path, **body, stream=streamed), 400, "10000")
            assert error["param"] == "stop"
            assert time.monotonic() - began < 1
