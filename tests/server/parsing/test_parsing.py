from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxpaged.server.parsing import CALL_FORMATS, REASONING_FORMATS
from jaxpaged.server.parsing.answer import AnswerParser, Parts
from jaxpaged.server.parsing.enforced import EnforcedCalls
from jaxpaged.server.parsing.reasoning import left_open
from jaxpaged.server_config import REASONING_PARSERS, TOOL_CALL_PARSERS

NAMES = frozenset({"f", "get_weather"})
A = '{"name": "f", "arguments": {"x": 1}}'
B = '{"name": "g", "arguments": {"text": "a \\"}</tool_call> [ {"}}'
T, E, P, M = "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]"
LLAMA = '{"name": "f", "parameters": {"x": 1}}'
CALL_A = ("f", '{"x": 1}')
CALL_B = ("g", '{"text": "a \\"}</tool_call> [ {"}')


def parser(form: str | None, thinking: str | None = None, opened: bool | None = None):
    thoughts = None if thinking is None else REASONING_FORMATS[thinking](opened)
    return AnswerParser(thoughts, None if form is None else CALL_FORMATS[form].parser(NAMES))


def feed(parser: AnswerParser, *deltas: str) -> Parts:
    """All that the deltas give."""
    whole = Parts()
    for part in [parser.feed(delta) for delta in deltas] + [parser.feed("", final=True)]:
        whole.content += part.content
        whole.reasoning += part.reasoning
        whole.calls += part.calls
    return whole


def cut(text: str, places: list[int]) -> list[str]:
    ends = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in zip(ends, ends[1:], strict=False)]


CASES = [
    ("hermes", "hello", "hello", []),
    ("hermes", " hello \n", " hello \n", []),
    ("hermes", f"{T}\n{A}\n{E}", "", [CALL_A]),
    ("hermes", f"{T}{A}{E}\n{T}\n{B}\n{E}\n", "", [CALL_A, CALL_B]),
    ("hermes", f"Let me see.\n{T}{A}{E}", "Let me see.", [CALL_A]),
    ("hermes", f"one {T}{A}{E} two", "one  two", [CALL_A]),
    ("hermes", f"\n{T}{A}{E}\n two", "two", [CALL_A]),
    ("hermes", f"{T}{A}", "", [CALL_A]),
    ("hermes", f"{T}{A}{T}{B}", "", [CALL_A, CALL_B]),
    ("hermes", T + '{"name": "f"}' + E, "", [("f", "{}")]),
    ("hermes", T + '{"arguments": null, "name": "f"}' + E, "", [("f", "{}")]),
    ("hermes", T + '{"name": "f", "arguments": "{\\"x\\": 1}"}' + E, "", [CALL_A]),
    ("hermes", T + '{"name": "é", "arguments": {"é": "日\\n"}}', "", [("é", '{"é": "日\\n"}')]),
    ("hermes", f"{T}{A[:-1]}{E}{T}{A}{E}", f"{T}{A[:-1]}{E}", [CALL_A]),
    ("hermes", f"{T}{A[:-5]}", f"{T}{A[:-5]}", []),
    ("hermes", f"<tool_{T}{A}", "<tool_", [CALL_A]),
    ("hermes", T + "{'name': 'f'}" + E, T + "{'name': 'f'}" + E, []),
    ("hermes", T + '{"name": "f", "arguments": [1]}', T + '{"name": "f", "arguments": [1]}', []),
    ("hermes", T + '{"name": "f", "arguments": {"a": 01}}' + E, None, []),
    ("hermes", T + '{"name": "f", "arguments": {"a": NaN}}' + E, None, []),
    ("hermes", T + '{"name": "f", "arguments": {"a": 1e999}}' + E, None, []),
    ("hermes", T + '{"name": "", "arguments": {}}' + E, None, []),
    ("hermes", T + '{"name": "f", "arguments": ' + '{"a":' * 5000 + "1" + "}" * 5001 + E, None, []),
    ("hermes", T + '{"name": "f", "arguments": "oops"}' + E, None, []),
    ("hermes", T + '{"name": "f", "arguments": {"a": "x', None, []),
    ("hermes", T + '{"a\\', None, []),
    ("hermes", T, None, []),
    ("hermes", E, None, []),
    ("hermes", "{}", None, []),
    ("llama3_json", LLAMA, "", [CALL_A]),
    ("llama3_json", f" {LLAMA}; {LLAMA}\n", "", [CALL_A, CALL_A]),
    ("llama3_json", f"{P}{LLAMA}", "", [CALL_A]),
    ("llama3_json", f"Sure. {P}{LLAMA};{LLAMA}", "Sure.", [CALL_A, CALL_A]),
    ("llama3_json", f"{P}{LLAMA.replace('f', 'h')}", "", [("h", '{"x": 1}')]),
    ("llama3_json", LLAMA.replace("f", "h"), None, []),
    ("llama3_json", '{"name": "Bob", "age": 3}', None, []),
    ("llama3_json", '\n{"a": [1, 2]} ', None, []),
    ("llama3_json", f"see {LLAMA}", None, []),
    ("llama3_json", f"{LLAMA} and more", "and more", [CALL_A]),
    ("llama3_json", P + 'search.call(query="x")', None, []),
    ("llama3_json", LLAMA[:-1], None, []),
    ("mistral", f"{M}[{A}]", "", [CALL_A]),
    ("mistral", f"{M} [{A}, {B}]", "", [CALL_A, CALL_B]),
    ("mistral", f'{M}f[ARGS]{{"x": 1}}', "", [CALL_A]),
    ("mistral", f'{M}f{{"x": 1}}', "", [CALL_A]),
    ("mistral", f'ok {M}f[CALL_ID]abc123def[ARGS] {{"x": 1}}{M}f{{"x": 1}}', "ok", [CALL_A] * 2),
    ("mistral", f"{M}[{A}", None, []),
    ("mistral", f"{M}[{A}, 1]", None, []),
    ("mistral", f"{M}[]", None, []),
    ("mistral", f"{M}f", None, []),
    ("mistral", f'{M}f g{{"x": 1}}', None, []),
    ("mistral", M + " " * 2000 + 'f{"x": 1}', None, []),
    ("mistral", f'{M}f[ARGS]"x"', None, []),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES)
def test_calls(form: str, text: str, content: str | None, calls: list[tuple[str, str]]):
    expected = text if content is None else content
    for deltas in ([text], list(text)):
        found = feed(parser(form), *deltas)
        assert found.content == expected
        assert [(call.name, call.arguments) for call in found.calls] == calls


PIECES = st.sampled_from([
    T, E, P, M, A, B, LLAMA, "[ARGS]", "[CALL_ID]", "f", "{", "}", "[", "]", '"', "\\", ":", ";",
    ",", " ", "\n", "<", "{}", "x", "é", "<think>", "</think>", '{"name": "f", "arguments": ',
    "null", "1e5", "</", "<|", f"{M}f[ARGS]{{}}", f"[{A}]",
])  # fmt: skip
TEXTS = st.lists(PIECES, max_size=14).map("".join)


@given(
    text=TEXTS,
    places=st.lists(st.integers(0, 200), max_size=8),
    form=st.sampled_from([None, "hermes", "llama3_json", "mistral"]),
    thinking=st.sampled_from([None, "deepseek_r1", "qwen3"]),
    opened=st.sampled_from([None, True, False]),
)
@example(f"<think>\n\na\n</think>\n\n{T}{A}{E}", [7, 8, 9, 10, 11, 20, 30], "hermes", "qwen3", None)
@settings(max_examples=400, deadline=None)
def test_any_split_gives_the_same(
    text: str, places: list[int], form: str | None, thinking: str | None, opened: bool | None
):
    whole = feed(parser(form, thinking, opened), text)
    for deltas in (cut(text, places), list(text)):
        assert feed(parser(form, thinking, opened), *deltas) == whole
    last = parser(form, thinking, opened).feed(text, final=True)
    assert last == whole
    for call in whole.calls:
        assert isinstance(json.loads(call.arguments), dict)
    if form is None and thinking is None:
        assert whole.content == text
    if not whole.calls and thinking is None:
        assert whole.content == text, "what is no call is content, to the letter"


ARGUMENTS = st.dictionaries(
    st.text(max_size=5),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(max_size=8) | st.sampled_from([T, E, P, M, '"', "\\", "}", "]"]),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
        max_leaves=5,
    ),
    max_size=4,
)  # fmt: skip


@given(
    calls=st.lists(ARGUMENTS, min_size=1, max_size=3),
    ascii_only=st.booleans(),
    indent=st.sampled_from([None, 2]),
    size=st.integers(1, 9),
)
@settings(max_examples=40, deadline=None)
def test_what_models_write_is_read(calls: list[dict], ascii_only: bool, indent: int | None, size):
    def write(value: object) -> str:
        return json.dumps(value, ensure_ascii=ascii_only, indent=indent)

    written = [write({"name": "f", "arguments": arguments}) for arguments in calls]
    listed = write([{"name": "f", "arguments": arguments} for arguments in calls])
    for form, text in (
        ("hermes", "\n".join(f"{T}\n{call}\n{E}" for call in written)),
        ("llama3_json", "; ".join(written)),
        ("llama3_json", P + ";".join(written)),
        ("mistral", M + listed),
        ("mistral", "".join(f"{M}f[ARGS]{write(arguments)}" for arguments in calls)),
    ):
        deltas = [text[start : start + size] for start in range(0, len(text), size)]
        found = feed(parser(form), *deltas)
        assert found.content == ""
        assert [json.loads(call.arguments) for call in found.calls] == calls


@pytest.mark.parametrize(
    ("form", "opened", "text", "reasoning", "content"),
    [
        ("qwen3", None, "<think>\nwell\n\nyes\n</think>\n\nhi\n", "well\n\nyes", "hi\n"),
        ("qwen3", None, "hi", "", "hi"),
        ("qwen3", None, " hi </think> ", "", " hi </think> "),
        ("qwen3", None, "<think>cut\n", "cut", ""),
        ("qwen3", None, "<think></think>hi", "", "hi"),
        ("qwen3", None, "I say <think>", "", "I say <think>"),
        ("qwen3", True, "well</think>hi", "well", "hi"),
        ("qwen3", False, "hi", "", "hi"),
        ("deepseek_r1", None, "well\n</think>\n\nhi <think>", "well", "hi <think>"),
        ("deepseek_r1", None, "<think>\nwell</think>hi", "well", "hi"),
        ("deepseek_r1", None, "well </th", "well </th", ""),
        ("deepseek_r1", False, "hi", "", "hi"),
        ("deepseek_r1", True, "", "", ""),
    ],
)
def test_reasoning(form: str, opened: bool | None, text: str, reasoning: str, content: str):
    for deltas in ([text], list(text)):
        found = feed(parser(None, form, opened), *deltas)
        assert (found.reasoning, found.content) == (reasoning, content)


@pytest.mark.parametrize(
    ("prompt", "continued", "expected"),
    [
        ("user: hi assistant: <think>\n", None, True),
        ("assistant: <think>\n\n</think>\n\n", None, False),
        ("user: what is <think>? assistant:", None, None),
        ("assistant: <think>a", "<think>a", True),
        ("assistant: <think>a</think>b", "<think>a</think>b", False),
        ("assistant: well", "well", False),
        ("assistant: ", "", None),
    ],
)
def test_what_the_prompt_left_open(prompt: str, continued: str | None, expected: bool | None):
    assert left_open(prompt, continued) is expected


def test_calls_behind_thoughts():
    found = feed(parser("hermes", "qwen3"), f"<think>{T}{A}</think>\n\n{T}{A}{E}")
    assert found == Parts("", T + A, found.calls)
    assert len(found.calls) == 1


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        (None, f"[{A}, {B}]", [CALL_A, CALL_B]),
        (None, f"[{LLAMA}]", [CALL_A]),
        ("f", ' {"x": 1}\n', [CALL_A]),
        (None, f"[{A}, ", []),
        ("f", '{"x": ', []),
        ("f", "", []),
    ],
)
def test_what_a_grammar_enforced(name: str | None, text: str, calls: list[tuple[str, str]]):
    for deltas in ([text], list(text)):
        found = feed(AnswerParser(calls=EnforcedCalls(name)), *deltas)
        assert [(call.name, call.arguments) for call in found.calls] == calls
        assert found.content == ("" if calls else text)


def test_only_the_first_call():
    single = AnswerParser(calls=CALL_FORMATS["hermes"].parser(NAMES), single=True)
    found = feed(single, f"{T}{A}{E}{T}", f"{B}{E}")
    assert [call.name for call in found.calls] == ["f"]
    assert found.content == ""


def test_ids():
    found = feed(parser("hermes"), f"{T}{A}{E}{T}{A}{E}").calls
    assert len({call.id for call in found}) == 2
    assert all(call.id.startswith("chatcmpl-tool-") for call in found)
    for text in (f"{M}[{A}]", f"{M}f[ARGS]{{}}"):
        identity = feed(parser("mistral"), text).calls[0].id
        assert len(identity) == 9 and identity.isalnum(), "as Mistral's templates ask for"
    assert feed(parser("mistral"), f"{M}f[CALL_ID]abc123def[ARGS]{{}}").calls[0].id == "abc123def"


def test_the_settings_offer_what_there_is():
    assert set(TOOL_CALL_PARSERS) == set(CALL_FORMATS)
    assert set(REASONING_PARSERS) == set(REASONING_FORMATS)
