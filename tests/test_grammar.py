"""From what a request asks for to a matcher, over both kinds of tokenizers."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from tiny_tokenizer import write_byte_fallback, write_byte_level

from jaxpaged.grammar import (
    MAX_BYTES,
    CompilerThreads,
    GrammarError,
    compile_grammar,
    grammar_text,
    read_vocabulary,
)
from jaxpaged.sampling_params import SamplingParams, StructuredOutputs


@pytest.fixture(scope="module", params=[write_byte_level, write_byte_fallback])
def vocabulary(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    folder = request.param(tmp_path_factory.mktemp("vocabulary"))
    return read_vocabulary(folder / "tokenizer.json")


def matcher(vocabulary: LLTokenizer, **wanted: object) -> LLMatcher:
    return compile_grammar(vocabulary, grammar_text(StructuredOutputs(**wanted)))  # type: ignore[arg-type]


def allowed(matcher: LLMatcher) -> set[int]:
    bits = matcher.compute_bitmask()
    return {place for place in range(8 * len(bits)) if bits[place // 8] >> place % 8 & 1}


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(max_size=6), min_size=1, max_size=4))
def test_a_choice_is_taken_byte_for_byte(vocabulary: LLTokenizer, options: list[str]) -> None:
    for option in options:
        place = matcher(vocabulary, choice=options)
        for token_id in vocabulary.greedy_tokenize(option):
            spelling = vocabulary.decode_bytes([token_id])
            # Of several tokens with the same bytes, one is enough.
            fits = [i for i in allowed(place) if vocabulary.decode_bytes([i]) == spelling]
            assert place.consume_token(fits[0])
        assert place.is_accepting() and vocabulary.eos_token in allowed(place)
        longer = any(other.startswith(option) and other != option for other in options)
        assert (allowed(place) == {vocabulary.eos_token}) == (not longer)


@pytest.mark.parametrize("regex", ["^a[0-9]$", "a[0-9]", "^a[0-9]", "(?:a)[0-9]$"])
def test_a_regex_is_the_whole_output(vocabulary: LLTokenizer, regex: str) -> None:
    place = matcher(vocabulary, regex=regex)
    assert not allowed(place) & set(vocabulary.greedy_tokenize("^$0"))
    place.consume_tokens(vocabulary.greedy_tokenize("a7"))
    assert allowed(place) == {vocabulary.eos_token}


def test_json_has_few_blanks(vocabulary: LLTokenizer) -> None:
    for text, fits in [
        ('{"a": 1,\n    "b":\r\n[]}', True), ('{"a":1,"b":[]}', True),
        ('{  "a":1}', False), ("{\n\n", False), ("{\n" + " " * 21, False), (' {"a":1}', False),
    ]:  # fmt: skip
        token_ids = vocabulary.greedy_tokenize(text)
        taken = matcher(vocabulary, json_object=True).validate_tokens(token_ids)
        assert (taken == len(token_ids)) == fits, text


@pytest.mark.parametrize("text", [None, "{", '{"added_tokens": []}', '{"added_tokens": 1}'])
def test_a_tokenizer_that_is_of_no_use(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "tokenizer.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(GrammarError, match="cannot use this model's tokenizer") as refused:
        read_vocabulary(file)
    assert "\n" not in str(refused.value)


def rules(count: int) -> StructuredOutputs:
    chain = "".join(f"r{i}:r{i + 1}\n" for i in range(count))
    return StructuredOutputs(grammar=f'start:r0\n{chain}r{count}:"x"')


def references(count: int) -> StructuredOutputs:
    links = {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(count)} | {str(count): {}}
    return StructuredOutputs(json={"$ref": "#/$defs/0", "$defs": links})


@pytest.mark.parametrize("wanted", [rules(10_900), references(4200)], ids=["rules", "references"])
def test_the_deepest_chain_crashes_nothing(
    vocabulary: LLTokenizer, wanted: StructuredOutputs
) -> None:
    """llguidance descends once for each link, and an overflown stack would end the process."""
    text = grammar_text(wanted)
    assert len(text) > MAX_BYTES * 0.9
    assert allowed(CompilerThreads(1).submit(compile_grammar, vocabulary, text).result())


def test_exactly_one_constraint() -> None:
    for wanted in ({}, {"regex": "a", "json": {}}, {"choice": []}, {"json_object": False}):
        with pytest.raises(ValueError, match="^structured_outputs must"):
            StructuredOutputs(**wanted)  # type: ignore[arg-type]
    params = SamplingParams(structured_outputs=StructuredOutputs(choice=["a", "a", "b"]))
    assert params.structured_outputs is not None
    assert params.structured_outputs.choice == ("a", "b")


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        ({"json": {"const": "<|end|>"}}, '"<|end|>"'),
        ({"json": {"const": "\u2028%json"}}, '"\u2028%json"'),
        ({"choice": ["<|user|>hi"]}, "<|user|>hi"),
        ({"regex": "a/<[|]user[|]>"}, "a/<|user|>"),
        ({"grammar": '%llguidance {"no_forcing": false}\nstart: "<|end|>" // !'}, "<|end|>"),
        ({"grammar": 'root ::= "<|end|>"'}, "<|end|>"),
    ],
)
def test_text_that_spells_a_special_token(
    vocabulary: LLTokenizer, wanted: dict[str, object], text: str
) -> None:
    place = matcher(vocabulary, **wanted)
    token_ids = [i for letter in text for i in vocabulary.greedy_tokenize(letter)]
    for token_id in token_ids:
        assert allowed(place) >= {token_id}
        assert place.consume_token(token_id)
    assert place.is_accepting()


@pytest.mark.parametrize("divisor", [10_000, 2_500_000, 0.01, 12.5, True])
def test_divisors_that_are_small_enough(divisor: float) -> None:
    grammar_text(StructuredOutputs(json={"multipleOf": divisor}))


@pytest.mark.parametrize("divisor", [10_007, 3_000_001, -1_000_003, 1000.003, 1e300 + 7e290])
def test_divisors_that_take_too_long(divisor: float) -> None:
    schema = {"properties": {"const": {"anyOf": [{"multipleOf": divisor}]}}}
    with pytest.raises(GrammarError, match="multipleOf .* is too large"):
        grammar_text(StructuredOutputs(json=schema))


def test_a_complaint_quotes_no_grammar(vocabulary: LLTokenizer) -> None:
    with pytest.raises(GrammarError) as refused:
        matcher(vocabulary, grammar='start: "a"\nstart: "b"')
    assert str(refused.value) == 'at 2(8): duplicate rule: "start"'
