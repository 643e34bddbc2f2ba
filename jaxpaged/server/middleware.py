"""What stands between the socket and the endpoints: keys, sizes, request ids."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from fastapi import HTTPException
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxpaged.server.endpoints.page import FILES
from jaxpaged.server.errors import error_response, route_path
from jaxpaged.server.request_id import request_id

# Liveness probes carry no key; the page's files hold no data, and its calls carry the key.
OPEN_PATHS = ("/health", "/ping", *FILES)
# Of a body. Token ids are parsed fast, objects are not: more would hold up every stream meanwhile.
MAX_COMMAS, MAX_COLONS = 1 << 20, 1 << 18
CLIENT = "jaxpaged.client"  # of a scope: the digest of the key that the request carries


class ApiKeyMiddleware:
    """401 unless the request carries one of the keys: as a bearer token or, as Anthropic's clients
    send it, in X-Api-Key.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode("utf-8", "surrogateescape")) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        open_path = route_path(scope) in OPEN_PATHS
        if scope["type"] == "lifespan" or open_path or self._allowed(scope):
            await self._app(scope, receive, send)
            return
        refusal = error_response(401, "a valid API key is needed", scope=scope)
        await refusal(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        headers = Headers(scope=scope)
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = headers.get("x-api-key", "")
        given = _digest(key.strip(" \t").encode("latin-1"))  # the bytes that were sent
        scope[CLIENT] = given  # whose limits count, once it may pass
        # Every key is compared, each in constant time: the time taken tells nothing.
        return any([hmac.compare_digest(given, digest) for digest in self._digests])


class BodyLimitMiddleware:
    """413 for a body that is longer than `limit` bytes, whether it says so or not, or that may hold
    too many values or objects.
    """

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app, self._limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        message = f"the request body is longer than {self._limit} bytes (--max-request-bytes)"
        declared = Headers(scope=scope).get("content-length", "0")
        if declared.isdecimal() and int(declared) > self._limit:
            await error_response(413, message, scope=scope)(scope, receive, send)
            return
        seen = commas = colons = 0

        async def counted() -> Message:
            nonlocal seen, commas, colons
            part = await receive()
            body = part.get("body", b"")
            seen += len(body)
            commas, colons = commas + body.count(b","), colons + body.count(b":")
            if seen > self._limit:
                raise HTTPException(413, message)
            if commas > MAX_COMMAS or colons > MAX_COLONS:
                raise HTTPException(
                    413,
                    f"the request body has more than {MAX_COMMAS} commas or {MAX_COLONS} colons: "
                    "send its parts as several requests",
                )
            return part

        await self._app(scope, counted, send)


class RequestIdMiddleware:
    """Answers with the X-Request-Id of the request, if it fits, or with a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        own_id = request_id(Headers(scope=scope))

        async def tagged(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = own_id
            await send(message)

        await self._app(scope, receive, tagged)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
