"""Serves a trace with the engine's own scheduler, on a clock instead of a GPU."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxpaged.core.request import Request
from jaxpaged.core.scheduler import Scheduler
from jaxpaged.core.scheduler_config import SchedulerConfig
from jaxpaged.core.scheduler_output import SchedulerOutput
from jaxpaged.planning.cost_model import CostModel, work_of
from jaxpaged.planning.lengths import Lengths, random_prompts
from jaxpaged.runtime.plan import EnginePlan
from jaxpaged.sampling_params import SamplingParams

TOKEN = 0  # what every row samples: outputs end by their length


@dataclass(frozen=True)
class Arrival:
    """A request and the second at which it comes."""

    seconds: float
    request: Request


@dataclass
class Record:
    """Seconds of one request: when it came, and when each of its tokens did."""

    arrived: float
    tokens: list[float] = field(default_factory=list)
    sampled: float = 0.0  # when the newest is on the GPU


@dataclass(frozen=True)
class Pending:
    """A step on the GPU."""

    scheduled: SchedulerOutput
    done: float


def make_trace(
    lengths: Sequence[Lengths],
    arrivals: Sequence[float],
    vocab: int,
    shared_prefix: int = 0,
    seed: int = 0,
) -> list[Arrival]:
    """Requests with random prompts and outputs of exact lengths.

    Args:
        shared_prefix: tokens with which all prompts begin, as far as they go.
    """
    rng = np.random.default_rng(seed)
    longest = max((item.prompt for item in lengths), default=0)
    prefix = rng.integers(0, vocab, min(shared_prefix, longest)).tolist()
    prompts = random_prompts(lengths, vocab, rng)
    return [
        Arrival(
            second,
            Request(
                request_id=str(number),
                prompt_token_ids=(*prefix[: len(prompt)], *prompt[shared_prefix:]),
                params=SamplingParams(temperature=0.0, max_tokens=item.output, ignore_eos=True),
                seed=0,
            ),
        )
        for number, (second, item, prompt) in enumerate(
            zip(arrivals, lengths, prompts, strict=True)
        )
    ]


class Replica:
    """One engine: the loop of `EngineCore.step`, as many steps ahead as there are stages."""

    def __init__(self, config: SchedulerConfig, plan: EnginePlan, cost: CostModel) -> None:
        self.scheduler = Scheduler(config)
        self.records: dict[str, Record] = {}
        self.spent: defaultdict[str, float] = defaultdict(float)  # seconds, by what bounds them
        self.num_steps = self.num_sequences = self.num_tokens = 0
        self.now = 0.0
        self._buckets, self._cost = plan.buckets, cost
        self._pending: deque[Pending] = deque()
        self._free = [0.0] * cost.num_stages  # when the GPUs of each stage have nothing to do

    @property
    def num_requests(self) -> int:
        """Running and waiting."""
        return self.scheduler.num_running + self.scheduler.num_waiting

    def add(self, arrival: Arrival) -> None:
        """Queue a request that has come by now.

        Raises:
            ValueError: its prompt leaves no room for a token.
        """
        self.now = max(self.now, arrival.seconds)
        self.records[arrival.request.request_id] = Record(arrival.seconds)
        self.scheduler.add(arrival.request)

    def run(self, until: float = math.inf) -> None:
        """Step until that second, or until nothing is left to do."""
        while self.now < until and (self.scheduler.has_unfinished or self._pending):
            self._step()

    def _step(self) -> None:
        scheduled = self.scheduler.schedule()
        if scheduled.sequences:
            self._pending.append(self._dispatch(scheduled))
        if self._pending and (len(self._pending) > len(self._free) or not scheduled.sequences):
            self._collect(self._pending.popleft())

    def _dispatch(self, scheduled: SchedulerOutput) -> Pending:
        sequences = scheduled.sequences
        self.now += self._cost.host_seconds(len(sequences))
        records = [self.records[item.sequence.request.request_id] for item in sequences]
        work = work_of(sequences, scheduled.num_tokens, self._buckets, self._cost.windows)
        # Stages hand each other a step; the first waits for tokens that the last one samples.
        at = max(self.now, *(record.sampled for record in records))
        if self._pending:
            self.spent["host"] += max(0.0, self.now - self._free[0])
        for stage, seconds in enumerate(self._cost.seconds(work)):
            if self._pending:
                self.spent["pipeline"] += max(0.0, at - max(self.now, self._free[stage]))
            at = self._free[stage] = max(at, self._free[stage]) + sum(seconds.values())
            for kind, value in seconds.items():
                self.spent[kind] += value
        for item, record in zip(sequences, records, strict=True):
            if item.samples:
                record.sampled = at
        self.num_steps += 1
        self.num_sequences += len(sequences)
        self.num_tokens += scheduled.num_tokens
        return Pending(scheduled, at)

    def _collect(self, step: Pending) -> None:
        self.now = max(self.now, step.done)
        count = sum(item.samples for item in step.scheduled.sequences)
        for sequence in self.scheduler.update(step.scheduled, [TOKEN] * count):
            if sequence is not None:
                self.records[sequence.request.request_id].tokens.append(self.now)


def simulate(
    config: SchedulerConfig,
    plan: EnginePlan,
    cost: CostModel,
    trace: Sequence[Arrival],
    num_replicas: int = 1,
) -> list[Replica]:
    """Serve the trace; each request goes to the replica that has fewest.

    Raises:
        ValueError: a request is too long for these settings.
    """
    replicas = [Replica(config, plan, cost) for _ in range(num_replicas)]
    for arrival in trace:
        for replica in replicas:
            replica.run(arrival.seconds)
        min(replicas, key=lambda replica: replica.num_requests).add(arrival)
    for replica in replicas:
        replica.run()
    return replicas
