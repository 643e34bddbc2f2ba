from __future__ import annotations

import http.server
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from fake_server import eventually, running
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from jaxpaged import cli

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@contextmanager
def collector() -> Iterator[tuple[str, list]]:
    """An OTLP collector: its URL and the spans that it got."""
    spans: list = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") is None and self.path == "/v1/traces":
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    for scope in resource.scope_spans:
                        spans.extend(scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", spans
    finally:
        server.shutdown()
        server.server_close()


def plain(value: object) -> object:
    kind = value.WhichOneof("value")
    inner = getattr(value, kind)
    return [plain(item) for item in inner.values] if kind == "array_value" else inner


def test_a_span_for_each_request():
    with collector() as (url, spans):
        flags = ("--skip-tokenizer-init", "--served-model-name", "M")
        with running(*flags, "--otlp-traces-endpoint", url) as server:
            body = {"prompt": [5, 6, 7, 8], "max_tokens": 3, "temperature": 0.5, "stream": True}
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "mine"}
            httpx.post(f"{server.url}/v1/completions", json=body, headers=headers)
            headers["traceparent"] = f"00-{TRACE}-{PARENT}-00"  # the caller samples it not
            httpx.post(f"{server.url}/v1/completions", json=body, headers=headers)
            server.post("/v1/completions", prompt=[5], max_tokens=1)
            assert server.stop() == 0  # what is left is sent at the end
        eventually(lambda: len(spans) == 2)
    span, alone = spans
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert alone.trace_id.hex() != TRACE and alone.parent_span_id == b""
    assert span.name == "text_completion M"
    found = {item.key: plain(item.value) for item in span.attributes}
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "M",
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.response.id": "cmpl-mine",
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": 4,
        "gen_ai.usage.output_tokens": 3,
    }
    assert {name: found[name] for name in expected} == expected
    for phase in ("time_in_queue", "time_in_model_prefill", "time_in_model_decode"):
        assert 0 <= found[f"gen_ai.latency.{phase}"] <= found["gen_ai.latency.e2e"]
    assert [event.name for event in span.events] == ["scheduled", "first token"]
    assert span.start_time_unix_nano <= span.events[0].time_unix_nano <= span.end_time_unix_nano


def test_without_the_extra_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    assert cli.main(["serve", "--port", "0", "--otlp-traces-endpoint", "http://nobody"]) == 2
    expected = "jaxpaged: --otlp-traces-endpoint needs OpenTelemetry: pip install 'jaxpaged[otel]'"
    assert capsys.readouterr().err.splitlines()[-1] == expected


def test_an_endpoint_is_a_url(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["serve", "--otlp-traces-endpoint", "collector:4318"]) == 2
    assert "otlp_traces_endpoint must be a URL" in capsys.readouterr().err
