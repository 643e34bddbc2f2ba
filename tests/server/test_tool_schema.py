from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLTokenizer

from jaxpaged.engine.errors import BadRequestError
from jaxpaged.grammar import compile_grammar, grammar_text
from jaxpaged.sampling_params import StructuredOutputs
from jaxpaged.server.tool_protocol import FunctionDefinition
from jaxpaged.server.tool_schema import arguments_schema, calls_schema

TREE = {
    "type": "object",
    "properties": {"left": {"$ref": "#"}, "size": {"$ref": "#/$defs/Size"}},
    "$defs": {"Size": {"type": "integer"}},
    "additionalProperties": False,
}
NAMED_ALIKE = {
    "type": "object",
    "properties": {"size": {"$ref": "#/$defs/Size"}},
    "required": ["size"],
    "$defs": {"Size": {"type": "string"}},
    "additionalProperties": False,
}
FUNCTIONS = [
    FunctionDefinition(name="tree", parameters=TREE),
    FunctionDefinition(name="text", parameters=NAMED_ALIKE),
    FunctionDefinition(name="nothing"),
]


def matches(schema: dict[str, Any], value: Any) -> bool:
    matcher = compile_grammar(LLTokenizer("byte"), grammar_text(StructuredOutputs(json=schema)))
    return matcher.consume_tokens(list(json.dumps(value).encode())) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("calls", "fits"),
    [
        ([("tree", {"left": {"left": {}, "size": 3}, "size": 1})], True),
        ([("tree", {"left": {"size": "3"}})], False),
        ([("text", {"size": "3"}), ("nothing", {}), ("tree", {})], True),
        ([("text", {"size": 3})], False),
        ([("text", {})], False),
        ([("nothing", {"size": 3})], False),
        ([("other", {})], False),
        ([], False),
    ],
)
def test_calls(calls: list[tuple[str, Any]], fits: bool):
    value = [{"name": name, "parameters": arguments} for name, arguments in calls]
    assert matches(calls_schema(FUNCTIONS, single=False), value) is fits
    assert matches(calls_schema(FUNCTIONS, single=True), value) is (fits and len(value) == 1)


def test_arguments():
    assert matches(arguments_schema(FUNCTIONS[0]), {"left": {}})
    assert matches(arguments_schema(FUNCTIONS[2]), {})
    assert not matches(arguments_schema(FUNCTIONS[2]), {"x": 1})


def test_arguments_are_an_object_though_nothing_says_so():
    untyped = FunctionDefinition(name="f", parameters={"properties": {"x": {"type": "integer"}}})
    assert matches(arguments_schema(untyped), {"x": 1})
    for wrong in ({"x": "1"}, 7, []):
        assert not matches(arguments_schema(untyped), wrong)
        calls = calls_schema([untyped], single=True)
        assert not matches(calls, [{"name": "f", "parameters": wrong}])


def test_arguments_that_are_no_object():
    with pytest.raises(BadRequestError, match="'f' must have the type 'object', got 'array'"):
        arguments_schema(FunctionDefinition(name="f", parameters={"type": "array"}))


def test_data_and_names_stay_as_they_are():
    parameters = {
        "$id": "https://example.org/f",
        "properties": {
            "const": {"$ref": "#/$defs/$id"},
            "data": {"const": {"$ref": "#/x"}},
        },
        "required": ["const", "data"],
        "$defs": {"$id": {"type": "integer"}},
    }
    schema = calls_schema([FunctionDefinition(name="f", parameters=parameters)], single=True)
    call = {"name": "f", "parameters": {"const": 1, "data": {"$ref": "#/x"}}}
    assert matches(schema, [call])
