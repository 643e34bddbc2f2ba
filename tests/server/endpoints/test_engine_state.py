from __future__ import annotations

import threading
from base64 import b64decode

from fake_core import NUM_PAGES
from fake_server import Server, eventually


def cells(state: dict) -> bytes:
    return b64decode(state["pool"]["cells"])


def test_an_idle_engine_has_free_pages(server: Server):
    state = server.get("/engine_state").json()
    assert state["model"] == "M"
    assert (state["num_pages"], state["page_size"]) == (NUM_PAGES, 16)
    assert cells(state) == bytes(NUM_PAGES)
    assert state["pool"]["stride"] == 1 and state["pool"]["sequences"] == []


def test_sums_grow(server: Server):
    before = server.get("/engine_state").json()
    server.post("/v1/completions", prompt="hello", max_tokens=4, ignore_eos=True)
    after = server.get("/engine_state").json()
    assert after["time"] > before["time"]
    assert after["first_tokens"] == before["first_tokens"] + 1
    assert after["first_token_seconds"] > before["first_token_seconds"]
    assert after["generation_tokens"] == before["generation_tokens"] + 4
    assert after["prompt_tokens"] > before["prompt_tokens"]


def test_who_runs_holds_pages(slow_server: Server):
    body = {"prompt": [5], "max_tokens": 50, "request_id": "mine"}
    work = threading.Thread(target=slow_server.post, args=("/v1/completions",), kwargs=body)
    work.start()
    states: list[dict] = []

    def held() -> bool:
        states.append(slow_server.get("/engine_state").json())
        return bool(states[-1]["pool"]["sequences"])

    eventually(held)
    state = states[-1]
    (owner,) = state["pool"]["sequences"]
    assert owner["request_id"].startswith("cmpl-mine-")
    assert cells(state)[0] == 4
    assert state["num_requests_running"] == 1
    work.join()
