"""From the messages of a chat to token ids."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxpaged.engine.errors import BadRequestError
from jaxpaged.server.context import ServerContext
from jaxpaged.server.protocol import ChatMessage, ChatTemplateFields
from jaxpaged.server.tool_protocol import Tool

# Arguments of the rendering itself, which are no variables of a template.
RESERVED = (
    "messages", "conversation", "tools", "documents", "tokenize", "chat_template", "return_dict",
    "add_generation_prompt", "continue_final_message", "self", "padding", "truncation",
    "max_length", "return_tensors", "return_assistant_tokens_mask", "tokenizer_kwargs",
)  # fmt: skip


@dataclass(frozen=True)
class ChatPrompt:
    """What a chat becomes."""

    text: str
    token_ids: list[int]


async def chat_prompt(
    fields: ChatTemplateFields, context: ServerContext, tools: Sequence[Tool] | None = None
) -> ChatPrompt:
    """The prompt of a chat. Its template names BOS itself; nothing is added unless asked for.

    Args:
        tools: those that the model may know of.

    Raises:
        BadRequestError: no tokenizer or template, the template refuses the messages, or they are
            too long to be tokenized.
    """
    if fields.continue_final_message and fields.add_generation_prompt:
        raise BadRequestError(
            "continue_final_message and add_generation_prompt exclude each other",
            "continue_final_message",
        )
    if fields.chat_template is not None and not context.config.trust_request_chat_template:
        raise BadRequestError(
            "this server takes no chat_template from requests "
            "(--trust-request-chat-template allows it)",
            "chat_template",
        )
    given = fields.chat_template_kwargs or {}
    for name in RESERVED:
        if name in given:
            raise BadRequestError(
                f"chat_template_kwargs cannot set {name!r}", "chat_template_kwargs"
            )
    variables = {**(context.config.default_chat_template_kwargs or {}), **given}
    tokenizer, max_model_len = context.tokenizer, context.engine.info.max_model_len

    def render() -> ChatPrompt:
        offered = [tool.model_dump(exclude_unset=True) for tool in tools or ()]
        text = tokenizer.render_chat(
            _named([_plain(message) for message in fields.messages]),
            add_generation_prompt=fields.add_generation_prompt,
            continue_final_message=fields.continue_final_message,
            chat_template=fields.chat_template or context.chat_template,
            documents=fields.documents,
            tools=offered or None,
            **variables,
        )
        token_ids = tokenizer.encode_sent(text, max_model_len, fields.add_special_tokens)
        return ChatPrompt(text, token_ids)

    # A chat may be long and a template a client's own: the others' tokens don't wait for it.
    return await asyncio.to_thread(render)


async def chat_token_ids(fields: ChatTemplateFields, context: ServerContext) -> list[int]:
    """The token ids of `chat_prompt`, with all tools on offer."""
    return (await chat_prompt(fields, context, fields.tools)).token_ids


def continued_text(fields: ChatTemplateFields) -> str | None:
    """The text of the last message if the answer continues it.

    Raises:
        BadRequestError: as `content_text`.
    """
    return content_text(fields.messages[-1]) if fields.continue_final_message else None


def content_text(message: ChatMessage) -> str:
    """The text of a message: as it is, or its text parts.

    Raises:
        BadRequestError: a part that is no text.
    """
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    texts = []
    for part in message.content:
        if part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type")
            raise BadRequestError(
                f"a message has a content part of type {kind!r}; only text is supported",
                "messages",
            )
        texts.append(part["text"])
    return "\n".join(texts)


def _plain(message: ChatMessage) -> dict[str, Any]:
    """A message as templates know it: content is text, arguments of calls are objects."""
    plain = {**message.model_dump(exclude_none=True), "content": content_text(message)}
    if message.tool_calls:
        for call in plain["tool_calls"]:
            call["function"]["arguments"] = _object(call["function"].get("arguments"))
    else:
        plain.pop("tool_calls", None)
    if message.reasoning is not None:
        plain.setdefault("reasoning_content", message.reasoning)
    return plain


def _named(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tool messages with the name of the function: templates ask for it, clients send an id."""
    names: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls", ()):
            if "id" in call:
                names[call["id"]] = call["function"]["name"]
        answered = message.get("tool_call_id")
        if message["role"] == "tool" and isinstance(answered, str) and answered in names:
            message.setdefault("name", names[answered])
    return messages


def _object(arguments: str | dict[str, Any] | None) -> str | dict[str, Any]:
    """Arguments as an object; as they are if they are none, which many templates can show too."""
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        found = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments
