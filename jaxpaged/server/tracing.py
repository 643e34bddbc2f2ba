"""OpenTelemetry: a span for each request of the engine, a child of the caller's if it sent one.

The packages are those of the extra `otel`; nothing of them is imported unless traces are wanted.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

import jaxpaged
from jaxpaged.engine.metrics import RequestTimes

if TYPE_CHECKING:
    from opentelemetry.trace import Span

OPERATIONS = {  # gen_ai.operation.name
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
OTHER_OPERATION = "generate_content"
OPERATION_KEY = "jaxpaged-operation"


class TraceContextMiddleware:
    """Takes the W3C headers `traceparent` and `tracestate` into the context of the request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        from opentelemetry import context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        headers = dict(Headers(scope=scope))
        found = TraceContextTextMapPropagator().extract(headers, context.Context())
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        operation = OPERATIONS.get(path, OTHER_OPERATION)
        token = context.attach(context.set_value(OPERATION_KEY, operation, found))
        try:
            await self._app(scope, receive, send)
        finally:
            context.detach(token)


@contextlib.contextmanager
def tracing(
    endpoint: str, model: str
) -> Generator[Callable[[RequestTimes], Callable[[str], None]], None, None]:
    """An observer of `AsyncLLM` that sends spans to `endpoint`, until the block ends.

    Args:
        endpoint: a URL; without a path the usual one, /v1/traces, is meant.
        model: what requests call it.

    Raises:
        ValueError: the extra is not installed.
    """
    try:
        from opentelemetry import context, trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ValueError(
            "--otlp-traces-endpoint needs OpenTelemetry: pip install 'jaxpaged[otel]'"
        ) from error

    # Those of OTEL_RESOURCE_ATTRIBUTES win.
    named = Resource({SERVICE_NAME: "jaxpaged", SERVICE_VERSION: jaxpaged.__version__})
    provider = TracerProvider(resource=named.merge(Resource.create({})))
    if urlsplit(endpoint).path in ("", "/"):
        endpoint = endpoint.rstrip("/") + "/v1/traces"
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    tracer = provider.get_tracer("jaxpaged", jaxpaged.__version__)

    def observe(times: RequestTimes) -> Callable[[str], None]:
        operation = context.get_value(OPERATION_KEY) or OTHER_OPERATION
        span = tracer.start_span(
            f"{operation} {model}",
            kind=trace.SpanKind.SERVER,
            start_time=_nanoseconds(times.request.arrival_time),
            attributes={
                "gen_ai.operation.name": str(operation),
                "gen_ai.request.model": model,
                "gen_ai.response.model": model,
                **_request_attributes(times),
            },
        )

        def end(reason: str) -> None:
            _end(span, times, reason)
            if reason == "error":
                span.set_status(trace.StatusCode.ERROR)
            span.end()

        return end

    try:
        yield observe
    finally:
        provider.shutdown()


def _request_attributes(times: RequestTimes) -> dict[str, Any]:
    params = times.request.params
    values = {
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.request.choice.count": params.n,
        "gen_ai.request.id": times.request.request_id,
        "gen_ai.response.id": times.request.request_id,
        "gen_ai.usage.input_tokens": len(times.request.prompt_token_ids),
    }
    return {name: value for name, value in values.items() if value is not None}


def _end(span: Span, times: RequestTimes, reason: str) -> None:
    """What is known only at the end; the names of times are vLLM's."""
    span.set_attributes(
        {
            "gen_ai.response.finish_reasons": (reason,),
            "gen_ai.usage.output_tokens": times.num_generated,
            "gen_ai.usage.cache_read.input_tokens": times.num_cached,
            "gen_ai.latency.e2e": time.time() - times.request.arrival_time,
        }
    )
    if times.scheduled is not None:
        span.add_event("scheduled", timestamp=_nanoseconds(times.scheduled))
    phases = times.phases
    if phases is None or times.first_token is None:
        return
    span.add_event("first token", timestamp=_nanoseconds(times.first_token))
    span.set_attributes(
        {
            "gen_ai.latency.time_in_queue": phases.queue,
            "gen_ai.latency.time_to_first_token": phases.first_token,
            "gen_ai.latency.time_in_model_prefill": phases.prefill,
            "gen_ai.latency.time_in_model_decode": phases.decode,
            "gen_ai.latency.time_in_model_inference": phases.inference,
        }
    )


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
