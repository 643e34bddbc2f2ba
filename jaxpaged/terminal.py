"""`jaxpaged generate` and `jaxpaged chat`: an engine in this process, text on the terminal."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

from jaxpaged.engine.errors import BadRequestError
from jaxpaged.engine.llm import LLM
from jaxpaged.outputs import RequestOutput
from jaxpaged.sampling_params import SamplingParams

COMMANDS = "/new begins a new conversation, /quit ends, Ctrl-C stops an answer"


def generate(settings: dict[str, Any], prompts: Sequence[str], sampling: dict[str, Any]) -> int:
    """Print what follows each prompt: one prompt as it comes, several when all are done."""
    with LLM(**settings) as llm:
        params = _params(llm, sampling)
        if len(prompts) == 1:
            _print_stream(llm.stream(prompts[0], params), sys.stdout)
            return 0
        for output in llm.generate(prompts, params):
            print(f"--- {output.prompt}\n{output.outputs[0].text}")
    return 0


def chat(
    settings: dict[str, Any],
    system: str | None,
    sampling: dict[str, Any],
    read: Callable[[str], str] = input,
) -> int:
    """Talk until the input ends.

    Args:
        system: system message of the conversation.
        read: asks for a line.
    """
    with LLM(**settings) as llm:
        # An answer is as long as it fits, unless told.
        params = _params(llm, {"max_tokens": None, **sampling})
        beginning = [{"role": "system", "content": system}] if system else []
        messages = list(beginning)
        print(COMMANDS)
        while True:
            try:
                line = read("> ").strip()
            except (EOFError, KeyboardInterrupt):
                print()
                return 0
            if line == "/quit":
                return 0
            if line == "/new":
                messages = list(beginning)
            elif line:
                messages = _answer(llm, params, messages, line)


def _answer(
    llm: LLM, params: SamplingParams, messages: list[dict[str, str]], line: str
) -> list[dict[str, str]]:
    """Print the answer to a line; the conversation with both, or without if it failed."""
    asked = [*messages, {"role": "user", "content": line}]
    try:
        text = _print_stream(llm.stream_chat(asked, params), sys.stdout)
    except BadRequestError as error:
        print(f"({error}; /new begins a new conversation)")
        return messages
    return [*asked, {"role": "assistant", "content": text}]


def _print_stream(outputs: Iterator[RequestOutput], out: TextIO) -> str:
    """Print pieces of text as they come; all of it. Ctrl-C ends it early."""
    pieces = []
    try:
        for output in outputs:
            pieces.append(output.outputs[0].text)
            out.write(pieces[-1])
            out.flush()
    except KeyboardInterrupt:
        out.write(" ...")
    out.write("\n")
    return "".join(pieces)


def _params(llm: LLM, sampling: dict[str, Any]) -> SamplingParams:
    return dataclasses.replace(llm.default_sampling_params(), **sampling)
