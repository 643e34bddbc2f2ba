"""`jaxpaged serve` as its users run it: the built-in model, the real core, official clients."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Literal

import anthropic
import httpx
import numpy as np
import pydantic
import pytest
from live_server import Serving

from jaxpaged.model_files import DEMO_MODEL


def test_the_ready_line_names_url_model_pages_and_buckets(serving: Serving) -> None:
    (line,) = re.findall(rf"^.*{re.escape(serving.url)}.*$", serving.text, re.M)[:1]
    assert "demo" in line and "pages" in line and "buckets" in line


def test_the_openai_client_chats_streams_and_completes(serving: Serving) -> None:
    client = serving.client
    assert [model.id for model in client.models.list()] == ["demo"]
    asked = {
        "model": "demo",
        "messages": [{"role": "user", "content": "Good morrow!"}],
        "max_tokens": 24,
        "temperature": 0.7,
        "seed": 5,
    }
    whole = client.chat.completions.create(**asked)  # type: ignore[call-overload]
    pieces = client.chat.completions.create(**asked, stream=True)  # type: ignore[call-overload]
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in pieces)
    assert streamed == whole.choices[0].message.content != ""
    completion = client.completions.create(model="demo", prompt="To be", max_tokens=5, n=2)
    assert [choice.index for choice in completion.choices] == [0, 1]
    assert completion.usage is not None and completion.usage.completion_tokens <= 10


def test_a_call_is_enforced_of_any_model(serving: Serving) -> None:
    city = {"enum": ["Oslo", "Paris"]}
    days = {"type": "integer", "minimum": 1, "maximum": 9}
    schema = {
        "type": "object",
        "properties": {"city": city, "days": days},
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {"name": "weather", "parameters": schema}}]
    named = {"type": "function", "function": {"name": "weather"}}
    asked = {"model": "demo", "messages": [{"role": "user", "content": "Oslo?"}], "seed": 1}
    for choice in ("required", named):
        body = asked | {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
        whole = serving.client.chat.completions.create(**body).choices[0]  # type: ignore[call-overload]
        assert whole.finish_reason == "tool_calls" and whole.message.content is None
        (call,) = whole.message.tool_calls
        arguments = json.loads(call.function.arguments)
        assert arguments["city"] in city["enum"] and 1 <= arguments["days"] <= 9
        with serving.client.chat.completions.stream(**body) as events:
            streamed = events.get_final_completion().choices[0].message.tool_calls[0].function
        assert (streamed.name, streamed.arguments) == ("weather", call.function.arguments)


def test_concurrent_requests_get_what_they_get_alone(serving: Serving) -> None:
    def answer(i: int) -> str:
        return (
            serving.client.completions.create(
                model="demo", prompt="The king " * (i + 1), max_tokens=20, temperature=0.9, seed=i
            )
            .choices[0]
            .text
        )

    alone = [answer(i) for i in range(6)]
    together: dict[int, str] = {}
    threads = [
        threading.Thread(target=lambda i=i: together.__setitem__(i, answer(i)))  # type: ignore[misc]
        for i in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[i] for i in range(6)] == alone
    assert serving.gauge("step_compilations") == 0


def test_every_api_answers_alike(serving: Serving) -> None:
    text = "Who art thou?"
    chat = serving.client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": text}], max_tokens=12, temperature=0
    )
    said = chat.choices[0].message.content
    response = serving.client.responses.create(
        model="demo", input=text, max_output_tokens=12, temperature=0
    )
    assert response.output_text == said != ""
    claude = anthropic.Anthropic(base_url=serving.url, api_key="none", max_retries=0)
    with claude.messages.stream(
        model="demo",
        messages=[{"role": "user", "content": text}],
        max_tokens=12,
        extra_body={"temperature": 0},
    ) as stream:
        assert stream.get_final_text() == said


def test_embeddings_follow_the_text_alone(serving: Serving) -> None:
    def embed(*texts: str) -> np.ndarray:
        found = serving.client.embeddings.create(model="demo", input=list(texts))
        return np.array([item.embedding for item in found.data])

    long = "The king is dead, long live the king! " * 20
    vectors = embed("To be", "or not to be", long, "To be")
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(vectors[3], vectors[0], atol=1e-4)
    assert np.abs(vectors[1] - vectors[0]).max() > 0.01
    np.testing.assert_allclose(embed(long)[0], vectors[2], atol=1e-4)  # from the cache
    assert httpx.post(serving.url + "/reset_prefix_cache").json() == {"success": True}
    np.testing.assert_allclose(embed(long)[0], vectors[2], atol=1e-4)
    state = httpx.get(serving.url + "/server_info").json()["engine_stats"]
    assert state["prefix_cache_epoch"] == 1  # what routers forget their guesses by
    assert serving.gauge("step_compilations") == 0


class Character(pydantic.BaseModel):
    """What a model of 4M parameters is asked for, so that even its output has an end."""

    name: Annotated[str, pydantic.StringConstraints(pattern="^[A-Z][a-z]{2,8}$")]
    house: Literal["Montague", "Capulet"]
    age: Annotated[int, pydantic.Field(ge=0, le=99)]
    friend: str | None = pydantic.Field(max_length=5)


def test_structured_outputs_with_the_openai_client(serving: Serving) -> None:
    asked = {"model": "demo", "messages": [{"role": "user", "content": "Who art thou?"}]}
    parsed = serving.client.chat.completions.parse(
        **asked, response_format=Character, n=3, seed=1, max_tokens=300
    )  # type: ignore[call-overload]
    assert [type(choice.message.parsed) for choice in parsed.choices] == [Character] * 3
    assert {choice.finish_reason for choice in parsed.choices} == {"stop"}
    with serving.client.chat.completions.stream(
        **asked, response_format=Character, seed=1, max_tokens=300
    ) as stream:  # type: ignore[call-overload]
        streamed = stream.get_final_completion().choices[0].message.parsed
    assert streamed == parsed.choices[0].message.parsed


def test_a_tricky_choice_streamed(serving: Serving) -> None:
    text = "😀 👨‍👩‍👧 ďábel"
    asked = {
        "model": "demo",
        "messages": [{"role": "user", "content": "x"}],
        "extra_body": {"structured_outputs": {"choice": [text]}},
    }
    whole = serving.client.chat.completions.create(**asked)  # type: ignore[call-overload]
    assert whole.choices[0].message.content == text
    chunks = list(serving.client.chat.completions.create(**asked, stream=True))  # type: ignore[call-overload]
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(pieces) == text and not any("\ufffd" in piece for piece in pieces)
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["stop"]


def test_constrained_and_free_completions_at_once(serving: Serving) -> None:
    def ask(place: int, constrained: bool) -> str:
        extra = {"structured_outputs": {"regex": "[0-9]{3,20}"}} if constrained else {}
        answer = serving.client.completions.create(
            model="demo", prompt=f"Act {place}", max_tokens=20, seed=place, extra_body=extra
        )
        return answer.choices[0].text

    alone = [ask(place, False) for place in range(4)]
    with ThreadPoolExecutor(8) as threads:
        free = [threads.submit(ask, place, False) for place in range(4)]
        constrained = [threads.submit(ask, place, True) for place in range(4)]
        assert [future.result() for future in free] == alone
        assert all(re.fullmatch("[0-9]{1,20}", future.result()) for future in constrained)
    assert serving.gauge("step_compilations") == 0


def test_a_client_that_goes_away_is_aborted(serving: Serving) -> None:
    body = {
        "model": "demo",
        "prompt": "Once",
        "max_tokens": 500,
        "ignore_eos": True,
        "stream": True,
    }
    with (
        httpx.Client() as http,
        http.stream("POST", serving.url + "/v1/completions", json=body) as response,
    ):
        next(response.iter_lines())
    deadline = time.monotonic() + 10
    while serving.gauge("num_requests_running") or serving.gauge("kv_cache_usage_perc"):
        assert time.monotonic() < deadline, "still running ten seconds after the client left"
        time.sleep(0.05)
    assert "Traceback" not in serving.text


def test_the_page_pool_is_on_show(serving: Serving) -> None:
    def state() -> dict:
        return httpx.get(serving.url + "/engine_state").json()

    assert state()["pool"]["sequences"] == []
    stream = serving.client.completions.create(
        model="demo", prompt="Once", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    answer_id = next(iter(stream)).id
    while not (running := state())["pool"]["sequences"]:  # a picture serves for a while
        time.sleep(0.05)
    (owner,) = running["pool"]["sequences"]
    assert owner["request_id"].startswith(answer_id)
    assert len(owner["table"]) == owner["num_pages"] >= 1
    cells = base64.b64decode(running["pool"]["cells"])
    drawn = [page for page in owner["table"] if (page - 1) % running["pool"]["stride"] == 0]
    assert [cells[(page - 1) // running["pool"]["stride"]] for page in drawn] == [4] * len(drawn)
    stream.close()


def test_bad_requests_leave_a_server_that_serves(serving: Serving) -> None:
    for path, body in [
        ("/v1/completions", {"model": "nobody", "prompt": "x"}),
        ("/v1/completions", {"model": "demo", "prompt": "x", "logit_bias": {"99999": 1}}),
        ("/v1/completions", {"model": "demo", "prompt": "x", "max_tokens": 600}),
        ("/v1/completions", {"model": "demo", "prompt": [1, -1]}),
        ("/v1/chat/completions", {"model": "demo", "messages": "x"}),
        ("/v1/chat/completions", {"model": "demo", "messages": [], "temperature": -1}),
        ("/v1/nothing", {}),
    ]:
        answer = httpx.post(serving.url + path, json=body)
        assert 400 <= answer.status_code < 500, (path, body, answer.text)
        error = answer.json()["error"]
        assert error["message"] and error["code"] == answer.status_code
        good = serving.client.completions.create(model="demo", prompt="x", max_tokens=5)
        assert good.usage is not None


def test_sigterm_ends_everything(tmp_path: Path) -> None:
    serving = Serving(log=tmp_path / "log")
    core = serving.core_pid()
    serving.process.send_signal(signal.SIGTERM)
    assert serving.process.wait(timeout=20) == 0, serving.text
    with pytest.raises(ProcessLookupError):
        os.kill(core, 0)
    assert "Traceback" not in serving.text


def test_a_dead_engine_says_so_and_exits(tmp_path: Path) -> None:
    serving = Serving(log=tmp_path / "log")
    body = {"model": "demo", "prompt": "Once", "max_tokens": 500, "ignore_eos": True}
    answers: list[httpx.Response] = []

    def ask() -> None:
        answers.append(httpx.post(serving.url + "/v1/completions", json=body, timeout=60))

    thread = threading.Thread(target=ask)
    thread.start()
    while not serving.gauge("num_requests_running"):
        time.sleep(0.02)
    os.kill(serving.core_pid(), signal.SIGKILL)
    thread.join()
    assert answers[0].status_code in (500, 503)
    assert answers[0].json()["error"]["code"] == answers[0].status_code
    assert serving.process.wait(timeout=20) != 0


def test_two_engines_give_the_tokens_of_one(serving: Serving, tmp_path: Path) -> None:
    two = Serving("-dp", "2", log=tmp_path / "log")

    def answers(where: Serving, place: int) -> list[str]:
        prompt = f"Act {place}. " + "Enter the king, and after him the whole of his court. " * 3
        made = where.client.completions.create(
            model="demo", prompt=prompt, max_tokens=16, temperature=0, n=2
        )
        return [choice.text for choice in made.choices]

    with ThreadPoolExecutor(6) as threads:
        ones, twos = (
            list(threads.map(lambda place, where=where: answers(where, place % 5), range(10)))
            for where in (serving, two)
        )
    assert ones == twos
    metrics = httpx.get(two.url + "/metrics").text
    made = re.findall(r'^jaxpaged:generation_tokens_total{engine="(.)".*} (\S+)$', metrics, re.M)
    assert [number for number, _ in made] == ["0", "1"]
    assert all(float(count) > 0 for _, count in made)
    two.process.send_signal(signal.SIGTERM)
    assert two.process.wait(timeout=20) == 0, two.text


def test_settings_that_cannot_work_are_one_line(tmp_path: Path) -> None:
    empty, foreign = tmp_path / "empty", tmp_path / "foreign"
    empty.mkdir()
    shutil.copytree(DEMO_MODEL, foreign)
    (foreign / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}))
    for args, words in [
        ([str(tmp_path / "nowhere")], "nowhere"),
        ([str(empty)], "tokenizer"),
        ([str(foreign)], "GPT2LMHeadModel"),
        (["--max-model-len", "9k"], "9000"),
        (["--num-gpu-blocks-override", "3"], "To serve at least one request"),
    ]:
        found = subprocess.run(
            [sys.executable, "-m", "jaxpaged", "serve", "--port", "0", *args],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert found.returncode not in (0, -signal.SIGKILL)
        (line,) = [text for text in found.stderr.splitlines() if text.startswith("jaxpaged: ")]
        assert words in line
        assert "Traceback" not in found.stderr, found.stderr
