"""From a prompt and sampling parameters to a request that the engine can run."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Sequence
from typing import Any

from jaxpaged.engine.errors import BadRequestError
from jaxpaged.engine.grammar_checker import PARAM, GrammarChecker
from jaxpaged.engine.messages import AddRequest, EngineInfo
from jaxpaged.engine.tokenizer import Tokenizer
from jaxpaged.sampling_params import SamplingParams, StructuredOutputs

Prompt = (
    str | Sequence[int] | dict[str, Any]
)  # text, ids, {"prompt": ...} / {"prompt_token_ids": ...}


class InputProcessor:
    """Tokenizes and validates requests for one engine.

    Args:
        info: the engine's limits.
        tokenizer: None: only token ids are taken.
        grammars: checks structured_outputs; None: refuse them, as there is no tokenizer.
    """

    def __init__(
        self,
        info: EngineInfo,
        tokenizer: Tokenizer | None,
        grammars: GrammarChecker | None = None,
    ) -> None:
        self._info, self._tokenizer = info, tokenizer
        self._grammars = grammars

    def request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        add_special_tokens: bool = True,
        truncate_prompt_tokens: int | None = None,
        default_max_tokens: int | None = None,
        cache_salt: str | None = None,
        pooling: bool = False,
        grammar: str | None = None,
        arrival_time: float | None = None,
    ) -> AddRequest:
        """A request whose every id is in the vocabulary and that fits the model.

        Args:
            truncate_prompt_tokens: keep at most that many of the prompt's last tokens; -1: as
                many as the model takes.
            default_max_tokens: at most that many output tokens if max_tokens is None.
            pooling: the prompt's embedding is wanted.
            grammar: what the checker made of structured_outputs, if they are checked already.
            arrival_time: time.time() when it came in; default: now.

        Raises:
            BadRequestError: says what to change, and in which field.
        """
        arrival_time = time.time() if arrival_time is None else arrival_time
        token_ids = self._token_ids(prompt, add_special_tokens)
        token_ids = self._truncate(token_ids, truncate_prompt_tokens)
        params = self._check_length(token_ids, params, default_max_tokens)
        self._check_ids(params)
        self._check_logprobs(params)
        if self._tokenizer is None and (params.stop or params.bad_words):
            raise BadRequestError("stop and bad_words need a tokenizer, and none is loaded")
        if params.stop and not params.detokenize:
            raise BadRequestError("stop strings need detokenize=True", "stop")
        if params.structured_outputs is not None and grammar is None:
            grammar = self._grammar(params.structured_outputs)
        known = [] if self._tokenizer is None else self._tokenizer.eos_token_ids
        eos = [token_id for token_id in known if token_id < self._info.vocab_size]
        if params.ignore_eos and grammar is None:  # a grammar that is at its end wants EOS
            eos = []
        if grammar is not None and not eos:
            raise BadRequestError(
                "structured_outputs need a tokenizer that names an end token", PARAM
            )
        return AddRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            params=params,
            arrival_time=arrival_time,
            eos_token_ids=eos,
            bad_word_ids=[ids for word in params.bad_words for ids in self._bad_word_ids(word)],
            grammar=grammar,
            cache_salt=cache_salt,
            pooling=pooling,
        )

    def _grammar(self, wanted: StructuredOutputs) -> str:
        if self._grammars is None:
            raise BadRequestError(
                "structured_outputs need a tokenizer, and none is loaded (skip_tokenizer_init)",
                PARAM,
            )
        return self._grammars.check(wanted)

    def _token_ids(self, prompt: Prompt, add_special_tokens: bool) -> list[int]:
        if isinstance(prompt, dict):
            found = [key for key in ("prompt_token_ids", "prompt") if prompt.get(key) is not None]
            if not found:
                raise BadRequestError(
                    "a prompt object needs 'prompt' or 'prompt_token_ids'", "prompt"
                )
            prompt = prompt[found[0]]
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise BadRequestError(
                    "no tokenizer is loaded (skip_tokenizer_init): send token ids", "prompt"
                )
            limit = self._info.max_model_len
            token_ids = self._tokenizer.encode_sent(prompt, limit, add_special_tokens)
        else:
            token_ids = list(prompt)  # type: ignore[arg-type]
            if not {*map(type, token_ids)} <= {int}:
                raise BadRequestError("a token prompt must be a list of integers", "prompt")
            if token_ids and (min(token_ids) < 0 or max(token_ids) >= self._info.vocab_size):
                self._check_range("prompt", token_ids)
        if not token_ids:
            raise BadRequestError("the prompt is empty: it needs at least one token", "prompt")
        return token_ids

    def _truncate(self, token_ids: list[int], limit: int | None) -> list[int]:
        if limit is None:
            return token_ids
        longest = self._info.max_model_len - 1
        if limit == -1:
            limit = longest
        if not 1 <= limit <= longest:
            raise BadRequestError(
                f"truncate_prompt_tokens must be -1 or 1 to {longest}, got {limit}",
                "truncate_prompt_tokens",
            )
        return token_ids[-limit:]

    def _check_length(
        self, token_ids: list[int], params: SamplingParams, default: int | None
    ) -> SamplingParams:
        """The parameters with max_tokens set."""
        limit, prompt_len = self._info.max_model_len, len(token_ids)
        asked = params.max_tokens
        if prompt_len + (asked or 1) > limit:
            request = (
                f"the prompt has {prompt_len}, and an output needs at least 1"
                if asked is None
                else f"{prompt_len + asked} were requested: {prompt_len} in the prompt and {asked} "
                f"in the output (max_tokens)"
            )
            raise BadRequestError(
                f"This model's maximum context length is {limit} tokens, but {request}. Please "
                f"reduce the length of the prompt or max_tokens.",
                "prompt" if prompt_len >= limit else "max_tokens",
            )
        if asked is None:
            asked = min(limit - prompt_len, default or limit)
        if params.min_tokens > asked:
            raise BadRequestError(
                f"min_tokens {params.min_tokens} is more than the {asked} tokens that the output "
                f"may have; max_tokens says how many",
                "min_tokens",
            )
        return dataclasses.replace(params, max_tokens=asked)

    def _check_ids(self, params: SamplingParams) -> None:
        self._check_range("logit_bias", params.logit_bias or ())
        self._check_range("stop_token_ids", params.stop_token_ids)
        self._check_range("allowed_token_ids", params.allowed_token_ids or ())

    def _check_range(self, field: str, token_ids: Iterable[int]) -> None:
        vocab = self._info.vocab_size
        for token_id in token_ids:
            if not 0 <= token_id < vocab:
                raise BadRequestError(
                    f"{field} holds token id {token_id}, which is outside the vocabulary: ids are "
                    f"0 to {vocab - 1}",
                    field,
                )

    def _check_logprobs(self, params: SamplingParams) -> None:
        for field in ("logprobs", "prompt_logprobs"):
            value = getattr(params, field)
            if value is not None and value > self._info.max_logprobs:
                raise BadRequestError(
                    f"{field} {value} is more than the server's maximum, "
                    f"{self._info.max_logprobs} (--max-logprobs)",
                    field,
                )

    def _bad_word_ids(self, word: str) -> list[list[int]]:
        """The token sequences that spell a word, at the start of a text and within one."""
        assert self._tokenizer is not None
        bare = word.lstrip() or word
        alone, inside = (
            self._tokenizer.encode(prefix + bare, add_special_tokens=False) for prefix in ("", " ")
        )
        # A spaced spelling that ends in the bare one is forbidden with it.
        return [alone] if inside[-len(alone) :] == alone else [alone, inside]
