"""What a request wants its output to match: response_format and structured_outputs."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from jaxpaged.engine.errors import BadRequestError
from jaxpaged.engine.grammar_checker import PARAM
from jaxpaged.sampling_params import StructuredOutputs


class JsonSchema(BaseModel):
    """A JSON schema as OpenAI wraps it; it is enforced whether strict or not."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """OpenAI's way to ask for JSON."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputsField(BaseModel, extra="forbid"):
    """vLLM's way to ask for a form: exactly one of these."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


def structured_outputs(
    response_format: ResponseFormat | None, field: StructuredOutputsField | None
) -> StructuredOutputs | None:
    """The one thing that the output must match; None: any text.

    Raises:
        BadRequestError: more than one, or one without its schema.
    """
    wanted = None if response_format is None else _of_format(response_format)
    if field is None:
        return wanted
    if wanted is not None:
        raise BadRequestError(
            "response_format and structured_outputs cannot be used together", "response_format"
        )
    try:
        return StructuredOutputs(**field.model_dump(by_alias=True))
    except ValueError as error:
        raise BadRequestError(str(error), PARAM) from error


def _of_format(wanted: ResponseFormat) -> StructuredOutputs | None:
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return StructuredOutputs(json_object=True)
    if wanted.json_schema is None:
        raise BadRequestError(
            "response_format of type json_schema needs json_schema", "response_format"
        )
    if wanted.json_schema.schema_ is None:  # OpenAI's may be left out
        return StructuredOutputs(json_object=True)
    return StructuredOutputs(json=wanted.json_schema.schema_)
