"""Load a server with well-behaved, leaving, broken and hostile clients, and see what is left.

    python scripts/load_test.py --clients 200 --seconds 60          # the built-in model
    python scripts/load_test.py --clients 200 --seconds 600         # a soak
    python scripts/load_test.py -- --max-num-seqs 64                # flags of the server

Each client does one thing after the other, by chance: streams an answer to its end, leaves in the
middle of one, sends half a body, nonsense, or no HTTP at all. Afterwards nothing may remain: gauges
at zero, every page free, no compilation, no traceback in the log, memory as after the first third.
Exit status 1 if anything else happened.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import random
import re
import shlex
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import write_results

TIMEOUT = 120.0  # seconds for one thing that a client does
IDLE_SECONDS = 15.0  # until everything must be free again
GROWTH, GROWTH_MIB = 1.05, 16  # memory may be so much more than after the first third
STEADY_SECONDS = 20.0  # a third of the time after which caches and the heap have their size
WORDS = ("the", "king", "shall", "speak", "of", "love", "and", "night", "to", "him", "crown")
OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/embeddings", {"input": ["the king", "a crown of night"]}),
    ("/v1/responses", {"input": "Good morrow!", "max_output_tokens": 16, "store": False}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "Who?"}], "max_tokens": 16}),
    ("/tokenize", {"prompt": "the king shall speak"}),
]
BAD_BODIES: list[tuple[dict[str, Any] | bytes, int]] = [
    (b"{", 400),
    (b"[1, 2]", 400),
    (b"\xff\xfe\x00", 400),
    ({"prompt": "x", "max_tokens": 0}, 400),
    ({"prompt": "x", "logit_bias": {"99999999": 1}}, 400),
    ({"prompt": [-1]}, 400),
    ({"prompt": "x", "stop": [str(i) for i in range(10_000)]}, 400),
    ({"prompt": "x", "n": 10**6}, 400),
    ({"prompt": "x " * 50_000}, 400),
    ({"prompt": "x", "model": "nobody"}, 404),
    ({"prompt": "x", "response_format": {"type": "json_schema"}}, 400),
]


@dataclass
class Report:
    """What the clients saw of a model."""

    model: str
    done: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    events: int = 0


class Client:
    """One client after the other in the same place."""

    def __init__(self, address: tuple[str, int], seed: int, report: Report) -> None:
        self._address, self._rng, self._report = address, random.Random(seed), report
        self._deeds: list[tuple[Callable[[], Awaitable[None]], int]] = [
            (self._stream, 50),
            (self._whole, 7),
            (self._other, 5),
            (self._leave, 20),
            (self._vanish, 5),
            (self._half_a_body, 5),
            (self._bad_body, 8),
            (self._no_http, 2),
        ]

    async def run(self, deadline: float) -> None:
        """Do things until `deadline`."""
        deeds, weights = zip(*self._deeds, strict=True)
        while time.monotonic() < deadline:
            (deed,) = self._rng.choices(deeds, weights)
            name = deed.__name__.strip("_")
            try:
                async with asyncio.timeout(TIMEOUT):
                    await deed()
                self._report.done[name] += 1
            except Exception as error:
                self._report.faults[f"{name}: {type(error).__name__}: {error}"[:300]] += 1

    def _body(self, **more: Any) -> tuple[str, dict[str, Any]]:
        text = " ".join(self._rng.choices(WORDS, k=self._rng.randint(1, 40)))
        body: dict[str, Any] = {
            "max_tokens": self._rng.randint(1, 64),
            "n": self._rng.choice([1, 1, 2]),
        }
        body["temperature"] = self._rng.choice([0, 1])
        if self._rng.random() < 0.2:
            body["stop"] = ["the", " of love"]
        if self._rng.random() < 0.1:
            body["structured_outputs"] = {"regex": "[a-z ,.]{3,40}"}
        if self._rng.random() < 0.5:
            chat = {"messages": [{"role": "user", "content": text}]}
            return "/v1/chat/completions", {**chat, **body, **more}
        return "/v1/completions", {"prompt": text, **body, **more}

    async def _send(
        self, path: str, body: dict[str, Any] | bytes, cut: int | None = None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: server\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection(*self._address)
        writer.write(head.encode() + content[:cut])
        await writer.drain()
        return reader, writer

    async def _answer(self, path: str, body: dict[str, Any] | bytes) -> tuple[int, bytes]:
        reader, writer = await self._send(path, body)
        try:
            head, _, rest = (await reader.read()).partition(b"\r\n\r\n")
        finally:
            writer.transport.abort()
        return _status(head), rest

    async def _stream(self) -> None:
        path, body = self._body(stream=True, stream_options={"include_usage": True})
        status, rest = await self._answer(path, body)
        events = re.findall(rb"^data: (.*)$", rest, re.M)
        self._report.events += len(events)
        if status != 200 or not events or events[-1].strip() != b"[DONE]":
            raise AssertionError(f"a stream ended early: {status} {rest[-200:]!r}")
        read = [json.loads(event) for event in events[:-1]]
        ends = [c["finish_reason"] for event in read for c in event.get("choices", ())]
        ends = [end for end in ends if end is not None]
        if len(ends) != body["n"] or not {"stop", "length"}.issuperset(ends):
            raise AssertionError(f"{body['n']} choices ended with {ends}: {rest[-200:]!r}")

    async def _whole(self) -> None:
        status, rest = await self._answer(*self._body())
        if status != 200 or not json.loads(rest)["usage"]["completion_tokens"]:
            raise AssertionError(f"{status} {rest[-200:]!r}")

    async def _other(self) -> None:
        path, body = self._rng.choice(OTHERS)
        model = {} if path == "/tokenize" else {"model": self._report.model}
        status, rest = await self._answer(path, {**body, **model})
        if status != 200 or not json.loads(rest):
            raise AssertionError(f"{path}: {status} {rest[-200:]!r}")

    async def _leave(self) -> None:
        """Read a few events, then be gone."""
        path, body = self._body(stream=True, ignore_eos=True)
        reader, writer = await self._send(path, body)
        for _ in range(self._rng.randint(1, 60)):
            if not await reader.readline():
                break
        writer.transport.abort()

    async def _vanish(self) -> None:
        """Be gone before any answer."""
        _, writer = await self._send(*self._body(stream=self._rng.random() < 0.5))
        await asyncio.sleep(self._rng.random() * 0.05)
        writer.transport.abort()

    async def _half_a_body(self) -> None:
        _, writer = await self._send(*self._body(), cut=20)
        await asyncio.sleep(self._rng.random() * 0.05)
        writer.transport.abort()

    async def _bad_body(self) -> None:
        body, code = self._rng.choice(BAD_BODIES)
        status, rest = await self._answer("/v1/completions", body)
        if status != code or json.loads(rest)["error"]["code"] != code:
            raise AssertionError(f"{status} instead of {code}: {rest[-200:]!r}")

    async def _no_http(self) -> None:
        reader, writer = await asyncio.open_connection(*self._address)
        writer.write(self._rng.randbytes(200) + b"\r\n\r\n")
        await reader.read(1000)
        writer.transport.abort()


def _status(head: bytes) -> int:
    found = re.match(rb"HTTP/1.1 (\d+)", head)
    if found is None:
        raise AssertionError(f"no HTTP answer: {head[:100]!r}")
    return int(found[1])


class Server:
    """A server process and what it tells of itself."""

    def __init__(self, command: list[str], log: Path) -> None:
        self.log = log
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log.open("w"), text=True
        )
        assert self._process.stdout is not None
        greeting = self._process.stdout.readline()
        found = re.search(r" at (http://[\w.:]+): ", greeting)
        if found is None:
            sys.exit(f"the server did not start: {log.read_text()}")
        print(greeting, end="", flush=True)
        self.url = found[1]

    def get(self, path: str) -> str:
        """The body of an answer."""
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return answer.read().decode()

    def metric(self, name: str, label: str = "") -> float:
        """The value of a series."""
        found = re.search(rf"^\w+:{name}{{.*{label}.*}} (\S+)$", self.get("/metrics"), re.M)
        return float("nan") if found is None else float(found[1])

    def memory(self) -> dict[str, float]:
        """Resident MiB of the server's process and of all cores'."""
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        cores = [
            child for child in children if b"--input" in Path(f"/proc/{child}/cmdline").read_bytes()
        ]
        return {"server": _resident(pid), "core": sum(_resident(int(core)) for core in cores)}

    def stop(self) -> int:
        """The exit status after SIGTERM."""
        self._process.terminate()
        return self._process.wait(60)


def _resident(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024  # type: ignore[index]


async def load(server: Server, args: argparse.Namespace) -> tuple[Report, dict[str, float]]:
    """Run the clients; what they saw, and the memory after the first third of the time."""
    model = json.loads(server.get("/v1/models"))["data"][0]["id"]
    report, address = Report(model), urlsplit(server.url)
    place = (address.hostname or "", address.port or 0)
    deadline = time.monotonic() + args.seconds
    clients = [Client(place, args.seed + number, report) for number in range(args.clients)]
    tasks = [asyncio.create_task(client.run(deadline)) for client in clients]
    await asyncio.sleep(args.seconds / 3)
    memory = server.memory()
    await asyncio.gather(*tasks)
    return report, memory


def leftovers(server: Server) -> list[str]:
    """What should not be there once all clients have gone."""
    gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    deadline = time.monotonic() + IDLE_SECONDS
    while any(server.metric(name) for name in gauges) and time.monotonic() < deadline:
        time.sleep(0.2)
    found = [f"{name} is {value}" for name in gauges if (value := server.metric(name))]
    pool = json.loads(server.get("/engine_state"))["pool"]
    held = sum(cell > 1 for cell in base64.b64decode(pool["cells"])) if pool else -1
    if held or pool["sequences"]:
        found.append(f"{held} pages are held, by {pool and pool['sequences']}")
    for name, label in (("step_compilations", ""), ("request_success_total", 'reason="error"')):
        if server.metric(name, label):
            found.append(f"{name} {label} is {server.metric(name, label)}")
    return found


def main() -> int:
    """Load, report; 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--command", default=f"{sys.executable} -m jaxpaged", help="the program")
    parser.add_argument(
        "--write", action="store_true", help="to benchmarks/results, if all is well"
    )
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="of the server, behind --")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [*shlex.split(args.command), "serve", "--port", "0", *args.flags]
        server = Server(command, Path(folder) / "log")
        begin = server.memory()
        report, third = asyncio.run(load(server, args))
        wrong = [f"{count} x {fault}" for fault, count in report.faults.most_common()]
        wrong += leftovers(server)
        end = server.memory()
        code = server.stop()
        log = server.log.read_text()
    for name in begin:
        print(
            f"memory of the {name}, MiB: {begin[name]:.0f} at the start, {third[name]:.0f} after "
            f"a third, {end[name]:.0f} at the end"
        )
        if args.seconds >= 3 * STEADY_SECONDS and end[name] > third[name] * GROWTH + GROWTH_MIB:
            wrong.append(f"memory of the {name} grows")
    if code:
        wrong.append(f"exit status {code}")
    if "Traceback" in log or " ERROR " in log:
        wrong.append(f"the log: {log[-3000:]}")
    done = ", ".join(f"{name} {count}" for name, count in report.done.most_common())
    print(f"{report.done.total()} deeds ({done}), {report.events / args.seconds:.0f} events/s")
    for line in wrong:
        print("WRONG:", line)
    if args.write and not wrong:
        memory = {"start": begin, "after a third": third, "end": end}
        figures = {"deeds": dict(report.done), "events": report.events, "memory MiB": memory}
        clients = {"clients": args.clients, "seconds": args.seconds}
        print(f"wrote {write_results('load_test', {**clients, **figures})}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
