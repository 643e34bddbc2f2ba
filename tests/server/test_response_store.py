from __future__ import annotations

from jaxpaged.server.dialogue import said
from jaxpaged.server.parsing.calls import ToolCall
from jaxpaged.server.protocol import ChatMessage
from jaxpaged.server.response_store import OVERHEAD, ResponseStore, StoredResponse
from jaxpaged.server.responses_protocol import Reasoning, ResponsesResponse, TextSettings


def stored(response_id: str, text: str = "x") -> StoredResponse:
    response = ResponsesResponse(
        id=response_id, instructions=None, max_output_tokens=None, metadata={}, model="M",
        parallel_tool_calls=True, previous_response_id=None, prompt_cache_key=None,
        reasoning=Reasoning(), safety_identifier=None, store=True, temperature=1.0,
        text=TextSettings(), top_logprobs=0, top_p=1.0,
    )  # fmt: skip
    return StoredResponse(response, [ChatMessage(role="user", content=text)])


def test_the_least_recently_used_goes_first():
    size = stored("a").size
    store = ResponseStore(max_bytes=2 * size + OVERHEAD)
    store.put(stored("a"))
    store.put(stored("b"))
    assert store.get("a") is not None
    store.put(stored("c"))
    assert [store.get(name) is not None for name in "abc"] == [True, False, True]


def test_what_is_larger_than_the_store_is_not_kept():
    store = ResponseStore(max_bytes=10 * OVERHEAD)
    store.put(stored("small"))
    store.put(stored("large", "x" * 20 * OVERHEAD))
    assert store.get("large") is None and store.get("small") is not None


def test_arguments_of_calls_count():
    arguments = "x" * OVERHEAD
    call = said("", [ToolCall("f", arguments, "call_1")])
    size = StoredResponse(stored("a").response, [call]).size
    assert size > stored("a").size + len(arguments)


def test_time_passes():
    now = 0.0
    store = ResponseStore(seconds=10, now=lambda: now)
    store.put(stored("a"))
    now = 9.0
    assert store.get("a") is not None
    now = 11.0
    assert store.get("a") is None
    assert not store.delete("a")
