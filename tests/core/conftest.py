from collections.abc import Callable
from typing import Any

import pytest

from jaxpaged.core.request import Request
from jaxpaged.core.scheduler import Scheduler, SchedulerConfig
from jaxpaged.core.scheduler_output import SchedulerOutput
from jaxpaged.core.sequence import SequenceState
from jaxpaged.sampling_params import SamplingParams


@pytest.fixture
def make_request() -> Callable[..., Request]:
    """Request(prompt ids or a length, request fields, sampling parameters)."""
    numbers = iter(range(1, 1000))

    def make(prompt: list[int] | int, request_id: str | None = None, **fields: Any) -> Request:
        number = next(numbers)
        if isinstance(prompt, int):
            prompt = [1000 * number + at for at in range(prompt)]
        of_request = {
            name: fields.pop(name)
            for name in ("eos_token_ids", "cache_salt", "seed")
            if name in fields
        }
        return Request(
            request_id=request_id or f"request {number}",
            prompt_token_ids=tuple(prompt),
            params=SamplingParams(**fields),
            **{"seed": 0, **of_request},
        )

    return make


@pytest.fixture
def make_sequence(make_request: Callable[..., Request]) -> Callable[..., SequenceState]:
    """A sequence outside any scheduler."""

    def make(prompt: list[int] | int, num_groups: int = 1, **fields: Any) -> SequenceState:
        request = make_request(prompt, **fields)
        return SequenceState(
            request=request,
            index=0,
            key=(0, 0, 0),
            max_len=1000,
            token_ids=list(request.prompt_token_ids),
            block_tables=[[] for _ in range(num_groups)],
        )

    return make


class SteppedScheduler(Scheduler):
    """Goes through steps whose every row yields the same token."""

    def take(self, output: SchedulerOutput, token: int = 0) -> list[SequenceState | None]:
        return self.update(output, [token] * sum(item.samples for item in output.sequences))

    def step(self, token: int = 0) -> SchedulerOutput:
        output = self.schedule()
        self.take(output, token)
        self.check_integrity()
        return output


@pytest.fixture
def make_scheduler() -> Callable[..., SteppedScheduler]:
    def make(**settings: Any) -> SteppedScheduler:
        defaults = {
            "page_size": 4,
            "num_pages": 101,
            "windows": (None,),
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "max_model_len": 64,
        }
        return SteppedScheduler(SchedulerConfig(**{**defaults, **settings}))

    return make
