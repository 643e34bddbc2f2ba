"""How one request wants its tokens chosen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from jaxpaged.validation import require

MAX_CHOICES = 1024  # n; each is a sequence of its own
MAX_STOP_STRINGS = 64  # all of them are looked for after every token
MAX_STOP_CHARACTERS = 4096  # in all of them
MAX_BAD_WORDS = 1024
MAX_BAD_CHARACTERS = 65536  # in all of them; each is tokenized twice
MAX_LOGIT_BIAS = 512  # entries of logit_bias a row of the sampler has room for


@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """What the whole output must match: exactly one of these, by vLLM's names.

    Args:
        json: a JSON schema, as an object or as its text.
        regex: a regular expression that matches all of the output, in Rust's syntax.
        choice: the output is one of these.
        grammar: Lark as llguidance takes it, with a rule `start`; or GBNF, with a rule `root`.
        json_object: True: any JSON object.

    Raises:
        ValueError: none or several of them; the message begins with "structured_outputs".
    """

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        if self.choice is not None:
            object.__setattr__(self, "choice", tuple(dict.fromkeys(self.choice)))
        wanted = [field.name for field in fields(self) if getattr(self, field.name) is not None]
        if len(wanted) != 1:
            raise ValueError(
                "structured_outputs must name exactly one of json, regex, choice, grammar and "
                f"json_object, got {', '.join(wanted) or 'none'}"
            )
        if self.json_object is False:
            raise ValueError("structured_outputs must not say json_object: false; leave it out")
        if self.choice == ():
            raise ValueError("structured_outputs must offer at least one choice")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters, by vLLM's names and defaults. Lists become tuples.

    A random draw depends on (seed, choice, position) alone: never on the neighbours in the
    batch, the arrival order or a preemption. A missing seed is drawn at admission from the
    engine's `--seed` and a counter.

    Raises:
        ValueError: a value outside its range; the message begins with the field's name.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16  # None: whatever still fits max_model_len
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    structured_outputs: StructuredOutputs | None = None
    skip_reading_prefix_cache: bool | None = None  # None: skipped only with prompt_logprobs
    priority: int = 0  # lower is served earlier under --scheduling-policy priority

    def __post_init__(self) -> None:
        stop: str | Sequence[str] = self.stop
        stop = (stop,) if isinstance(stop, str) else stop
        for name, value in (
            ("stop", stop),
            ("stop_token_ids", self.stop_token_ids),
            ("bad_words", self.bad_words),
        ):
            object.__setattr__(self, name, tuple(dict.fromkeys(value or ())))
        if self.allowed_token_ids is not None:
            allowed = tuple(dict.fromkeys(self.allowed_token_ids))
            object.__setattr__(self, "allowed_token_ids", allowed)
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{field.name} must be finite, got {value}")
        require(self, "n", 1 <= self.n <= MAX_CHOICES, f"in [1, {MAX_CHOICES}]")
        for name in ("presence_penalty", "frequency_penalty"):
            require(self, name, -2 <= getattr(self, name) <= 2, "in [-2, 2]")
        require(self, "repetition_penalty", self.repetition_penalty > 0, "greater than 0")
        require(self, "temperature", self.temperature >= 0, "at least 0")
        require(self, "top_p", 0 < self.top_p <= 1, "in (0, 1]")
        require(self, "top_k", -1 <= self.top_k < 2**31, "0 or -1 (off), or at least 1")
        require(self, "min_p", 0 <= self.min_p <= 1, "in [0, 1]")
        require(self, "seed", self.seed is None or -(2**63) <= self.seed < 2**63, "a 64-bit int")
        require(self, "priority", -(2**63) <= self.priority < 2**63, "a 64-bit int")
        require(self, "max_tokens", self.max_tokens is None or self.max_tokens >= 1, "at least 1")
        require(self, "min_tokens", self.min_tokens >= 0, "at least 0")
        if self.max_tokens is not None:
            require(self, "min_tokens", self.min_tokens <= self.max_tokens, "at most max_tokens")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            require(self, name, value is None or value >= 0, "at least 0")
        for name, most, most_characters in (
            ("stop", MAX_STOP_STRINGS, MAX_STOP_CHARACTERS),
            ("bad_words", MAX_BAD_WORDS, MAX_BAD_CHARACTERS),
        ):
            strings = getattr(self, name)
            if len(strings) > most:
                raise ValueError(f"{name} must be at most {most} strings, got {len(strings)}")
            if sum(map(len, strings)) > most_characters:
                raise ValueError(f"{name} must be at most {most_characters} characters in all")
        require(self, "stop", all(self.stop), "non-empty strings")
        require(self, "bad_words", all(self.bad_words), "non-empty strings")
        require(
            self, "allowed_token_ids", self.allowed_token_ids != (), "a non-empty list of token ids"
        )
        if self.logit_bias is not None:
            require(
                self,
                "logit_bias",
                len(self.logit_bias) <= MAX_LOGIT_BIAS,
                f"at most {MAX_LOGIT_BIAS} entries",
            )
            for token_id, bias in self.logit_bias.items():
                if not math.isfinite(bias):
                    raise ValueError(f"logit_bias of token {token_id} must be finite, got {bias}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0
