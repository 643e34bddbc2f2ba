"""Text to token ids and back, and chat messages to text, through transformers' tokenizers."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from jaxpaged.engine.errors import BadRequestError

# transformers tells at every start that there is no PyTorch, and of long inputs: both are fine.
logging.getLogger("transformers").setLevel(logging.ERROR)

GENERATION_DEFAULTS = {  # generation_config.json -> SamplingParams
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def read_generation_config(folder: Path) -> dict[str, Any]:
    """generation_config.json of a model folder; empty if there is none."""
    try:
        return json.loads((folder / "generation_config.json").read_text("utf-8"))
    except FileNotFoundError:
        return {}


def generation_defaults(folder: Path) -> dict[str, Any]:
    """SamplingParams fields that the model's makers set, where generation_config.json does."""
    config = read_generation_config(folder)
    found = {
        ours: config[theirs]
        for theirs, ours in GENERATION_DEFAULTS.items()
        if config.get(theirs) is not None
    }
    if config.get("do_sample") is False:
        found["temperature"] = 0.0
    return found


class Tokenizer:
    """A model's tokenizer and chat template."""

    def __init__(self, backend: PreTrainedTokenizerBase, folder: Path) -> None:
        self._backend = backend
        fast = getattr(backend, "backend_tokenizer", None)
        self._fast = fast
        self.max_token_id = max(backend.get_vocab().values())
        self.bos_token_id: int | None = backend.bos_token_id
        configured = read_generation_config(folder).get("eos_token_id")
        ids = configured if isinstance(configured, list) else [configured]
        self.eos_token_ids: list[int] = sorted(
            {token_id for token_id in (*ids, backend.eos_token_id) if token_id is not None}
        )
        self.token_text = functools.lru_cache(maxsize=1 << 16)(self._token_text)

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """The tokenizer of a model folder.

        Raises:
            OSError: it is missing or unreadable; one line that names the folder.
        """
        try:
            return cls(AutoTokenizer.from_pretrained(folder, local_files_only=True), folder)
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise OSError(f"no usable tokenizer in {folder}: {reason}") from error

    @property
    def has_chat_template(self) -> bool:
        return self._backend.chat_template is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; special tokens that it spells are recognised."""
        return self._backend.encode(text, add_special_tokens=add_special_tokens)

    def decode(
        self,
        token_ids: Sequence[int],
        skip_special_tokens: bool = False,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """The text of token ids; bytes that are no whole character become U+FFFD."""
        if self._fast is not None:
            return self._fast.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return self._backend.decode(
            list(token_ids),
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=spaces_between_special_tokens,
            clean_up_tokenization_spaces=False,
        )

    def _token_text(self, token_id: int) -> str:
        """What one token alone reads like (cached)."""
        return self.decode([token_id])

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        documents: list[dict[str, str]] | None = None,
        tools: list[dict[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> str:
        """The prompt that a chat stands for; it names its BOS itself, if it wants one.

        Raises:
            BadRequestError: there is no template, or it refuses the messages (in its own words).
        """
        if chat_template is None and not self.has_chat_template:
            raise BadRequestError(
                "the model has no chat template: send a prompt to /v1/completions, or name one "
                "with chat_template or --chat-template",
                "chat_template",
            )
        try:
            return self._backend.apply_chat_template(
                list(messages),
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template=chat_template,
                documents=documents,
                tools=tools,
                **template_kwargs,
            )
        except (TemplateError, ValueError, TypeError, KeyError, IndexError) as error:
            raise BadRequestError(f"the chat template refuses: {error}", "messages") from error
