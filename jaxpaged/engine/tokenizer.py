"""Text to token ids and back, and chat messages to text, through transformers' tokenizers."""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError

from jaxpaged.engine.errors import BadRequestError
from jaxpaged.model_files import TOKENIZER_FILE

GENERATION_DEFAULTS = {  # generation_config.json -> SamplingParams
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
ALWAYS_TOKENIZED = 1 << 20  # characters of a text that is tokenized whatever its model's length
LONG = 256  # tokens whose decoding takes longer than to hand them to another thread
LEAD = "a"  # text before a token whose own text is wanted: some decoders eat a leading space


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
    """A model's tokenizer and chat template. Safe to use from several threads.

    Args:
        backend: a transformers tokenizer.
        folder: the model's, whose generation_config.json may name more ends of a text.
        file: the tokenizer.json that the backend was made of.
    """

    def __init__(self, backend: Any, folder: Path, file: Path) -> None:
        self._backend = backend
        self.file = file
        self._fast = getattr(backend, "backend_tokenizer", None)
        if self._fast is not None:  # lengths are checked elsewhere
            self._fast.no_truncation()
            self._fast.no_padding()
        configured = read_generation_config(folder).get("eos_token_id")
        ids = configured if isinstance(configured, list) else [configured]
        self.eos_token_ids: list[int] = sorted(
            {token_id for token_id in (*ids, backend.eos_token_id) if token_id is not None}
        )
        self._longest = max(map(len, backend.get_vocab()), default=0)  # spelling of a token
        self._lead = self.encode(LEAD, add_special_tokens=False)
        self._lead_text = self.decode(self._lead)
        self.token_text = functools.lru_cache(maxsize=1 << 16)(self._token_text)

    @classmethod
    def load(cls, folder: Path, model_folder: Path | None = None) -> Tokenizer:
        """The tokenizer of a folder; `model_folder`: the model's, if that is another one.

        Raises:
            OSError: it is missing or unreadable; one line that names the folder.
        """
        if not any(folder.glob("*token*")):  # tokenizer.json, tokenizer.model
            raise OSError(f"no tokenizer in {folder}: tokenizer.json is missing")
        # transformers' own logger tells at import that there is no PyTorch, which is fine. The
        # import waits till now because it takes long: meanwhile the engine's process starts.
        logging.getLogger("transformers").addFilter(lambda entry: entry.levelno >= logging.ERROR)
        import transformers

        transformers.logging.set_verbosity_error()
        try:
            backend = transformers.AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
            return cls(backend, model_folder or folder, folder / TOKENIZER_FILE)
        except Exception as error:  # transformers raises what its many formats raise
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise OSError(f"no usable tokenizer in {folder}: {reason}") from error

    @property
    def has_chat_template(self) -> bool:
        return self._backend.chat_template is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; special tokens that it spells are recognised.

        Raises:
            UnicodeEncodeError: half a surrogate pair is no text.
        """
        if not text.isascii():
            text.encode()
        if self._fast is not None:  # a batch lets other threads run meanwhile, one text does not
            (found,) = self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return found.ids
        return self._backend.encode(text, add_special_tokens=add_special_tokens)

    def encode_sent(
        self, text: str, max_model_len: int, add_special_tokens: bool = True
    ) -> list[int]:
        """`encode`, unless the text is so long that it may take minutes: over a million characters,
        and more than `max_model_len` tokens could spell.

        Raises:
            BadRequestError: it is.
        """
        most = max(ALWAYS_TOKENIZED, max_model_len * self._longest)
        if len(text) > most:
            raise BadRequestError(
                f"This model's maximum context length is {max_model_len} tokens, and no text of "
                f"more than {most} characters is tokenized, but the prompt has {len(text)}. Please "
                f"reduce the length of the prompt.",
                "prompt",
            )
        return self.encode(text, add_special_tokens)

    def decode(
        self,
        token_ids: Sequence[int],
        skip_special_tokens: bool = False,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """The text of token ids; bytes that are no whole character become U+FFFD.

        Args:
            spaces_between_special_tokens: heeded by tokenizers written in Python alone.
        """
        if self._fast is not None:
            ids = list(token_ids)
            if len(ids) > LONG:  # a batch lets other threads run meanwhile
                return self._fast.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]
            return self._fast.decode(ids, skip_special_tokens=skip_special_tokens)
        return self._backend.decode(
            list(token_ids),
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=spaces_between_special_tokens,
            clean_up_tokenization_spaces=False,
        )

    def token(self, token_id: int) -> str:
        """The vocabulary's own spelling of a token, such as "Ġthe"."""
        return self._backend.convert_ids_to_tokens(token_id) or ""

    def _token_text(self, token_id: int) -> str:
        """What one token reads like in the middle of a text (cached)."""
        text = self.decode([*self._lead, token_id])
        if text.startswith(self._lead_text):
            return text[len(self._lead_text) :]
        return self.decode([token_id])

    def token_bytes(self, token_id: int) -> list[int]:
        """The UTF-8 bytes of a token, also of one that is a part of a character."""
        text = self.token_text(token_id)
        if "\ufffd" not in text:
            return list(text.encode())
        spelling = self.token(token_id)
        if fallback := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", spelling):
            return [int(fallback[1], 16)]
        table = _byte_of_character()
        if all(character in table for character in spelling):
            return [table[character] for character in spelling]
        return list(text.encode())

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        documents: list[dict[str, str]] | None = None,
        tools: list[dict[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> str:
        """The prompt that a chat stands for; it names its BOS itself, if it wants one.

        Args:
            add_generation_prompt: begin a new answer; by default unless the last is continued.

        Raises:
            BadRequestError: there is no template, or it refuses the messages (in its own words).
        """
        if chat_template is None and not self.has_chat_template:
            raise BadRequestError(
                "the model has no chat template: send a prompt to /v1/completions, or name one "
                "with chat_template or --chat-template",
                "chat_template",
            )
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
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
        except RecursionError:  # of what it was given: nothing that a template says is as deep
            raise BadRequestError(
                "the messages, tools or template variables are nested too deeply", "messages"
            ) from None
        except (
            TemplateError, ArithmeticError, LookupError, TypeError, ValueError, MemoryError,
        ) as error:  # fmt: skip
            raise BadRequestError(f"the chat template refuses: {error}", "messages") from error


@functools.cache
def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet of byte-level tokens: printable bytes are themselves, others follow 256.

    Source: `bytes_to_unicode` of https://github.com/openai/gpt-2/blob/master/src/encoder.py.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + place): byte for place, byte in enumerate(others)
    }
