"""Every setting of the HTTP server, once: the CLI makes its flags from these fields."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import limits

from jaxpaged.config import setting
from jaxpaged.validation import require

LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")
TOOL_CALL_PARSERS = ("hermes", "llama3_json", "mistral", "qwen")
REASONING_PARSERS = ("deepseek_r1", "qwen3")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Settings of one server.

    Raises:
        ValueError: values that contradict each other or lie outside their range.
    """

    served_model_name: tuple[str, ...] = setting(
        (), "names that requests may use; the first is echoed (default: the model's)"
    )
    api_server_count: int = setting(
        1,
        "processes that speak HTTP, for more load than one can carry; they share the engines and "
        "the address. What one process counts or keeps needs 1: --rate-limit, "
        "--max-concurrent-requests, stored responses",
    )
    host: str = setting(
        "127.0.0.1", "address to listen on; unlike vLLM's default, only this machine can connect"
    )
    port: int = setting(8000, "TCP port; 0: any free one")
    uds: str | None = setting(None, "listen on this Unix socket instead", metavar="PATH")
    root_path: str = setting("", "path that a proxy in front strips off")
    api_key: tuple[str, ...] = setting(
        (),
        "keys of which clients must send one as a bearer token or in X-Api-Key, on every route but "
        "/health, /ping and the page's files (environment: JAXPAGED_API_KEY)",
        metavar="KEY",
    )
    allowed_origins: tuple[str, ...] = setting(
        (), "web origins that may call the server from a browser; '*': any", metavar="ORIGIN"
    )
    ssl_keyfile: str | None = setting(None, "private key; makes it HTTPS", metavar="FILE")
    ssl_certfile: str | None = setting(None, "certificate for --ssl-keyfile", metavar="FILE")
    uvicorn_log_level: str = setting("info", "what the HTTP library logs", choices=LOG_LEVELS)

    chat_template: str | None = setting(
        None, "file with a Jinja chat template, or its text, instead of the model's"
    )
    trust_request_chat_template: bool = setting(
        False, "let requests bring a chat_template of their own: a program that may run for ever"
    )
    default_chat_template_kwargs: dict[str, Any] | None = setting(
        None, "JSON object: template variables for requests that don't set them", metavar="JSON"
    )
    enable_auto_tool_choice: bool = setting(
        False, "let the model decide when to call a tool; needs --tool-call-parser"
    )
    tool_call_parser: str | None = setting(
        None, "how the model writes tool calls", choices=TOOL_CALL_PARSERS
    )
    reasoning_parser: str | None = setting(
        None,
        "how the model marks its reasoning, which then leaves the content of an answer",
        choices=REASONING_PARSERS,
    )
    response_role: str = setting("assistant", "role of the answers of a chat")
    return_tokens_as_token_ids: bool = setting(
        False, "spell tokens in log-probabilities as 'token_id:N'"
    )
    enable_prompt_tokens_details: bool = setting(
        False, "tell in usage how many prompt tokens the prefix cache served"
    )
    enable_request_id_headers: bool = setting(False, "echo X-Request-Id, or make one up")
    enable_admin: bool = setting(
        False, "routes that change the engine or tell of it: profiles, prefix cache, settings"
    )
    profile_dir: str | None = setting(
        None,
        "where /start_profile writes its traces (default: in the user's cache folder)",
        metavar="FOLDER",
    )
    enable_log_requests: bool = setting(
        False, "log a line for each request: id, tokens, times, how it ended; never its texts"
    )
    disable_log_stats: bool = setting(
        False, "don't log throughput and load every ten seconds while there is any"
    )
    otlp_traces_endpoint: str | None = setting(
        None,
        "send an OpenTelemetry span for each request there (OTLP over HTTP, port 4318 of most "
        "collectors); needs the extra otel",
        metavar="URL",
    )
    metrics_prefix: str = setting(
        "jaxpaged", "what metric names begin with; vllm suits boards made for it"
    )
    max_request_bytes: int = setting(32 << 20, "longest request body; beyond: 413")
    rate_limit: str | None = setting(
        None,
        "POST requests of one API key, or of one address without keys; beyond: 429. Such as "
        "100/minute, or several: 10/second;1000/hour",
        metavar="RATE",
    )
    max_concurrent_requests: int | None = setting(
        None, "of one API key, or of one address without keys, at a time; beyond: 429"
    )
    shutdown_timeout: float = setting(
        0.0, "seconds that running requests get to finish after SIGTERM", metavar="SECONDS"
    )

    def __post_init__(self) -> None:
        require(self, "port", 0 <= self.port < 65536, "0 to 65535")
        path = self.root_path
        require(self, "root_path", re.fullmatch("(/[^/]+)*", path) is not None, "like /llm")
        require(self, "max_request_bytes", self.max_request_bytes >= 1, "at least 1")
        require(self, "api_server_count", self.api_server_count >= 1, "at least 1")
        for name in ("rate_limit", "max_concurrent_requests"):
            if self.api_server_count > 1 and getattr(self, name) is not None:
                raise ValueError(
                    f"{name} is counted in one process: it needs api_server_count 1, or a proxy in "
                    "front that counts"
                )
        most = self.max_concurrent_requests
        require(self, "max_concurrent_requests", most is None or most >= 1, "at least 1")
        require(self, "rate_limit", _is_rate(self.rate_limit), "like 100/minute or 5/10 seconds")
        require(self, "shutdown_timeout", 0 <= self.shutdown_timeout <= 86400, "0 to 86400")
        require(self, "uvicorn_log_level", self.uvicorn_log_level in LOG_LEVELS, "a log level")
        endpoint = self.otlp_traces_endpoint
        require(
            self,
            "otlp_traces_endpoint",
            endpoint is None or re.match(r"https?://[^/]", endpoint) is not None,
            "a URL that begins with http:// or https://",
            secret=True,  # it may hold a password
        )
        require(self, "api_key", all(self.api_key), "non-empty", secret=True)
        require(
            self,
            "metrics_prefix",
            re.fullmatch("[a-zA-Z_][a-zA-Z0-9_]*", self.metrics_prefix) is not None,
            "letters, digits and underscores",
        )
        for name, choices in (
            ("tool_call_parser", TOOL_CALL_PARSERS),
            ("reasoning_parser", REASONING_PARSERS),
        ):
            value = getattr(self, name)
            require(self, name, value in (None, *choices), f"one of {', '.join(choices)}")
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            raise ValueError("enable_auto_tool_choice needs tool_call_parser")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ValueError("ssl_keyfile and ssl_certfile need each other")


def _is_rate(given: str | None) -> bool:
    try:
        return given is None or all(rate.amount for rate in limits.parse_many(given))
    except ValueError:
        return False
