"""`generate` and `chat` with a stand-in for the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import jaxpaged.terminal
from jaxpaged.engine.errors import BadRequestError
from jaxpaged.outputs import CompletionOutput, RequestOutput
from jaxpaged.sampling_params import SamplingParams


class Echo:
    """Answers with the last thing said, in two pieces; notes what it was asked."""

    asked: list[Any]

    def __init__(self, **settings: Any) -> None:
        Echo.asked = [settings]

    def __enter__(self) -> Echo:
        return self

    def __exit__(self, *error: object) -> None:
        Echo.asked.append("shutdown")

    def default_sampling_params(self) -> SamplingParams:
        return SamplingParams(temperature=0.5)

    def stream(self, prompt: str, params: SamplingParams) -> Iterator[RequestOutput]:
        Echo.asked.append((prompt, params))
        if "too long" in prompt:
            raise BadRequestError("too long")
        yield _output("r", "re: ")
        if "stop me" in prompt:
            raise KeyboardInterrupt
        yield _output("r", prompt)

    def stream_chat(self, messages: list[dict], params: SamplingParams) -> Iterator[RequestOutput]:
        Echo.asked.append([dict(message) for message in messages])
        return self.stream(messages[-1]["content"], params)

    def generate(self, prompts: list[str], params: SamplingParams) -> list[RequestOutput]:
        return [_output(prompt, f"re: {prompt}") for prompt in prompts]


def _output(prompt: str, text: str) -> RequestOutput:
    return RequestOutput("r", prompt, [], [CompletionOutput(0, text)])


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxpaged.terminal, "LLM", Echo)


def typing(*lines: str) -> Callable[[str], str]:
    """An `input` of these lines, then the end of input."""
    left = list(lines)

    def read(prompt: str) -> str:
        if not left:
            raise EOFError
        return left.pop(0)

    return read


def test_one_prompt_streams(capsys: pytest.CaptureFixture[str]):
    sampling = {"max_tokens": 3}
    assert jaxpaged.terminal.generate({"model": "M"}, ["hi"], sampling) == 0
    assert capsys.readouterr().out == "re: hi\n"
    params = SamplingParams(temperature=0.5, max_tokens=3)
    assert Echo.asked == [{"model": "M"}, ("hi", params), "shutdown"]


def test_several_prompts(capsys: pytest.CaptureFixture[str]):
    jaxpaged.terminal.generate({}, ["a", "b"], {})
    assert capsys.readouterr().out == "--- a\nre: a\n--- b\nre: b\n"


def test_a_conversation_grows(capsys: pytest.CaptureFixture[str]):
    assert jaxpaged.terminal.chat({}, "Be brief.", {}, typing("one", "", "two")) == 0
    told = [message for message in Echo.asked if isinstance(message, list)][-1]
    said = [(message["role"], message["content"]) for message in told]
    assert said == [
        ("system", "Be brief."), ("user", "one"), ("assistant", "re: one"), ("user", "two"),
    ]  # fmt: skip
    params = next(item[1] for item in Echo.asked if isinstance(item, tuple))
    assert params.max_tokens is None
    assert "re: two" in capsys.readouterr().out


def test_a_new_conversation():
    jaxpaged.terminal.chat({}, None, {}, typing("one", "/new", "two", "/quit", "three"))
    told = [message for message in Echo.asked if isinstance(message, list)]
    assert told[-1] == [{"role": "user", "content": "two"}]


def test_an_answer_can_be_stopped(capsys: pytest.CaptureFixture[str]):
    jaxpaged.terminal.chat({}, None, {}, typing("stop me", "two"))
    told = [message for message in Echo.asked if isinstance(message, list)][-1]
    assert told[1] == {"role": "assistant", "content": "re: "}
    assert "re: two" in capsys.readouterr().out


def test_a_refused_message_is_forgotten(capsys: pytest.CaptureFixture[str]):
    jaxpaged.terminal.chat({}, None, {}, typing("too long", "two"))
    told = [message for message in Echo.asked if isinstance(message, list)][-1]
    assert told == [{"role": "user", "content": "two"}]
    assert "too long" in capsys.readouterr().out
