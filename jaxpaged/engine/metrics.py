"""Prometheus metrics of the engines, by vLLM's names after the prefix."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.multiprocess import MultiProcessCollector

from jaxpaged.engine.messages import AddRequest, EngineInfo, EngineStats, SequenceOutput

TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
ITL_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
LATENCY_BUCKETS = (
    *(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60),
    *(120, 240, 480, 960, 1920, 7680),
)
ITERATION_BUCKETS = (1, *(2**power for power in range(3, 15)))
CHOICES_BUCKETS = (1, 2, 5, 10, 20)
STEP_BUCKETS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1, 2.5),
)
RATIO_BUCKETS = tuple(tenth / 10 for tenth in range(11))
FINISHED_REASONS = ("stop", "length", "abort", "error")


TOTALS = {  # series and the field of Totals that they add to
    "prompt_tokens_total": "prompt_tokens",
    "generation_tokens_total": "generation_tokens",
    "time_to_first_token_seconds_count": "first_tokens",
    "time_to_first_token_seconds_sum": "first_token_seconds",
}


@dataclass(kw_only=True)
class Totals:
    """Sums since the start, for those who compute rates themselves."""

    prompt_tokens: float = 0
    generation_tokens: float = 0
    first_tokens: float = 0
    first_token_seconds: float = 0.0  # arrival to first token, over all of them


@dataclass
class RequestTimes:
    """When what happened to a request; time.time(), seconds."""

    request: AddRequest
    scheduled: float | None = None
    first_token: float | None = None
    last_token: dict[int, float] = field(default_factory=dict)  # by choice
    num_generated: int = 0  # over all choices
    num_cached: int = 0  # prompt tokens that the prefix cache served

    @property
    def phases(self) -> Phases | None:
        """How long each phase took; None before the first token."""
        if self.first_token is None or not self.last_token:
            return None
        arrival, last = self.request.arrival_time, max(self.last_token.values())
        scheduled = self.scheduled or arrival
        return Phases(
            queue=max(0.0, scheduled - arrival),
            prefill=self.first_token - scheduled,
            decode=last - self.first_token,
            inference=last - scheduled,
            first_token=self.first_token - arrival,
            e2e=last - arrival,
        )


@dataclass(frozen=True, kw_only=True)
class Phases:
    """Seconds of a request's life, up to its last token."""

    queue: float  # arrival to admission
    prefill: float  # admission to the first token
    decode: float  # first to last token
    inference: float  # admission to the last token
    first_token: float  # arrival to the first token
    e2e: float  # arrival to the last token


class MetricsRegistry:
    """Every series of a server. A family is made once; each engine has a series of it.

    Args:
        model_name: value of the label of that name.
        prefix: what each name begins with, before the colon.
        folder: where several server processes keep their values, so that each can tell the sum of
            all (prometheus_client's multiprocess mode: PROMETHEUS_MULTIPROC_DIR names it, too);
            None: there is one process.
    """

    def __init__(self, model_name: str, prefix: str, folder: str | None = None) -> None:
        disable_created_metrics()  # a second series beside each counter, which no board shows
        self._prefix, self._model_name = prefix, model_name
        self._own = self._shown = CollectorRegistry()
        if folder is not None:
            self._shown = CollectorRegistry()
            MultiProcessCollector(self._shown, folder)
        self._families: dict[str, Gauge | Counter | Histogram] = {}

    def text(self) -> bytes:
        """All series in Prometheus' text format."""
        return generate_latest(self._shown)

    def totals(self) -> Totals:
        """Sums over all engines, and over all server processes."""
        totals = Totals()
        names = {f"{self._prefix}:{name}": field for name, field in TOTALS.items()}
        for family in self._shown.collect():
            for sample in family.samples:
                if sample.name in names:
                    field = names[sample.name]
                    setattr(totals, field, getattr(totals, field) + sample.value)
        return totals

    def gauge(self, name: str, help: str, engine: int, **labels: str) -> Gauge:
        """The engine's series of a gauge; of several processes, the one that set it last counts."""
        make = functools.partial(Gauge, multiprocess_mode="mostrecent")
        return self._series(make, name, help, engine, labels)

    def counter(self, name: str, help: str, engine: int, **labels: str) -> Counter:
        """The engine's series of a counter."""
        return self._series(Counter, name, help, engine, labels)

    def histogram(self, name: str, buckets: Sequence[float], engine: int) -> Histogram:
        """The engine's series of a histogram."""
        make = functools.partial(Histogram, buckets=buckets)
        return self._series(make, name, f"Histogram of {name.replace('_', ' ')}.", engine, {})

    def _series(
        self, make: Callable[..., Any], name: str, help: str, engine: int, labels: dict[str, str]
    ) -> Any:
        values = {"model_name": self._model_name, "engine": str(engine), **labels}
        if name not in self._families:
            self._families[name] = make(
                f"{self._prefix}:{name}", help, list(values), registry=self._own
            )
        return self._families[name].labels(**values)


class Metrics:
    """The series of one engine.

    Args:
        registry: where they are shown.
        info: what the engine settled on.
        engine: its number.
    """

    def __init__(self, registry: MetricsRegistry, info: EngineInfo, engine: int = 0) -> None:
        gauge = functools.partial(registry.gauge, engine=engine)
        counter = functools.partial(registry.counter, engine=engine)
        histogram = functools.partial(registry.histogram, engine=engine)
        self._last = EngineStats()

        self._up = gauge("engine_up", "1 while the engine lives, 0 after.")
        self._running = gauge("num_requests_running", "Requests that the engine computes.")
        self._waiting = gauge("num_requests_waiting", "Requests in the queue.")
        self._usage = gauge("kv_cache_usage_perc", "Share of the pages in use, 0 to 1.")
        self._compilations = gauge(
            "step_compilations", "Executables compiled after ready; must stay 0."
        )
        gauge(
            "cache_config_info",
            "The KV cache's settings, as labels.",
            block_size=str(info.page_size),
            num_gpu_blocks=str(info.num_pages),
            cache_dtype=info.dtype,
        ).set(1)

        self._queries = counter("prefix_cache_queries", "Tokens looked up in the cache.")
        self._hits = counter("prefix_cache_hits", "Tokens that the prefix cache served.")
        self._preemptions = counter("num_preemptions", "Preempted sequences.")
        self._prompt = counter("prompt_tokens", "Prompt tokens processed.")
        self._cached = counter("prompt_tokens_cached", "Prompt tokens from the cache.")
        self._generated = counter("generation_tokens", "Tokens generated.")
        self._finished = {
            reason: counter("request_success", "Finished requests.", finished_reason=reason)
            for reason in FINISHED_REASONS
        }

        self._ttft = histogram("time_to_first_token_seconds", TTFT_BUCKETS)
        self._itl = histogram("inter_token_latency_seconds", ITL_BUCKETS)
        self._per_token = histogram("request_time_per_output_token_seconds", ITL_BUCKETS)
        self._e2e = histogram("e2e_request_latency_seconds", LATENCY_BUCKETS)
        self._phases = {
            phase: histogram(f"request_{phase}_time_seconds", LATENCY_BUCKETS)
            for phase in ("queue", "inference", "prefill", "decode")
        }
        lengths = _lengths(info.max_model_len)
        self._prompt_len = histogram("request_prompt_tokens", lengths)
        self._output_len = histogram("request_generation_tokens", lengths)
        self._max_tokens = histogram("request_params_max_tokens", lengths)
        self._n = histogram("request_params_n", CHOICES_BUCKETS)
        self._iteration = histogram("iteration_tokens_total", ITERATION_BUCKETS)
        self._padding = histogram("step_bucket_padding_ratio", RATIO_BUCKETS)
        self._host_gap = histogram("host_gap_seconds", STEP_BUCKETS)
        self._device_step = histogram("device_step_seconds", STEP_BUCKETS)

    def step(self, stats: EngineStats, *, alive: bool = True) -> None:
        """Take the state after a step, or at the engine's death."""
        last, self._last = self._last, stats
        self._up.set(alive)
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._usage.set(stats.kv_cache_usage)
        self._compilations.set(stats.step_compilations)
        self._queries.inc(stats.prefix_cache_queries - last.prefix_cache_queries)
        self._hits.inc(stats.prefix_cache_hits - last.prefix_cache_hits)
        self._preemptions.inc(stats.num_preemptions - last.num_preemptions)
        if stats.iteration_tokens:
            self._iteration.observe(stats.iteration_tokens)
            self._padding.observe(1 - stats.iteration_tokens / stats.bucket_tokens)
            self._host_gap.observe(stats.host_gap_seconds)
        if stats.device_step_seconds:
            self._device_step.observe(stats.device_step_seconds)

    def tokens(self, times: RequestTimes, news: SequenceOutput, now: float) -> None:
        """Take new tokens of a choice."""
        times.scheduled = times.scheduled or news.scheduled_time
        if not news.token_ids and news.embedding is None:
            return
        if times.first_token is None:
            times.first_token = now
            prompt_len = len(times.request.prompt_token_ids)
            wait = now - times.request.arrival_time
            if news.token_ids:  # an embedding has none
                self._ttft.observe(wait)
            self._prompt.inc(prompt_len)
            times.num_cached = news.num_cached_tokens
            self._cached.inc(news.num_cached_tokens)
        elif news.index in times.last_token:
            self._itl.observe(now - times.last_token[news.index])
        times.last_token[news.index] = now
        generated = 0 if times.request.prompt_only else len(news.token_ids)
        times.num_generated += generated
        self._generated.inc(generated)

    def finish(self, times: RequestTimes, reason: str) -> None:
        """Take the end of a request; `reason`: one of FINISHED_REASONS."""
        request = times.request
        self._finished[reason].inc()
        self._prompt_len.observe(len(request.prompt_token_ids))
        self._output_len.observe(times.num_generated)
        self._n.observe(request.params.n)
        self._max_tokens.observe(request.params.max_tokens or 0)
        phases = times.phases
        if phases is None:
            return
        self._e2e.observe(phases.e2e)
        for name, histogram in self._phases.items():
            histogram.observe(getattr(phases, name))
        steps = times.num_generated / request.params.n - 1
        if steps > 0:
            self._per_token.observe(phases.decode / steps)


def _lengths(longest: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, ... up to the longest."""
    steps = [digit * 10**power for power in range(10) for digit in (1, 2, 5)]
    return tuple(step for step in steps if step <= longest)
