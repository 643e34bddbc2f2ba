"""A streaming HTTP client light enough not to be what a benchmark measures.

httptools parses and an asyncio protocol takes the time of each piece, with no task, queue or JSON
per token: some microseconds each, where a general client takes a hundred.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httptools

DATA, DONE = b"data: ", b"data: [DONE]"


@dataclass
class Answer:
    """One streamed completion; times are of time.perf_counter()."""

    sent: float
    times: list[float] = field(default_factory=list)  # of each event that carries text
    usage: dict[str, Any] | None = None
    error: str | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that the server says it made."""
        return 0 if self.usage is None else self.usage["completion_tokens"]


class _Stream(asyncio.Protocol):
    """One connection with one request."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._parser = httptools.HttpResponseParser(self)
        self._rest = b""
        self._now = 0.0
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self.answer = Answer(time.perf_counter())
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        *events, self._rest = (self._rest + body).split(b"\n\n")
        if self._parser.get_status_code() != 200:
            return
        for event in events:
            if b'"text"' in event:
                self.answer.times.append(self._now)
            elif not event.startswith(DONE):
                last = json.loads(event[len(DATA) :])
                self.answer.usage = last.get("usage")
                if "error" in last:
                    self.answer.error = json.dumps(last["error"])

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status != 200:
            self.answer.error = f"{status}: {self._rest.decode(errors='replace')}"
        self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if self.answer.error is None and not (self.answer.usage and self.answer.times):
            self.answer.error = f"the stream broke off: {error}"
        if not self.done.done():
            self.done.set_result(self.answer)


async def complete(base_url: str, body: dict[str, Any]) -> Answer:
    """POST /v1/completions as a stream and read it to its end; failures are in the answer."""
    address = urlsplit(base_url)
    wanted = {"stream": True, "stream_options": {"include_usage": True}}
    payload = json.dumps({**body, **wanted}).encode()
    head = (
        f"POST {address.path}/v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n"
        "Connection: close\r\n\r\n"
    )
    loop = asyncio.get_running_loop()
    try:
        _, stream = await loop.create_connection(
            lambda: _Stream(head.encode() + payload),
            address.hostname or "127.0.0.1",
            address.port or 80,
        )
    except OSError as error:
        return Answer(time.perf_counter(), error=str(error))
    return await stream.done
