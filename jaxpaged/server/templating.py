"""From the messages of a chat to token ids."""

from __future__ import annotations

import asyncio
from typing import Any

from jaxpaged.engine.errors import BadRequestError
from jaxpaged.server.context import ServerContext
from jaxpaged.server.protocol import ChatMessage, ChatTemplateFields

# Arguments of the rendering itself, which are no variables of a template.
RESERVED = (
    "messages", "conversation", "tools", "documents", "tokenize", "chat_template", "return_dict",
    "add_generation_prompt", "continue_final_message", "self", "padding", "truncation",
    "max_length", "return_tensors", "return_assistant_tokens_mask", "tokenizer_kwargs",
)  # fmt: skip


async def chat_token_ids(fields: ChatTemplateFields, context: ServerContext) -> list[int]:
    """The prompt of a chat. Its template names BOS itself; nothing is added unless asked for.

    Raises:
        BadRequestError: no tokenizer or template, or the template refuses the messages.
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
    tokenizer = context.tokenizer
    messages = [_plain(message) for message in fields.messages]

    def render() -> list[int]:
        text = tokenizer.render_chat(
            messages,
            add_generation_prompt=fields.add_generation_prompt,
            continue_final_message=fields.continue_final_message,
            chat_template=fields.chat_template or context.chat_template,
            documents=fields.documents,
            **variables,
        )
        return tokenizer.encode(text, add_special_tokens=fields.add_special_tokens)

    # A template may be long or a client's own: the others' tokens don't wait for it.
    return await asyncio.to_thread(render)


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
    return {**message.model_dump(exclude_none=True), "content": content_text(message)}
