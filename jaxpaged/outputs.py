"""What a request gives back, in vLLM's shapes."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Logprob:
    """A raw natural log-probability: of the unmodified logits, before any filter."""

    logprob: float
    rank: int  # 1 = the most likely token
    decoded_token: str | None  # None without a tokenizer


TokenLogprobs = dict[int, Logprob]  # by token id: the token itself, then the most likely ones


@dataclass(slots=True)
class CompletionOutput:
    """One choice of a request."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None  # of all tokens so far, if logprobs were asked for
    logprobs: list[TokenLogprobs] | None = None  # one a token
    finish_reason: str | None = None  # stop, length or abort
    stop_reason: int | str | None = None  # the stop token's id or the stop string; None: EOS

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A request's choices: all of each (cumulative) or what is new of one of them (delta)."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # the first entry is None
    num_cached_tokens: int = 0  # prompt tokens that the prefix cache served
    scheduled_time: float | None = None  # time.time() when it was first admitted
    embedding: bytes | None = None  # of the prompt, if it was asked for: float32 of length 1
