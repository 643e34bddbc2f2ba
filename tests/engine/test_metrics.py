from __future__ import annotations

import pytest

from jaxpaged.engine.messages import AddRequest, EngineInfo, EngineStats, SequenceOutput
from jaxpaged.engine.metrics import Metrics, MetricsRegistry, RequestTimes
from jaxpaged.sampling_params import SamplingParams

NAMES = """
num_requests_running num_requests_waiting kv_cache_usage_perc cache_config_info
prefix_cache_queries_total prefix_cache_hits_total num_preemptions_total prompt_tokens_total
prompt_tokens_cached_total generation_tokens_total request_success_total
time_to_first_token_seconds_bucket inter_token_latency_seconds_bucket
request_time_per_output_token_seconds_bucket e2e_request_latency_seconds_bucket
request_queue_time_seconds_bucket request_inference_time_seconds_bucket
request_prefill_time_seconds_bucket request_decode_time_seconds_bucket
request_prompt_tokens_bucket request_generation_tokens_bucket request_params_n_bucket
request_params_max_tokens_bucket iteration_tokens_total_bucket
step_compilations step_bucket_padding_ratio_bucket host_gap_seconds_bucket
device_step_seconds_bucket engine_up
"""


def series(registry: MetricsRegistry, prefix: str = "jaxpaged") -> dict[str, float]:
    """Values by name and labels, those that every series has left out."""
    found = {}
    for line in registry.text().decode().splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            assert name.startswith(prefix + ":")
            assert 'model_name="m"' in name
            name = name.removeprefix(prefix + ":").replace('engine="0"', "")
            name = name.replace('model_name="m"', "").replace("{,", "{").replace(",}", "}")
            found[name.replace(",,", ",").replace("{}", "")] = float(value)
    return found


def made(info: EngineInfo, prefix: str = "jaxpaged") -> tuple[MetricsRegistry, Metrics]:
    registry = MetricsRegistry("m", prefix)
    return registry, Metrics(registry, info)


def request(prompt_len: int = 10, n: int = 1) -> RequestTimes:
    return RequestTimes(
        AddRequest(
            request_id="r",
            prompt_token_ids=[5] * prompt_len,
            params=SamplingParams(max_tokens=3, n=n),
            arrival_time=100.0,
        )
    )


def news(index: int = 0, **once: float) -> SequenceOutput:
    return SequenceOutput(request_id="r", index=index, token_ids=[7], **once)


@pytest.mark.parametrize("prefix", ["jaxpaged", "vllm"])
def test_every_name_is_there_under_one_prefix(info: EngineInfo, prefix: str):
    names = {name.split("{")[0] for name in series(made(info, prefix)[0], prefix)}
    assert set(NAMES.split()) - names == set()
    assert not any(name.endswith("_created") for name in names)


def test_bucket_bounds(info: EngineInfo):
    registry, metrics = made(info)
    found = series(registry)

    def bounds(name: str) -> list[float]:
        start = f'{name}_bucket{{le="'
        return [float(key[len(start) : -2]) for key in found if key.startswith(start)]

    assert bounds("time_to_first_token_seconds")[:4] == [0.001, 0.005, 0.01, 0.02]
    assert bounds("time_to_first_token_seconds")[-2] == 2560
    assert bounds("inter_token_latency_seconds")[-2] == 80
    assert bounds("e2e_request_latency_seconds")[-2] == 7680
    assert bounds("request_prompt_tokens")[-2] == 50  # the longest is 64


def test_a_request_is_timed(info: EngineInfo):
    registry, metrics = made(info)
    times = request()
    first = news(scheduled_time=101.0, num_cached_tokens=4)
    for event, now in ((first, 103.0), (news(), 103.5), (news(), 104.5)):
        metrics.tokens(times, event, now)
    metrics.finish(times, "length")
    found = series(registry)
    sums = {
        "time_to_first_token_seconds": 3.0,
        "inter_token_latency_seconds": 1.5,
        "request_time_per_output_token_seconds": 0.75,
        "e2e_request_latency_seconds": 4.5,
        "request_queue_time_seconds": 1.0,
        "request_inference_time_seconds": 3.5,
        "request_prefill_time_seconds": 2.0,
        "request_decode_time_seconds": 1.5,
        "request_prompt_tokens": 10,
        "request_generation_tokens": 3,
        "request_params_max_tokens": 3,
        "request_params_n": 1,
    }
    assert {name: found[f"{name}_sum"] for name in sums} == sums
    assert found["inter_token_latency_seconds_count"] == 2
    assert found["prompt_tokens_total"] == 10
    assert found["prompt_tokens_cached_total"] == 4
    assert found["generation_tokens_total"] == 3
    assert found['request_success_total{finished_reason="length"}'] == 1


def test_choices_do_not_mix_their_latencies(info: EngineInfo):
    registry, metrics = made(info)
    times = request(n=2)
    for index, now in ((0, 101.0), (1, 101.0), (0, 102.0), (1, 104.0)):
        metrics.tokens(times, news(index), now)
    found = series(registry)
    assert found["inter_token_latency_seconds_sum"] == 1.0 + 3.0
    assert found["time_to_first_token_seconds_count"] == 1


def test_a_request_without_a_token_has_no_latency(info: EngineInfo):
    registry, metrics = made(info)
    metrics.finish(request(), "abort")
    found = series(registry)
    assert found['request_success_total{finished_reason="abort"}'] == 1
    assert found["e2e_request_latency_seconds_count"] == 0


def test_counters_follow_the_engine(info: EngineInfo):
    registry, metrics = made(info)
    step = EngineStats(num_running=2, kv_cache_usage=0.5, prefix_cache_queries=30)
    metrics.step(step)
    metrics.step(EngineStats(prefix_cache_queries=50, num_preemptions=1, step_compilations=1))
    found = series(registry)
    assert found["prefix_cache_queries_total"] == 50
    assert found["num_preemptions_total"] == 1
    assert (found["num_requests_running"], found["kv_cache_usage_perc"]) == (0, 0)
    assert found["step_compilations"] == 1


def test_a_step_is_observed_once(info: EngineInfo):
    registry, metrics = made(info)
    metrics.step(EngineStats(iteration_tokens=3, bucket_tokens=4, device_step_seconds=0.5))
    metrics.step(EngineStats())
    found = series(registry)
    assert found["iteration_tokens_total_count"] == 1
    assert found["step_bucket_padding_ratio_sum"] == 0.25
    assert found["device_step_seconds_sum"] == 0.5
