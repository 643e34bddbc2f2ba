"""What the front end and the engine core say to each other.

Plain msgspec structs: the in-process `LLM` hands them over as they are, a served engine sends
them through a local socket. Neither jax nor a tokenizer is needed to read them. Where several front
ends share a core, the number of a command, and the one behind a request's id, tell whose it is.
"""

from __future__ import annotations

import msgspec

from jaxpaged.sampling_params import SamplingParams


class AddRequest(msgspec.Struct, tag=True, kw_only=True):
    """A validated request: every id is inside the vocabulary, prompt + max_tokens fit."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams  # max_tokens is set
    arrival_time: float  # time.time(), seconds
    eos_token_ids: list[int] = []  # empty when ignore_eos, unless there is a grammar
    bad_word_ids: list[list[int]] = []  # token sequences that params.bad_words stand for
    grammar: str | None = None  # what params.structured_outputs stand for, as llguidance takes it
    cache_salt: str | None = None
    pooling: bool = False  # the prompt's embedding is wanted; params.max_tokens is 1
    prompt_only: bool = False  # the prompt is echoed: the one token behind it does not count


class AbortRequests(msgspec.Struct, tag=True):
    """Nobody waits for these any more."""

    request_ids: list[str]


class FinishSequence(msgspec.Struct, tag=True):
    """A stop string ended this choice; usage ends with its token number `num_tokens`."""

    request_id: str
    index: int
    num_tokens: int


class Command(msgspec.Struct, tag=True):
    """What an operator asks of the core; answered by a `CommandDone` of the same number."""

    number: int
    name: str  # reset_prefix_cache, start_profile or stop_profile
    argument: str = ""  # of start_profile: the folder


class AskPool(msgspec.Struct, tag=True):
    """Somebody looks at the pool: a later `StepOutputs` is to bring a picture of it."""


class Shutdown(msgspec.Struct, tag=True):
    """End the process."""


FrontMessage = AddRequest | AbortRequests | FinishSequence | Command | AskPool | Shutdown


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Raw (before any filter) natural log-probabilities at one position."""

    token_id: int
    logprob: float
    rank: int  # 1 = the most likely token
    top_ids: list[int]  # the most likely first; as many as were asked for
    top_logprobs: list[float]


class SequenceOutput(msgspec.Struct, kw_only=True, gc=False, omit_defaults=True):
    """News of one choice of one request.

    One a token: what is not said is not sent, and no cycle holds one that the garbage collector
    would have to look for.
    """

    request_id: str
    index: int  # choice, 0 <= index < n
    token_ids: list[int] = []  # new since the last output
    logprobs: list[TokenLogprobs] | None = None  # one per new token
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # once, the first entry None
    finish_reason: str | None = None  # stop, length, abort or error
    stop_reason: int | None = None  # the id of stop_token_ids that ended it
    num_cached_tokens: int = (
        0  # prompt tokens served by the prefix cache; with the first of choice 0
    )
    scheduled_time: float | None = None  # time.time() of the first admission; likewise
    embedding: bytes | None = None  # float32, little-endian, of length 1; then no tokens
    error: str | None = None  # with finish_reason error
    error_code: int = 500  # 503: queue full
    error_param: str | None = None  # with 400: the field at fault, if it is one


class EngineStats(msgspec.Struct, kw_only=True):
    """The engine's state after a step; counters count from start."""

    num_running: int = 0
    num_waiting: int = 0
    num_queued_requests: int = 0  # never admitted yet; waiting are sequences, preempted ones, too
    num_queued_tokens: int = 0  # of their prompts
    kv_cache_usage: float = 0.0  # share of pages that sequences hold, 0-1
    num_preemptions: int = 0
    prefix_cache_queries: int = 0  # tokens
    prefix_cache_hits: int = 0  # tokens
    prefix_cache_epoch: int = 0  # another one: what was cached is gone
    step_compilations: int = 0  # executables compiled after ready: must stay 0
    iteration_tokens: int = 0  # tokens computed by the last step; 0: none since the last stats
    bucket_tokens: int = 0  # tokens the last step's bucket had room for
    device_step_seconds: float = 0.0  # dispatch to result of the last collected step
    host_gap_seconds: float = 0.0  # time the device waited for the host before the last step


class PageOwner(msgspec.Struct, array_like=True):
    """A sequence that holds pages."""

    request_id: str
    index: int  # choice
    num_tokens: int
    num_pages: int
    table: list[int]  # its first pages in order, of the first KV group; for the newest owners


class PoolSnapshot(msgspec.Struct):
    """A picture of the pool: every `stride`-th page, from page 1 on, a byte each.

    A page is free (0), free but cached (1), held by several sequences (2), held by one that is
    not named (3) or by `owners[byte - 4]`.
    """

    stride: int
    cells: bytes
    owners: list[PageOwner]


class StepOutputs(msgspec.Struct, tag=True):
    """What a step brought; sent without outputs when only the stats changed."""

    outputs: list[SequenceOutput]
    stats: EngineStats
    pool: PoolSnapshot | None = None  # some time after `AskPool`


class EngineInfo(msgspec.Struct, tag=True, kw_only=True):
    """What the core settled on; the first message it sends means "ready"."""

    max_model_len: int
    vocab_size: int
    num_pages: int
    page_size: int
    max_logprobs: int
    platform: str  # cpu, gpu
    attention_backend: str
    dtype: str
    lm_head_dtype: str
    buckets: list[str]  # readable, for the start-up line
    embedding_size: int = 0  # numbers of an embedding
    startup_seconds: dict[str, float]  # import, weights, trace, compile, warmup, total


class CommandDone(msgspec.Struct, tag=True):
    """What became of a `Command`."""

    number: int
    result: str | None = None  # of start_profile: the folder
    error: str | None = None


class EngineDead(msgspec.Struct, tag=True):
    """The core ends: it could not start, or its loop failed."""

    message: str  # one line; the traceback is in the log


CoreMessage = StepOutputs | EngineInfo | CommandDone | EngineDead
