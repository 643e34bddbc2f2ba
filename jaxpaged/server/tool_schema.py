"""JSON schemas of calls, for the grammar that enforces them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxpaged.server.tool_protocol import FunctionDefinition

NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def arguments_schema(function: FunctionDefinition) -> dict[str, Any]:
    """What the arguments of one function must match."""
    return function.parameters or NO_PARAMETERS


def calls_schema(functions: Sequence[FunctionDefinition], *, single: bool) -> dict[str, Any]:
    """A list of calls, {"name": ..., "parameters": {...}}; `single`: of exactly one."""
    call_of = [
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "enum": [function.name]},
                "parameters": {"$ref": f"#/$defs/{place}"},
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for place, function in enumerate(functions)
    ]
    return {
        "type": "array",
        "minItems": 1,
        **({"maxItems": 1} if single else {}),
        "items": {"anyOf": call_of},
        "$defs": {
            str(place): _moved(arguments_schema(function), f"#/$defs/{place}")
            for place, function in enumerate(functions)
        },
    }


def _moved(schema: Any, root: str) -> Any:
    """A schema whose references into itself follow it to its new place."""
    if isinstance(schema, list):
        return [_moved(item, root) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: root + value[1:]
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value, root)
        for key, value in schema.items()
    }
