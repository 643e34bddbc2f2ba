"""From the fields of a request to `SamplingParams`."""

from __future__ import annotations

import math
from typing import Any

from jaxpaged.engine.errors import BadRequestError
from jaxpaged.engine.grammar_checker import PARAM
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.server.context import ServerContext
from jaxpaged.server.errors import named_as_sent
from jaxpaged.server.protocol import GenerationRequest, SamplingFields
from jaxpaged.server.structured import structured_outputs

MAX_BIAS = 100.0  # OpenAI's bound of logit_bias; more is cut, as vLLM does
OLD_NAMES = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")


def refuse_unsupported(request: GenerationRequest) -> None:
    """Raises BadRequestError for what would be answered wrongly if it were ignored."""
    for name in OLD_NAMES:
        if getattr(request, name) is not None:
            raise BadRequestError(f"{name} is not supported: use structured_outputs", name)
    if request.stream and request.prompt_logprobs is not None:
        raise BadRequestError("prompt_logprobs are not available in a stream", "prompt_logprobs")
    if request.stream_options is not None and not request.stream:
        raise BadRequestError("stream_options need stream=true", "stream_options")


def sampling_params(
    request: GenerationRequest, context: ServerContext, **overrides: Any
) -> SamplingParams:
    """The request's own values, else the model's, else vLLM's; `overrides` before all.

    max_tokens stays None unless the request names it.

    Raises:
        BadRequestError: a value outside its range.
    """
    named = {
        name: value
        for name in SamplingFields.model_fields
        if (value := getattr(request, name)) is not None
    }
    if request.logit_bias is not None:
        named["logit_bias"] = _bias(request.logit_bias, context.engine.info.vocab_size)
    form = structured_outputs(request.response_format, request.structured_outputs)
    if form is not None and "structured_outputs" in overrides:  # of calls
        name = request.sent_names.get(PARAM, PARAM)
        raise BadRequestError(
            f"{name} cannot be used with a tool_choice that makes the whole answer calls", name
        )
    named["structured_outputs"] = form
    values = {**context.engine.sampling_defaults, "max_tokens": None, **named, **overrides}
    with named_as_sent(request.sent_names):
        try:
            return SamplingParams(**values)
        except ValueError as error:
            field = str(error).split(maxsplit=1)[0]
            raise BadRequestError(str(error), field if field in values else None) from error


def _bias(given: dict[str, float], vocab: int) -> dict[int, float]:
    bias = {}
    for key, value in given.items():
        try:
            token_id = int(key)
        except ValueError:
            raise BadRequestError(
                f"logit_bias holds {key!r}, which is no token id: ids are 0 to {vocab - 1}",
                "logit_bias",
            ) from None
        bias[token_id] = max(-MAX_BIAS, min(MAX_BIAS, value)) if math.isfinite(value) else value
    return bias
