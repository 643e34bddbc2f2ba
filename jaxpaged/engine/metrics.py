"""Prometheus metrics of an engine, by vLLM's names after the prefix."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

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


@dataclass(kw_only=True)
class Totals:
    """Sums since the start, for those who compute rates themselves."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    first_tokens: int = 0
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


class Metrics:
    """The series of one engine, in a registry of their own.

    Args:
        info: what the engine settled on.
        model_name: value of the label of that name.
        prefix: what each name begins with, before the colon.
    """

    def __init__(self, info: EngineInfo, model_name: str, prefix: str) -> None:
        disable_created_metrics()  # a second series beside each counter, which no board shows
        self._registry = CollectorRegistry()
        self._prefix, self._labels = prefix, {"model_name": model_name, "engine": "0"}
        self._last = self._logged = EngineStats()
        self._num_pages = info.num_pages
        self.totals, self._logged_totals = Totals(), Totals()

        self._running = self._gauge("num_requests_running", "Requests that the engine computes.")
        self._waiting = self._gauge("num_requests_waiting", "Requests in the queue.")
        self._usage = self._gauge("kv_cache_usage_perc", "Share of the pages in use, 0 to 1.")
        self._compilations = self._gauge(
            "step_compilations", "Executables compiled after ready; must stay 0."
        )
        self._set_cache_config(info)

        self._queries = self._counter("prefix_cache_queries", "Tokens looked up in the cache.")
        self._hits = self._counter("prefix_cache_hits", "Tokens that the prefix cache served.")
        self._preemptions = self._counter("num_preemptions", "Preempted sequences.")
        self._prompt = self._counter("prompt_tokens", "Prompt tokens processed.")
        self._cached = self._counter("prompt_tokens_cached", "Prompt tokens from the cache.")
        self._generated = self._counter("generation_tokens", "Tokens generated.")
        success = Counter(
            f"{prefix}:request_success",
            "Finished requests.",
            [*self._labels, "finished_reason"],
            registry=self._registry,
        )
        self._finished = {
            reason: success.labels(**self._labels, finished_reason=reason)
            for reason in FINISHED_REASONS
        }

        self._ttft = self._histogram("time_to_first_token_seconds", TTFT_BUCKETS)
        self._itl = self._histogram("inter_token_latency_seconds", ITL_BUCKETS)
        self._per_token = self._histogram("request_time_per_output_token_seconds", ITL_BUCKETS)
        self._e2e = self._histogram("e2e_request_latency_seconds", LATENCY_BUCKETS)
        self._phases = {
            phase: self._histogram(f"request_{phase}_time_seconds", LATENCY_BUCKETS)
            for phase in ("queue", "inference", "prefill", "decode")
        }
        lengths = _lengths(info.max_model_len)
        self._prompt_len = self._histogram("request_prompt_tokens", lengths)
        self._output_len = self._histogram("request_generation_tokens", lengths)
        self._max_tokens = self._histogram("request_params_max_tokens", lengths)
        self._n = self._histogram("request_params_n", CHOICES_BUCKETS)
        self._iteration = self._histogram("iteration_tokens_total", ITERATION_BUCKETS)
        self._padding = self._histogram("step_bucket_padding_ratio", RATIO_BUCKETS)
        self._host_gap = self._histogram("host_gap_seconds", STEP_BUCKETS)
        self._device_step = self._histogram("device_step_seconds", STEP_BUCKETS)

    def text(self) -> bytes:
        """All series in Prometheus' text format."""
        return generate_latest(self._registry)

    def step(self, stats: EngineStats) -> None:
        """Take the state after a step."""
        last, self._last = self._last, stats
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
                self.totals.first_tokens += 1
                self.totals.first_token_seconds += wait
            self.totals.prompt_tokens += prompt_len
            self._prompt.inc(prompt_len)
            times.num_cached = news.num_cached_tokens
            self._cached.inc(news.num_cached_tokens)
        elif news.index in times.last_token:
            self._itl.observe(now - times.last_token[news.index])
        times.last_token[news.index] = now
        generated = 0 if times.request.prompt_only else len(news.token_ids)
        times.num_generated += generated
        self._generated.inc(generated)
        self.totals.generation_tokens += generated

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

    def load_line(self, stats: EngineStats, seconds: float) -> str | None:
        """A line for the log about the last `seconds`; None if nothing happened."""
        before, self._logged = self._logged, stats
        sums, self._logged_totals = self._logged_totals, replace(self.totals)
        prompt = self.totals.prompt_tokens - sums.prompt_tokens
        generated = self.totals.generation_tokens - sums.generation_tokens
        if not (prompt or generated or stats.num_running or stats.num_waiting):
            return None
        looked_up = stats.prefix_cache_queries - before.prefix_cache_queries
        hits = (stats.prefix_cache_hits - before.prefix_cache_hits) / max(1, looked_up)
        used = round(stats.kv_cache_usage * self._num_pages)
        return (
            f"running {stats.num_running}, waiting {stats.num_waiting}, pages {used} of "
            f"{self._num_pages} used ({stats.kv_cache_usage:.1%}), prefix cache hits {hits:.1%}, "
            f"preemptions {stats.num_preemptions - before.num_preemptions}, prompt "
            f"{prompt / seconds:.1f} tokens/s, generation {generated / seconds:.1f} tokens/s"
        )

    def _set_cache_config(self, info: EngineInfo) -> None:
        values = {
            "block_size": str(info.page_size),
            "num_gpu_blocks": str(info.num_pages),
            "cache_dtype": info.dtype,
        }
        gauge = Gauge(
            f"{self._prefix}:cache_config_info",
            "The KV cache's settings, as labels.",
            [*self._labels, *values],
            registry=self._registry,
        )
        gauge.labels(**self._labels, **values).set(1)

    def _gauge(self, name: str, help: str) -> Gauge:
        gauge = Gauge(f"{self._prefix}:{name}", help, [*self._labels], registry=self._registry)
        return gauge.labels(**self._labels)

    def _counter(self, name: str, help: str) -> Counter:
        counter = Counter(f"{self._prefix}:{name}", help, [*self._labels], registry=self._registry)
        return counter.labels(**self._labels)

    def _histogram(self, name: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(
            f"{self._prefix}:{name}",
            f"Histogram of {name.replace('_', ' ')}.",
            [*self._labels],
            buckets=buckets,
            registry=self._registry,
        )
        return histogram.labels(**self._labels)


def _lengths(longest: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, ... up to the longest."""
    steps = [digit * 10**power for power in range(10) for digit in (1, 2, 5)]
    return tuple(step for step in steps if step <= longest)
