"""Server-sent events, and requests whose client may leave at any moment."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

from fastapi import Request
from pydantic import BaseModel
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from jaxpaged.outputs import RequestOutput
from jaxpaged.server.errors import ClientGoneError, describe, error_body

log = logging.getLogger(__name__)

Result = TypeVar("Result")
DONE = "data: [DONE]\n\n"
# What a route that may stream says of itself.
STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}


def event(json: str, name: str | None = None) -> str:
    """One server-sent event."""
    return f"data: {json}\n\n" if name is None else f"event: {name}\ndata: {json}\n\n"


def failure(code: int, message: str, param: str | None) -> str:
    """How a stream of OpenAI's ends that cannot go on."""
    return event(error_body(code, message, param)) + DONE


class EventStream(StreamingResponse):
    """Sends events until they end or the client leaves, which cancels their source."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None]) -> None:
        self.events = events
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self.events):
            sending = asyncio.create_task(self.stream_response(send))
            await _first(sending, _left(receive))
            if not sending.cancelled():
                sending.result()


Failure = Callable[[int, str, str | None], str]  # status, message, param -> last events


async def start_stream(
    request: Request, events: AsyncGenerator[str, None], failed: Failure = failure
) -> EventStream:
    """A response whose first event is there already: until then a failure can be an error code.

    Args:
        failed: how the stream ends if it fails later.

    Raises:
        ClientGoneError: the client left before the first event.
    """
    first = await unless_gone(request, anext(events))

    async def all_events() -> AsyncGenerator[str, None]:
        try:
            async with aclosing(events):
                yield first
                async for following in events:
                    yield following
        except Exception as error:
            described = describe(error)
            if described[0] == 500:
                log.error("a stream failed", exc_info=error)
            yield failed(*described)

    return EventStream(all_events())


class Answering(Protocol):
    """A prepared request."""

    def events(self) -> AsyncGenerator[str, None]:
        """Server-sent events as it goes on."""
        ...

    def response(self) -> Coroutine[Any, Any, BaseModel]:
        """All of it at once."""
        ...


async def respond(
    request: Request, answering: Answering, *, stream: bool, failed: Failure = failure
) -> Response:
    """Answer as a stream or in one piece; `failed` is that of `start_stream`.

    Raises:
        ClientGoneError: the client left.
    """
    if stream:
        return await start_stream(request, answering.events(), failed)
    answer = await unless_gone(request, answering.response())
    return Response(answer.model_dump_json(), media_type="application/json")


async def unless_gone(request: Request, work: Awaitable[Result]) -> Result:
    """The result of `work`, which is cancelled when the client leaves.

    Raises:
        ClientGoneError: it left.
    """
    working = asyncio.ensure_future(work)
    await _first(working, _left(request.receive))
    if working.cancelled():
        raise ClientGoneError
    return working.result()


async def merge(
    sources: Sequence[AsyncGenerator[RequestOutput, None]],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """What several requests give, as it comes, with the place of the request.

    The first failure ends all of them.
    """
    if len(sources) == 1:
        async with aclosing(sources[0]) as only:
            async for output in only:
                yield 0, output
        return
    queue: asyncio.Queue[tuple[int, RequestOutput | Exception | None]] = asyncio.Queue()

    async def pump(place: int, source: AsyncGenerator[RequestOutput, None]) -> None:
        try:
            async for output in source:
                queue.put_nowait((place, output))
            queue.put_nowait((place, None))
        except Exception as error:
            queue.put_nowait((place, error))

    tasks = [asyncio.create_task(pump(*numbered)) for numbered in enumerate(sources)]
    try:
        running = len(tasks)
        while running:
            place, news = await queue.get()
            if isinstance(news, Exception):
                raise news
            if news is None:
                running -= 1
            else:
                yield place, news
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _first(work: asyncio.Future, other: Coroutine[None, None, None]) -> None:
    """Wait until either ends, then end both; what they raise stays in `work`."""
    watching = asyncio.create_task(other)
    try:
        await asyncio.wait({work, watching}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        work.cancel()
        watching.cancel()
        await asyncio.wait({work, watching})
