"""A request as the scheduler sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxpaged.sampling_params import SamplingParams


@dataclass(frozen=True, kw_only=True)
class Request:
    """What was asked for. Its n choices are `SequenceState`s."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int  # already drawn if the parameters name none
    eos_token_ids: frozenset[int] = frozenset()  # empty when EOS is ignored
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    pooling: bool = False  # an embedding of the prompt is wanted, not the token that is sampled
    grammar: Any = None  # the state in which `runtime.grammar` begins each choice
    cache_salt: str | None = None  # prefixes are shared only under the same salt
    arrival: int = 0  # order of arrival, counted by `Scheduler.add`
