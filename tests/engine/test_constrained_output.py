"""Whatever the weights say, the output matches: tiny random models under grammars."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_tokenizer import END, write_byte_level

from jaxpaged import LLM, SamplingParams, StructuredOutputs
from jaxpaged.engine.errors import BadRequestError
from jaxpaged.engine.messages import AddRequest, SequenceOutput
from jaxpaged.outputs import CompletionOutput
from tests.engine.harness import LLAMA, drain, write_model

PROMPT = "the quick brown fox"
TRICKY = "😀 👨‍👩‍👧 ďábel"
PATTERN = r"(yes|no), [a-f]{2,12}[0-9]"
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "pattern": "^[a-zď😀]{1,5}$"},
                "size": {"type": "integer", "minimum": 0, "maximum": 999},
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["name", "size", "next"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}

Make = Callable[..., LLM]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Engines of one random model, whose vocabulary is larger than the tokenizer's.

    Pages are few: a full batch is preempted all the time.
    """
    folder: Path = write_byte_level(tmp_path_factory.mktemp("random"))
    write_model(folder, LLAMA, vocab_size=400, max_position_embeddings=160)

    def make(**changes: Any) -> LLM:
        defaults: dict[str, Any] = {
            "load_format": "dummy", "max_num_seqs": 4, "max_num_batched_tokens": 16,
            "enforce_eager": True, "num_gpu_blocks_override": 12, "max_model_len": 160,
        }  # fmt: skip
        return LLM(str(folder), **(defaults | changes))

    return make


@pytest.fixture(scope="module")
def llm(make: Make) -> Iterator[LLM]:
    with make() as llm:
        yield llm


def params(seed: int = 0, max_tokens: int = 130, **fields: Any) -> SamplingParams:
    """Sampling parameters; what StructuredOutputs knows goes there."""
    names = StructuredOutputs.__dataclass_fields__
    wanted = {name: fields.pop(name) for name in list(fields) if name in names}
    constraint = StructuredOutputs(**wanted) if wanted else None
    return SamplingParams(structured_outputs=constraint, seed=seed, max_tokens=max_tokens, **fields)


def choices(llm: LLM, *wishes: SamplingParams, prompt: str = PROMPT) -> list[CompletionOutput]:
    outputs = llm.generate([prompt] * len(wishes), wishes, use_tqdm=False)
    return [choice for output in outputs for choice in output.outputs]


def only(llm: LLM, **fields: Any) -> CompletionOutput:
    (choice,) = choices(llm, params(**fields))
    return choice


KEYS = st.text('abcď"\\ ', min_size=1, max_size=4)
# llguidance rounds larger numbers, as JavaScript does.
VALUES = st.one_of(st.integers(-(2**53), 2**53), st.text(max_size=4), st.none())
LEAVES = st.one_of(
    st.sampled_from([{"type": "boolean"}, {"type": "null"}]),
    st.builds(lambda low, span: {"type": "integer", "minimum": low, "maximum": low + span},
              st.integers(-50, 50), st.integers(0, 200)),
    st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 4)),
    st.builds(lambda values: {"enum": values}, st.lists(VALUES, min_size=1)),
    st.builds(lambda text: {"const": text}, st.text(max_size=5)),
)  # fmt: skip
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(lambda items, n: {"type": "array", "items": items, "maxItems": n},
                  inner, st.integers(0, 3)),
        st.builds(lambda fields, needed: {"type": "object", "properties": fields,
                                          "required": sorted(fields)[:needed],
                                          "additionalProperties": False},
                  st.dictionaries(KEYS, inner, max_size=3), st.integers(0, 3)),
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=6,
)  # fmt: skip


@settings(
    max_examples=12, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(st.lists(SCHEMAS, min_size=3, max_size=3))
def test_any_schema_is_met(llm: LLM, schemas: list[dict[str, Any]]) -> None:
    made = choices(llm, *(params(seed, json=schema) for seed, schema in enumerate(schemas)))
    ended = 0
    for schema, choice in zip(schemas, made, strict=True):
        if choice.finish_reason == "stop":
            jsonschema.validate(json.loads(choice.text), schema)
            ended += 1
    assert ended


@pytest.mark.parametrize("temperature", [0.0, 1.0, 5.0])
def test_every_kind_of_constraint(llm: LLM, temperature: float) -> None:
    lists = 'start: "[" (NUMBER ("," NUMBER)*)? "]"\nNUMBER: /[0-9]{1,3}/'
    regex, choice, tricky, lark, gbnf, tree, anything = choices(
        llm,
        params(regex=PATTERN, temperature=temperature),
        params(choice=["yes", "yes!", "no"], temperature=temperature),
        params(choice=[TRICKY], temperature=temperature),
        params(grammar=lists, temperature=temperature, logit_bias={END: 100}),
        params(grammar='root ::= "a" [0-9] "z"?', temperature=temperature),
        params(json=json.dumps(TREE), temperature=temperature),
        params(json_object=True, temperature=temperature, logit_bias={END: 100}),
    )
    assert re.fullmatch(PATTERN, regex.text) and regex.finish_reason == "stop"
    assert choice.text in ("yes", "yes!", "no") and choice.token_ids[-1] == END
    assert (tricky.text, tricky.finish_reason) == (TRICKY, "stop")
    assert re.fullmatch(r"\[([0-9]{1,3}(,[0-9]{1,3})*)?\]", lark.text)
    assert re.fullmatch("a[0-9]z?", gbnf.text) and gbnf.finish_reason == "stop"
    for text, schema in ((tree, TREE), (anything, {"type": "object"})):
        if text.finish_reason == "stop":
            jsonschema.validate(json.loads(text.text), schema)


WISHES = [
    params(1, regex=PATTERN, max_tokens=60),
    params(2, max_tokens=40),
    params(3, json=TREE, max_tokens=60, logprobs=2),
    params(4, max_tokens=30, temperature=0.0),
    params(5, regex="[ab]{30}", n=3, max_tokens=60),
    params(6, choice=["alpha", "beta"], frequency_penalty=1.0, max_tokens=60),
]


def told(made: list[CompletionOutput]) -> list[tuple[list[int], str | None]]:
    return [(choice.token_ids, choice.finish_reason) for choice in made]


def test_neighbours_chunks_overlap_and_preemption_change_nothing(llm: LLM, make: Make) -> None:
    """A prompt in chunks, more sequences than slots, too few pages; then without overlap."""
    prompt = PROMPT * 3
    alone = [choice for wish in WISHES for choice in choices(llm, wish, prompt=prompt)]
    preempted = llm._core.stats().num_preemptions
    assert told(choices(llm, *WISHES, prompt=prompt)) == told(alone)
    assert llm._core.stats().num_preemptions > preempted
    forks = alone[4:7]
    assert len({fork.text for fork in forks}) == 3
    assert all(re.fullmatch("[ab]{30}", fork.text) for fork in forks)
    with make(async_scheduling=False) as other:
        assert told(choices(other, *WISHES, prompt=prompt)) == told(alone)


def test_what_else_was_wished_holds_within_the_grammar(llm: LLM) -> None:
    digits = "[0-9]{1,9}"
    longest = only(llm, regex=digits, min_tokens=4)
    assert re.fullmatch("[0-9]{3,9}", longest.text)
    forever = only(llm, regex=digits, ignore_eos=True)
    assert re.fullmatch("[0-9]{9}", forever.text) and forever.finish_reason == "stop"
    ended = only(llm, regex="ab", min_tokens=50)
    assert (ended.text, ended.finish_reason, len(ended.token_ids)) == ("ab", "stop", 3)
    assert llm.tokenizer is not None
    (seven,) = llm.tokenizer.encode("7", add_special_tokens=False)
    assert only(llm, regex=digits, bad_words=["7"], ignore_eos=True).text.count("7") == 0
    assert set(only(llm, regex=digits, allowed_token_ids=[seven]).text) == {"7"}
    assert set(only(llm, regex=digits, logit_bias={seven: 100.0}).text) == {"7"}
    nothing_left = only(llm, regex="x[0-9]", allowed_token_ids=[seven])
    assert nothing_left.text == "x7"
    cut = only(llm, regex="a[0-9]{3}b{200}", stop="bb")
    assert re.fullmatch("a[0-9]{3}", cut.text) and cut.stop_reason == "bb"
    stopped = only(llm, regex="[0-9]{200}", stop_token_ids=[seven])
    assert stopped.stop_reason == seven
    short = only(llm, regex="[0-9]{200}", max_tokens=5)
    assert short.finish_reason == "length"
    likely = only(llm, regex="ab", logprobs=0)
    assert likely.logprobs is not None and len(likely.logprobs) == len(likely.token_ids)


def test_streams_match_too(llm: LLM) -> None:
    pieces = [piece.outputs[0].text for piece in llm.stream(PROMPT, params(choice=[TRICKY]))]
    assert "".join(pieces) == TRICKY and not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("bad", [{"regex": "(("}, {"json": {"type": "x"}}, {"grammar": "a"}])
def test_bad_grammars_never_reach_the_core(llm: LLM, bad: dict[str, Any]) -> None:
    with pytest.raises(BadRequestError, match="cannot be constrained") as refused:
        only(llm, **bad)
    assert refused.value.param == "structured_outputs" and not llm._core.has_work


def message(llm: LLM, request_id: str, wish: SamplingParams) -> AddRequest:
    return llm._inputs.request(request_id, PROMPT, wish)


def ends(outputs: list[SequenceOutput]) -> dict[tuple[str, int], str]:
    return {(n.request_id, n.index): n.finish_reason for n in outputs if n.finish_reason}


def test_a_grammar_that_grows_too_complex_ends_alone(llm: LLM) -> None:
    ambiguous = {"type": "object", "properties": {f"p{place}": {} for place in range(900)}}
    core = llm._core
    core.add(message(llm, "bad", params(json=ambiguous, n=2)))
    core.add(message(llm, "good", params(choice=["yes"])))
    outputs = drain(core)
    assert ends(outputs) == {("bad", 0): "error", ("good", 0): "stop"}
    (failed,) = [news for news in outputs if news.error]
    assert "items" in (failed.error or "") and failed.error_code == 400
    assert core.stats().kv_cache_usage == 0


def test_a_grammar_that_the_core_cannot_use_ends_alone(llm: LLM) -> None:
    core = llm._core
    bad = message(llm, "bad", params(choice=["yes"]))
    bad.grammar = "start: nothing"
    core.add(bad)
    core.add(message(llm, "free", params(max_tokens=3, ignore_eos=True)))
    assert ends(drain(core)) == {("bad", 0): "error", ("free", 0): "length"}


def test_abort_while_a_grammar_compiles(llm: LLM) -> None:
    core = llm._core
    slow = {"properties": {f"q{place}": {} for place in range(900)}}
    core.add(message(llm, "slow", params(json=slow, n=2)))
    assert core.has_work and core.stats().num_waiting == 1
    core.abort("slow")
    assert ends(drain(core)) == {("slow", 0): "abort", ("slow", 1): "abort"}
    assert not core.has_work


def test_without_a_tokenizer(make: Make) -> None:
    with (
        make(skip_tokenizer_init=True) as llm,
        pytest.raises(BadRequestError, match="skip_tokenizer_init"),
    ):
        llm.generate([5, 6], params(regex="a"), use_tqdm=False)
