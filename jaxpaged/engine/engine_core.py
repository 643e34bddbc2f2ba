"""The engine's loop: schedule, dispatch, take the tokens of the step before."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import logging
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait

import numpy as np

from jaxpaged.config import EngineConfig
from jaxpaged.core import pool_picture
from jaxpaged.core.request import Request
from jaxpaged.core.scheduler import QueueFullError, Scheduler, SchedulerOutput
from jaxpaged.core.sequence import SequenceState
from jaxpaged.engine.commands import run_command
from jaxpaged.engine.grammar_checker import PARAM
from jaxpaged.engine.messages import (
    AddRequest,
    Command,
    CommandDone,
    EngineInfo,
    EngineStats,
    PageOwner,
    PoolSnapshot,
    SequenceOutput,
    TokenLogprobs,
)
from jaxpaged.grammar import GrammarError
from jaxpaged.model_files import tokenizer_file
from jaxpaged.parallel.hosts import Group
from jaxpaged.runtime.batch_builder import StepInput
from jaxpaged.runtime.grammar import Grammars, GrammarState
from jaxpaged.runtime.model_runner import InFlight, StepResult
from jaxpaged.runtime.startup import start_runner
from jaxpaged.runtime.step import rides_along
from jaxpaged.runtime.token_masks import waits_for_last_token

log = logging.getLogger(__name__)

COMPILE_POLL_SECONDS = 0.01  # how long an idle engine waits for a grammar before it looks around


class EngineCore:
    """One model on one mesh. Not thread-safe: one thread adds, steps and aborts.

    Args:
        serving: the defaults of a server.
        replica: which of several engines of equal settings; each draws other seeds.
        import_seconds: what the start took so far.
        group: the hosts that run the model together, of which this one leads; None: this one.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        serving: bool = False,
        replica: int = 0,
        import_seconds: float = 0.0,
        group: Group | None = None,
    ) -> None:
        begin = time.perf_counter()
        self._grammars = Grammars(functools.partial(tokenizer_file, config))
        if serving and not config.skip_tokenizer_init:
            self._grammars.warm_up()  # while weights are read and executables compiled
        self._compiling: list[tuple[AddRequest, int, Future[GrammarState]]] = []
        # Hosts that follow know nothing of what the leader's engine is for.
        started = start_runner(config, serving=serving or group is not None, group=group)
        self._runner = started.runner
        plan = self._runner.plan
        # Steps that stay in flight while the next is prepared: one for each stage of a pipeline.
        self._depth = len(plan.stages) - (not config.async_scheduling)
        self._scheduler = Scheduler(plan.scheduler_config(config))
        self._seed, self._seeds_drawn = config.seed, itertools.count(replica << 48)
        self._pending: deque[InFlight] = deque()  # dispatched, not yet collected
        self._outputs: list[SequenceOutput] = []  # news for the front end
        self._prompt_logprobs: dict[str, list[TokenLogprobs | None]] = {}
        self._admitted_at: dict[str, float] = {}  # time.time() of a request's first admission
        self._late_at_ready = self._runner.late_compilations
        self._iteration_tokens = self._bucket_tokens = 0
        self._step_seconds = self._host_gap = 0.0
        self._collected_at = 0.0
        seconds = {"import": import_seconds, **started.seconds}
        seconds["total"] = import_seconds + time.perf_counter() - begin
        self.info = EngineInfo(
            max_model_len=plan.max_model_len,
            vocab_size=plan.vocab,
            num_pages=plan.kv.num_pages - 1,
            page_size=plan.kv.page_size,
            max_logprobs=config.max_logprobs,
            platform=started.platform,
            attention_backend=started.backend,
            dtype=started.dtype,
            lm_head_dtype=started.lm_head_dtype,
            buckets=[str(bucket) for bucket in plan.buckets.forward],
            embedding_size=plan.width,
            startup_seconds=seconds,
        )
        log.info(
            "ready: %d pages of %d tokens, max_model_len %d, %d buckets, %s (head %s) on %s, "
            "attention: %s; seconds: %s",
            self.info.num_pages, self.info.page_size, self.info.max_model_len,
            len(self.info.buckets), self.info.dtype, self.info.lm_head_dtype,
            self.info.platform,
            self.info.attention_backend,
            ", ".join(f"{name} {value:.1f}" for name, value in seconds.items()),
        )  # fmt: skip

    # -- requests ------------------------------------------------------------------------------

    def add(self, message: AddRequest) -> None:
        """Queue a request; if it cannot be, an error output says why (503: the queue is full)."""
        seed = message.params.seed
        if seed is None:
            draw = f"{self._seed}:{next(self._seeds_drawn)}".encode()
            seed = int.from_bytes(hashlib.sha256(draw).digest()[:8], "little")
        most = self._scheduler.config.max_num_queued_reqs
        if message.grammar is None:
            self._queue(message, seed, None)
        elif most is not None and len(self._compiling) >= most:
            reason = f"the queue is full: the grammars of {most} requests wait to be compiled"
            self._fail(message.request_id, reason, 503)
        else:
            compiled = self._grammars.compile(message.grammar)
            self._compiling.append((message, seed, compiled))

    def _queue(self, message: AddRequest, seed: int, grammar: GrammarState | None) -> None:
        params = message.params
        if message.pooling and self._runner.plan.pool_means:  # every token is to be computed
            params = dataclasses.replace(params, skip_reading_prefix_cache=True)
        try:
            self._scheduler.add(
                Request(
                    request_id=message.request_id,
                    prompt_token_ids=tuple(message.prompt_token_ids),
                    params=params,
                    eos_token_ids=frozenset(message.eos_token_ids),
                    bad_word_ids=tuple(map(tuple, message.bad_word_ids)),
                    pooling=message.pooling,
                    grammar=grammar,
                    cache_salt=message.cache_salt,
                    seed=seed,
                )
            )
        except QueueFullError as error:
            self._fail(message.request_id, str(error), 503)
        except ValueError as error:
            self._fail(message.request_id, str(error), 400)

    def _queue_compiled(self) -> None:
        """Queue the requests whose grammars are compiled; if there is nothing else, wait a bit."""
        if not (self._scheduler.has_unfinished or self._pending or self._outputs):
            wait(
                [compiled for _, _, compiled in self._compiling], COMPILE_POLL_SECONDS,
                FIRST_COMPLETED,
            )  # fmt: skip
        compiling, self._compiling = self._compiling, []
        for message, seed, compiled in compiling:
            if not compiled.done():
                self._compiling.append((message, seed, compiled))
                continue
            try:
                self._queue(message, seed, compiled.result())
            except GrammarError as error:
                self._fail(message.request_id, str(error), 400, PARAM)
            except Exception as error:
                log.exception("compiling the grammar of request %s failed", message.request_id)
                self._fail(message.request_id, f"compiling the grammar failed: {error}", 500)

    def _fail(self, request_id: str, reason: str, code: int, param: str | None = None) -> None:
        """Tell the front end that a request has failed."""
        self._outputs.append(
            SequenceOutput(
                request_id=request_id, index=0, finish_reason="error", error=reason,
                error_code=code, error_param=param,
            )
        )  # fmt: skip

    def abort(self, request_id: str) -> None:
        """End a request at any moment: queued, running or with a token in flight."""
        ended = [sequence.index for sequence in self._scheduler.abort(request_id)]
        for entry in self._compiling:
            message, _, compiled = entry
            if message.request_id == request_id:
                compiled.cancel()
                ended = list(range(message.params.n))
                self._compiling.remove(entry)
                break
        for index in ended:
            self._outputs.append(
                SequenceOutput(request_id=request_id, index=index, finish_reason="abort")
            )
        self._forget(request_id)

    def finish(self, request_id: str, index: int, num_tokens: int) -> None:
        """A stop string ended a choice; the front end knows already."""
        self._scheduler.finish(request_id, index, num_tokens)

    def command(self, command: Command) -> CommandDone:
        """Do what an operator asks for."""
        return run_command(command, self._scheduler)

    def end(self) -> None:
        """Have the other hosts end, if there are some; the engine is of no use afterwards."""
        followers = self._runner.stages[0].followers
        if followers is not None:
            followers.end()

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do or to tell."""
        return bool(
            self._scheduler.has_unfinished or self._pending or self._outputs or self._compiling
        )

    # -- the loop ------------------------------------------------------------------------------

    def step(self) -> list[SequenceOutput]:
        """Dispatch the next step, then take what the one before it sampled: of a pipeline, what the
        one as many steps back as there are stages sampled.
        """
        if self._compiling:
            self._queue_compiled()
        scheduled = self._scheduler.schedule()
        for sequence in scheduled.admitted:
            if sequence.index == 0 and len(sequence.token_ids) == sequence.prompt_len:
                self._admitted_at.setdefault(sequence.request.request_id, time.time())
        if scheduled.sequences:
            step = self._dispatch_forward(scheduled)
            masks: dict[int, np.ndarray] = {}
            # Only masks may wait for tokens, and none rides along with the forward pass.
            if step.sampling is not None and not rides_along(step.sampling.variant):
                waiting = [i.sequence for i in step.sampling.sampled if waits_for_last_token(i)]
                if waiting:
                    self._collect_tokens_of(waiting)
                    masks = self._grammar_masks(scheduled)
            self._pending.append(self._runner.sample(scheduled, step, masks))
        if len(self._pending) > self._depth or not scheduled.sequences:
            self._collect()
        outputs, self._outputs = self._outputs, []
        return outputs

    def _dispatch_forward(self, scheduled: SchedulerOutput) -> StepInput:
        begin = time.perf_counter()
        device_waits = bool(self._pending) and self._pending[-1].is_ready()
        step = self._runner.forward(scheduled)
        self._host_gap = time.perf_counter() - begin if device_waits else 0.0
        self._bucket_tokens, self._iteration_tokens = step.bucket.num_tokens, scheduled.num_tokens
        return step

    def _grammar_masks(self, scheduled: SchedulerOutput) -> dict[int, np.ndarray]:
        """By slot; a request whose grammar cannot be followed any more ends alone."""
        masks, failed = self._grammars.masks(scheduled.sequences, self._runner.plan.vocab)
        for sequence, reason in failed:
            request_id = sequence.request.request_id
            log.warning("request %s cannot follow its grammar: %s", request_id, reason)
            if self._scheduler.abort(request_id):  # unless another choice has failed, too
                self._forget(request_id)
                reason = f"the output cannot be constrained further: {reason}"
                self._fail(request_id, reason, 400, PARAM)
        return masks

    def _collect_tokens_of(self, sequences: Sequence[SequenceState]) -> None:
        """Take steps until the host knows all of these but what the step in the making samples."""
        while self._pending and any(s.num_in_flight > 1 and not s.finished for s in sequences):
            self._collect()

    def _collect(self) -> None:
        if not self._pending:
            return
        step = self._pending.popleft()
        result = self._runner.collect(step)
        now = time.perf_counter()
        self._step_seconds = now - max(step.dispatched, self._collected_at)
        self._collected_at = now
        self._take_prompt_logprobs(result)
        sequences = self._scheduler.update(step.scheduled, result.token_ids)
        for row, (sequence, token_id) in enumerate(zip(sequences, result.token_ids, strict=True)):
            if sequence is None:
                continue
            request = sequence.request
            output = SequenceOutput(
                request_id=request.request_id,
                index=sequence.index,
                token_ids=[token_id],
                finish_reason=sequence.finish_reason,
                stop_reason=sequence.stop_reason,
            )
            wanted = request.params.logprobs
            if wanted is not None:
                output.logprobs = [_logprobs(result, row, token_id, wanted)]
            if request.pooling:
                assert result.embedding_RD is not None
                output.embedding = result.embedding_RD[row].astype("<f4").tobytes()
                output.token_ids, output.finish_reason = [], "stop"
            if sequence.index == 0 and len(sequence.token_ids) == sequence.prompt_len + 1:
                self._tell_once(sequence, output)
            self._outputs.append(output)

    def _take_prompt_logprobs(self, result: StepResult) -> None:
        first_row = len(result.token_ids)
        for row, wanted in enumerate(result.prompt_rows, first_row):
            if wanted.sequence.finished:
                continue  # aborted meanwhile
            request = wanted.sequence.request
            entries = self._prompt_logprobs.setdefault(request.request_id, [None])
            token_id = request.prompt_token_ids[wanted.position]
            entries.append(_logprobs(result, row, token_id, request.params.prompt_logprobs))

    def _tell_once(self, sequence: SequenceState, output: SequenceOutput) -> None:
        """Add to the first output of choice 0 what is said once a request."""
        request = sequence.request
        output.num_cached_tokens = sequence.num_cached_tokens
        output.scheduled_time = self._admitted_at.pop(request.request_id)
        if request.params.prompt_logprobs is not None:
            output.prompt_logprobs = self._prompt_logprobs.pop(request.request_id, [None])

    def _forget(self, request_id: str) -> None:
        self._prompt_logprobs.pop(request_id, None)
        self._admitted_at.pop(request_id, None)

    def stats(self) -> EngineStats:
        """Gauges and counters as they stand; the figures of a step are told once."""
        scheduler = self._scheduler
        stats = EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting + len(self._compiling),
            num_queued_requests=scheduler.num_queued_requests,
            num_queued_tokens=scheduler.num_queued_tokens,
            kv_cache_usage=scheduler.pages.pool.usage,
            num_preemptions=scheduler.num_preemptions,
            prefix_cache_queries=scheduler.prefix_cache_queries,
            prefix_cache_hits=scheduler.prefix_cache_hits,
            prefix_cache_epoch=scheduler.prefix_cache_epoch,
            step_compilations=self._runner.late_compilations - self._late_at_ready,
            iteration_tokens=self._iteration_tokens,
            bucket_tokens=self._bucket_tokens,
            device_step_seconds=self._step_seconds,
            host_gap_seconds=self._host_gap,
        )
        self._iteration_tokens = self._bucket_tokens = 0
        self._step_seconds = self._host_gap = 0.0
        return stats

    def pool(self) -> PoolSnapshot:
        """A picture of the page pool."""
        picture = pool_picture.draw(self._scheduler.pages.pool, self._scheduler.sequences)
        owners = [
            PageOwner(owner.request_id, owner.index, owner.num_tokens, owner.num_pages, owner.table)
            for owner in picture.owners
        ]
        return PoolSnapshot(picture.stride, picture.cells, owners)


def _logprobs(result: StepResult, row: int, token_id: int, count: int | None) -> TokenLogprobs:
    assert result.logprob_R is not None and result.rank_R is not None
    assert result.top_id_RX is not None and result.top_logprob_RX is not None
    return TokenLogprobs(
        token_id,
        float(result.logprob_R[row]),
        int(result.rank_R[row]),
        result.top_id_RX[row, :count].tolist(),
        result.top_logprob_RX[row, :count].tolist(),
    )
