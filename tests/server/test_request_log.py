from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import pytest
from fake_server import Server, eventually, running

from jaxpaged.engine.messages import AddRequest
from jaxpaged.engine.metrics import RequestTimes
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.server.request_log import record

FLAGS = ("--enable-log-requests", "--disable-log-stats", "--api-key", "sesame")
KEY = {"Authorization": "Bearer sesame"}


def request() -> AddRequest:
    params = SamplingParams(max_tokens=3, stop=["secret"])
    return AddRequest(request_id="r", prompt_token_ids=[5] * 4, params=params, arrival_time=10.0)


def lines(server: Server) -> list[dict]:
    found = [re.search(r"request_log: request (\{.*\})$", line.rstrip()) for line in server.lines]
    return [json.loads(line[1]) for line in found if line]


def test_a_record_tells_tokens_and_times():
    times = RequestTimes(
        request(), scheduled=10.5, first_token=11.0, last_token={0: 12.0}, num_generated=2
    )
    assert record(times, "length", 12.25) == {
        "request_id": "r",
        "finish_reason": "length",
        "prompt_tokens": 4,
        "cached_tokens": 0,
        "completion_tokens": 2,
        "n": 1,
        "max_tokens": 3,
        "queue_time": 0.5,
        "prefill_time": 0.5,
        "decode_time": 1.0,
        "time_to_first_token": 1.0,
        "total_time": 2.25,
    }


def test_a_request_that_never_ran_has_no_times():
    found = record(RequestTimes(request()), "abort", 11.0)
    assert found["time_to_first_token"] is None
    assert (found["total_time"], found["finish_reason"]) == (1.0, "abort")


@pytest.fixture(scope="module")
def told(model_folder: Path):
    with running(str(model_folder), *FLAGS, core="--step-seconds 0.01") as server:
        yield server


def test_a_line_for_each_request_without_its_texts(told: Server):
    body = {"prompt": "hush", "max_tokens": 4, "ignore_eos": True, "stop": "psst"}
    headers = {**KEY, "X-Request-Id": "mine"}
    answer = httpx.post(f"{told.url}/v1/completions", json=body, headers=headers).json()
    assert answer["id"] == "cmpl-mine"
    eventually(lambda: lines(told))
    (line,) = lines(told)
    assert line["request_id"] == "cmpl-mine"
    assert (line["prompt_tokens"], line["completion_tokens"]) == (5, 4)
    assert line["finish_reason"] == "length" and line["cached_tokens"] == 2
    assert 0 <= line["time_to_first_token"] <= line["total_time"]
    told.get("/engine_state", headers=KEY)
    told.get("/v1/models?key=sesame", headers=KEY)
    eventually(lambda: any('"GET /v1/models' in line for line in told.lines))
    log = "".join(told.lines)
    assert "/engine_state" not in log  # the page asks it three times a second
    assert not any(word in log for word in ("hush", "psst", "sesame"))


def test_a_client_that_leaves_is_an_abort(told: Server):
    body = {"prompt": "hush", "max_tokens": 200, "ignore_eos": True, "stream": True}
    url = f"{told.url}/v1/completions"
    with httpx.stream("POST", url, json=body, headers={**KEY, "X-Request-Id": "gone"}) as answer:
        next(answer.iter_lines())
    eventually(lambda: any(line["request_id"] == "cmpl-gone" for line in lines(told)))
    (line,) = (line for line in lines(told) if line["request_id"] == "cmpl-gone")
    assert line["finish_reason"] == "abort" and line["completion_tokens"] >= 1
