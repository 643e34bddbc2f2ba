"""How the answers to one prompt are made and read: reasoning, tools and constraints together."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from fastapi import Request

from jaxpaged.engine.grammar_checker import PARAM
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.server.context import ServerContext
from jaxpaged.server.errors import named_as_sent
from jaxpaged.server.generation import Generation, prepare
from jaxpaged.server.parsing.answer import AnswerParser
from jaxpaged.server.parsing.reasoning import left_open
from jaxpaged.server.protocol import ChatTemplateFields, GenerationRequest
from jaxpaged.server.templating import chat_prompt, continued_text
from jaxpaged.server.thinking import Thinking
from jaxpaged.server.tools import ToolUse


@dataclass(frozen=True)
class AnswerPlan:
    """Sampling parameters of the answers, and what reads them.

    Args:
        thinking: None: no part of an answer is reasoning.
    """

    params: SamplingParams
    tools: ToolUse
    thinking: Thinking | None

    def parser(self) -> AnswerParser:
        """A parser for one answer."""
        thoughts = None if self.thinking is None else self.thinking.parser()
        return AnswerParser(thoughts, self.tools.parser(), single=self.tools.single)


def plan_answers(
    context: ServerContext,
    params: SamplingParams,
    tools: ToolUse,
    prompt: str,
    continued: str | None = None,
) -> AnswerPlan:
    """Find room for reasoning, if the server reads any.

    Args:
        params: already with what `tools` ask for.
        continued: the text of the last message if the answers continue it.
    """
    format = context.config.reasoning_parser
    if format is None:
        return AnswerPlan(params, tools, None)
    thinking = Thinking.of(format, left_open(prompt, continued), context.tokenizer)
    if params.structured_outputs is None:
        return AnswerPlan(params, tools, thinking)
    widened = thinking.before(params.structured_outputs)
    if widened is None:
        return AnswerPlan(params, tools, None)
    return AnswerPlan(dataclasses.replace(params, structured_outputs=widened), tools, thinking)


async def prepare_chat(
    request: Request,
    context: ServerContext,
    body: GenerationRequest,
    template: ChatTemplateFields,
    params: SamplingParams,
    tools: ToolUse,
    *,
    kind: str,
    default_max_tokens: int | None,
    shown_logprobs: int | None,
) -> tuple[Generation, AnswerPlan]:
    """Render a conversation and get ready to answer it.

    Args:
        template: the conversation; the rest as `plan_answers` and `generation.prepare`.

    Raises:
        BadRequestError: the template refuses the conversation, or as `generation.prepare`.
        ClientGoneError: as `generation.prepare`.
    """
    names = {**body.sent_names, **({PARAM: "tools"} if tools.enforced else {})}
    with named_as_sent(names):
        prompt = await chat_prompt(template, context, tools.offered)
    plan = plan_answers(context, params, tools, prompt.text, continued_text(template))
    generation = await prepare(
        request,
        context,
        body,
        [prompt.token_ids],
        plan.params,
        kind=kind,
        add_special_tokens=False,  # they are ids already
        default_max_tokens=default_max_tokens,
        shown_logprobs=shown_logprobs,
        names=names,
    )
    return generation, plan
