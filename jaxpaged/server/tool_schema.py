"""JSON schemas of calls, for the grammar that enforces them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxpaged.engine.errors import BadRequestError
from jaxpaged.server.tool_protocol import FunctionDefinition

NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
DATA = ("const", "enum", "default", "examples")


def arguments_schema(function: FunctionDefinition) -> dict[str, Any]:
    """What the arguments of one function must match: an object, also where nothing says so.

    Raises:
        BadRequestError: they would be something else.
    """
    schema = {"type": "object", **(function.parameters or NO_PARAMETERS)}
    if schema["type"] not in ("object", ["object"]):
        raise BadRequestError(
            f"the parameters of tool {function.name!r} must have the type 'object', got "
            f"{schema['type']!r}",
            "tools",
        )
    return schema


def calls_schema(functions: Sequence[FunctionDefinition], *, single: bool) -> dict[str, Any]:
    """A list of calls, {"name": ..., "parameters": {...}}; `single`: of exactly one.

    Raises:
        BadRequestError: arguments that are no object.
    """
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
    """A schema whose references into itself follow it to its new place.

    Data stay as they are; an $id goes, for references would count from it.
    """
    if isinstance(schema, list):
        return [_moved(item, root) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and value.startswith("#"):
            moved[key] = root + value[1:]
        elif key in NAMES and isinstance(value, dict):
            moved[key] = {name: _moved(item, root) for name, item in value.items()}
        elif key != "$id":
            moved[key] = value if key in DATA else _moved(value, root)
    return moved
