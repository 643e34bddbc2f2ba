"""How much one client may ask for: requests in a time, requests at a time."""

from __future__ import annotations

import math
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Hashable
from ipaddress import IPv6Address, ip_address

import limits
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxpaged.server.errors import error_response, route_path
from jaxpaged.server.middleware import CLIENT, OPEN_PATHS

IPV6_NETWORK_BITS = 64  # what one customer gets: a client may have any address of it


def client_of(scope: Scope) -> Hashable:
    """Whose request it is: that of an API key, else of an address, one for a whole IPv6 network."""
    if CLIENT in scope:
        return scope[CLIENT]
    host = (scope.get("client") or ("",))[0]
    try:
        address = ip_address(host)
    except ValueError:  # a Unix socket has none
        return host
    if isinstance(address, IPv6Address) and address.ipv4_mapped is None:
        return int(address) >> (128 - IPV6_NETWORK_BITS)
    return host


def is_limited(scope: Scope) -> bool:
    """What makes work for the model or the tokenizer: everything that is posted but probes."""
    posted = scope["type"] == "http" and scope["method"] == "POST"
    return posted and route_path(scope) not in OPEN_PATHS


class MovingWindow:
    """At most `amount` requests of a client in any `seconds`, at a cost that does not grow.

    The memory storage of `limits` starts a thread every few requests, which looks at all clients,
    and keeps each for ever; here a request pays for the times that it forgets.
    """

    def __init__(self, amount: int, seconds: int) -> None:
        self._amount, self._seconds = amount, seconds
        self._times: OrderedDict[Hashable, deque[float]] = OrderedDict()  # latest client last

    def __len__(self) -> int:
        return len(self._times)

    def wait(self, client: Hashable, now: float) -> float:
        """Seconds until the client may ask again; 0: now."""
        self._forget(now)
        times = self._times.get(client)
        if times is None or len(times) < self._amount:
            return 0.0
        return max(0.0, times[0] + self._seconds - now)

    def add(self, client: Hashable, now: float) -> None:
        """Count a request."""
        times = self._times.setdefault(client, deque(maxlen=self._amount))
        times.append(now)
        self._times.move_to_end(client)

    def _forget(self, now: float) -> None:
        while self._times:
            client, times = next(iter(self._times.items()))
            if times[-1] + self._seconds > now:
                return
            del self._times[client]


class RateLimitMiddleware:
    """429 for a client that asks more often than `rates`, such as "10/second;1000/hour", allow."""

    def __init__(self, app: ASGIApp, rates: str) -> None:
        self._app, self._rates = app, rates
        self._windows = [
            MovingWindow(rate.amount, rate.get_expiry()) for rate in limits.parse_many(rates)
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if is_limited(scope):
            client, now = client_of(scope), time.monotonic()
            wait = max(window.wait(client, now) for window in self._windows)
            if wait > 0:
                message = f"too many requests: {self._rates} are allowed (--rate-limit)"
                refusal = error_response(429, message, scope=scope, retry_after=math.ceil(wait))
                await refusal(scope, receive, send)
                return
            for window in self._windows:
                window.add(client, now)
        await self._app(scope, receive, send)


class ConcurrencyLimitMiddleware:
    """429 for a client of whom `limit` requests are being answered."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app, self._limit = app, limit
        self._running: Counter[Hashable] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not is_limited(scope):
            await self._app(scope, receive, send)
            return
        client = client_of(scope)
        if self._running[client] >= self._limit:
            message = (
                f"too many requests at a time: {self._limit} are allowed "
                "(--max-concurrent-requests)"
            )
            await error_response(429, message, scope=scope)(scope, receive, send)
            return
        self._running[client] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._running[client] -= 1
            if not self._running[client]:
                del self._running[client]
