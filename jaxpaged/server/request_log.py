"""The request log: one line when a request has ended, with a JSON object that machines read.

It holds numbers and the request's id, never a prompt, an answer, a stop string or a key.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import msgspec

from jaxpaged.engine.metrics import RequestTimes

log = logging.getLogger(__name__)

ROUTINE = ("/health", "/ping", "/metrics", "/engine_state")  # asked every few seconds


def without_routine(entry: logging.LogRecord) -> bool:
    """A filter of uvicorn's access log: leaves out what probes, Prometheus and the page ask, and
    queries, which may hold anything.
    """
    if not isinstance(entry.args, tuple) or len(entry.args) < 3:
        return True
    client, method, target, *rest = entry.args
    path = str(target).partition("?")[0]
    entry.args = (client, method, path, *rest)
    return not path.endswith(ROUTINE)


def log_request(times: RequestTimes) -> Callable[[str], None]:
    """An observer of `AsyncLLM`: writes the line when the request ends."""
    return functools.partial(_write, times)


def record(times: RequestTimes, reason: str, now: float) -> dict[str, Any]:
    """What the line says; times in seconds, null where the request never came so far.

    Args:
        reason: stop, length, abort or error.
        now: time.time() of the end.
    """
    request = times.request
    phases = times.phases
    seconds = {} if phases is None else asdict(phases)
    named = {f"{name}_time": seconds.get(name) for name in ("queue", "prefill", "decode")}
    named["time_to_first_token"] = seconds.get("first_token")
    named["total_time"] = now - request.arrival_time
    return {
        "request_id": request.request_id,
        "finish_reason": reason,
        "prompt_tokens": len(request.prompt_token_ids),
        "cached_tokens": times.num_cached,
        "completion_tokens": times.num_generated,
        "n": request.params.n,
        "max_tokens": request.params.max_tokens,
        **{name: None if value is None else round(value, 6) for name, value in named.items()},
    }


def _write(times: RequestTimes, reason: str) -> None:
    line = msgspec.json.encode(record(times, reason, time.time()))
    log.info("request %s", line.decode())
