"""The engine for a server: many requests at once, the core in a process of its own."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from jaxpaged import model_files
from jaxpaged.config import EngineConfig
from jaxpaged.engine.core_client import CORE_COMMAND, CoreClient
from jaxpaged.engine.errors import BadRequestError, EngineDeadError, RequestFailedError
from jaxpaged.engine.grammar_checker import WAIT_SECONDS, GrammarChecker, too_slow
from jaxpaged.engine.input_processor import InputProcessor, Prompt
from jaxpaged.engine.messages import (
    AbortRequests,
    AddRequest,
    Command,
    CommandDone,
    EngineInfo,
    EngineStats,
    PoolSnapshot,
    SequenceOutput,
)
from jaxpaged.engine.metrics import Metrics, RequestTimes
from jaxpaged.engine.output_processor import OutputProcessor
from jaxpaged.engine.pool_watch import PoolWatch
from jaxpaged.engine.tokenizer import Tokenizer, generation_defaults
from jaxpaged.outputs import RequestOutput
from jaxpaged.sampling_params import SamplingParams

log = logging.getLogger(__name__)

LONG_TEXT = 20_000  # characters beyond which a text is tokenized in a thread
STATS_SECONDS = 10.0  # between two lines of statistics in the log


# Called as a request begins, in the context of who began it; what it returns is called with the
# reason when the request has ended.
Observer = Callable[[RequestTimes], Callable[[str], None]]


@dataclass
class _Flight:
    """A request that somebody waits for."""

    times: RequestTimes
    delta: bool
    tell_end: list[Callable[[str], None]]
    queue: asyncio.Queue[RequestOutput | RequestFailedError] = field(default_factory=asyncio.Queue)


class AsyncLLM:
    """Generates for many callers of one event loop; `start` first, `shutdown` at the end.

    Args:
        config: settings of the core.
        core_command: what runs the core.
        model_name: label of the metrics.
        metrics_prefix: what the metrics' names begin with.
        log_stats: log throughput and load every ten seconds in which there was any.
        observers: are told of each request's begin and end.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        core_command: Sequence[str] = CORE_COMMAND,
        model_name: str = "demo",
        metrics_prefix: str = "jaxpaged",
        log_stats: bool = False,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.config = config
        self.tokenizer: Tokenizer | None = None
        self._grammars: GrammarChecker | None = None  # None: there is no tokenizer
        self.sampling_defaults: dict[str, Any] = {}  # from the model's generation_config.json
        self.stats = EngineStats()
        self.dead: EngineDeadError | None = None
        self._core = CoreClient(core_command)
        self._pool_watch = PoolWatch(self._core.send)
        self._labels = (model_name, metrics_prefix)
        self._log_stats = log_stats
        self._observers = observers
        self._flights: dict[str, _Flight] = {}  # by the engine's id
        self._arrivals = itertools.count()
        self._commands: dict[int, asyncio.Future[CommandDone]] = {}  # by number, unanswered
        self._died = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> EngineInfo:
        """Start the core and load the tokenizer meanwhile.

        Raises:
            EngineStartError: the core could not start.
            OSError: the model's or the tokenizer's files are missing.
        """
        config = self.config
        folder = await asyncio.to_thread(
            model_files.resolve_model, config.model, config.revision, config.download_dir
        )
        if config.generation_config == "auto":
            self.sampling_defaults = generation_defaults(folder)
        try:
            await self._core.launch(config)
            if not config.skip_tokenizer_init:
                self.tokenizer = await asyncio.to_thread(self._load_tokenizer, folder)
                self._grammars = GrammarChecker(self.tokenizer.file)
                self._grammars.warm_up()
            self.info = await self._core.wait_ready()
        except BaseException:
            if self._grammars is not None:
                self._grammars.close()
            await asyncio.shield(self._core.kill())
            raise
        self._inputs = InputProcessor(self.info, self.tokenizer, self._grammars)
        self._outputs = OutputProcessor(self.tokenizer)
        self.metrics = Metrics(self.info, *self._labels)
        self._tasks.append(asyncio.create_task(self._read()))
        if self._log_stats:
            self._tasks.append(asyncio.create_task(self._log_load()))
        return self.info

    async def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str,
        **options: Any,
    ) -> AddRequest:
        """Tokenize and validate, without queuing anything.

        Args:
            options: those of `InputProcessor.request`.

        Raises:
            BadRequestError: says what to change.
        """
        make = functools.partial(
            self._inputs.request,
            request_id,
            prompt,
            params,
            **{"arrival_time": time.time(), **options},
        )
        if params.structured_outputs is not None and self._grammars is not None:
            checked = asyncio.wrap_future(self._grammars.submit(params.structured_outputs))
            try:
                grammar = await asyncio.wait_for(checked, WAIT_SECONDS)
            except TimeoutError:
                raise too_slow() from None
            make = functools.partial(make, grammar=grammar)
        text = prompt.get("prompt") if isinstance(prompt, dict) else prompt
        if isinstance(text, str) and len(text) > LONG_TEXT:
            return await asyncio.to_thread(make)
        return make()

    async def run(
        self, request: AddRequest, *, prompt: str | None = None, delta: bool = True
    ) -> AsyncGenerator[RequestOutput, None]:
        """Queue a prepared request; what comes of it. Leaving the iteration aborts it.

        Its id is only repeated in the outputs: two requests may have the same.

        Args:
            prompt: its text, if known.
            delta: yield what is new of a choice at each step; otherwise all of it, once.

        Raises:
            RequestFailedError: the queue is full.
            EngineDeadError: the core died, before or meanwhile.
        """
        if self.dead is not None:
            raise self.dead
        # The engine knows it by an id of its own: late news of a request that had the same id,
        # and was aborted, must not reach this one.
        given_id = request.request_id
        times = RequestTimes(request)
        request_id = f"{given_id}-{next(self._arrivals)}"
        request = msgspec.structs.replace(request, request_id=request_id)
        flight = _Flight(times, delta, [observe(times) for observe in self._observers])
        self._flights[request_id] = flight
        self._outputs.add(request, prompt, delta=delta)
        try:
            self._core.send(request)
            finished = False
            while not finished:
                output = await flight.queue.get()
                if isinstance(output, RequestFailedError):
                    raise output
                finished = output.finished
                output.request_id = given_id
                yield output
        finally:
            self._abort(request_id)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str,
        *,
        delta: bool = True,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """`prepare` and `run` in one; `options` are those of `prepare`."""
        request = await self.prepare(prompt, params, request_id, **options)
        text = prompt.get("prompt") if isinstance(prompt, dict) else prompt
        outputs = self.run(request, prompt=text if isinstance(text, str) else None, delta=delta)
        async for output in outputs:
            yield output

    def abort_all(self) -> None:
        """End every request; those that wait get an output with finish_reason abort."""
        if self._flights:
            self._core.send(AbortRequests(list(self._flights)))

    async def command(self, name: str, argument: str | None = None) -> str | None:
        """Have the core do something beside requests; see `Command`.

        Raises:
            BadRequestError: it cannot be done now; in the core's words.
            EngineDeadError: the core died, before or meanwhile.
        """
        if self.dead is not None:
            raise self.dead
        number = next(self._arrivals)
        answer = self._commands[number] = asyncio.get_running_loop().create_future()
        self._core.send(Command(number, name, argument))
        try:
            done = await answer
        finally:
            del self._commands[number]
        if done.error is not None:
            raise BadRequestError(done.error)
        return done.result

    @property
    def num_requests(self) -> int:
        """Requests that somebody waits for."""
        return len(self._flights)

    async def pool(self) -> PoolSnapshot | None:
        """A picture of the page pool, some tenths of a second old.

        Raises:
            EngineDeadError: there is no pool any more.
        """
        if self.dead is not None:
            raise self.dead
        return await self._pool_watch.look()

    async def wait_dead(self) -> None:
        """Return when the core has died."""
        await self._died.wait()

    async def shutdown(self) -> None:
        """End the core; requests in flight fail."""
        for task in self._tasks:
            task.cancel()
        if self.dead is None:
            self._die(EngineDeadError("the server is shutting down"))
        if self._grammars is not None:
            await asyncio.to_thread(self._grammars.close)
        await self._core.stop()

    def _abort(self, request_id: str) -> None:
        """End a request that nobody waits for any more; nothing happens if it has ended."""
        flight = self._flights.pop(request_id, None)
        if flight is None:
            return
        self._outputs.abort(request_id)
        if self.dead is None:
            self._core.send(AbortRequests([request_id]))
        self._tell_end(flight, "error" if self.dead else "abort")

    def _load_tokenizer(self, folder: Path) -> Tokenizer:
        if self.config.tokenizer is None:
            return Tokenizer.load(folder)
        return Tokenizer.load(model_files.resolve_model(self.config.tokenizer), folder)

    async def _read(self) -> None:
        """Hand the core's news to those who wait."""
        try:
            async for message in self._core.news():
                if isinstance(message, CommandDone):
                    self._answer(message)
                    continue
                self.stats = message.stats
                self.metrics.step(message.stats)
                self._pool_watch.take(message.pool)
                now = time.time()
                for news in message.outputs:
                    self._take(news, now)
        except EngineDeadError as error:
            log.error("%s", error.message)
            self._die(error)
        except Exception as error:
            log.exception("reading the engine's outputs failed")
            self._die(EngineDeadError(f"reading the engine's outputs failed: {error}"))

    def _answer(self, done: CommandDone) -> None:
        waiting = self._commands.get(done.number)
        if waiting is not None and not waiting.done():
            waiting.set_result(done)

    def _take(self, news: SequenceOutput, now: float) -> None:
        flight = self._flights.get(news.request_id)
        if flight is None:
            return
        try:
            output, tell = self._outputs.process(news)
        except RequestFailedError as error:
            self._end(news.request_id, "error")
            flight.queue.put_nowait(error)
            return
        except Exception:  # say, a tokenizer that fails on these tokens: no reason to end the rest
            log.exception("reading the output of request %s failed", news.request_id)
            self._outputs.abort(news.request_id)
            self._core.send(AbortRequests([news.request_id]))
            self._end(news.request_id, "error")
            flight.queue.put_nowait(RequestFailedError("reading the output failed", 500))
            return
        if output is None:
            return
        if tell is not None:
            self._core.send(tell)
        self.metrics.tokens(flight.times, news, now)
        if output.finished:
            choice = output.outputs[0 if flight.delta else news.index]
            self._end(news.request_id, choice.finish_reason or "stop")
        if flight.delta or output.finished:
            flight.queue.put_nowait(output)

    def _end(self, request_id: str, reason: str) -> None:
        self._tell_end(self._flights.pop(request_id), reason)

    def _tell_end(self, flight: _Flight, reason: str) -> None:
        self.metrics.finish(flight.times, reason)
        for tell in flight.tell_end:
            tell(reason)

    def _die(self, error: EngineDeadError) -> None:
        self.dead = error
        self._died.set()
        for flight in self._flights.values():
            flight.queue.put_nowait(error)
        for waiting in self._commands.values():
            if not waiting.done():
                waiting.set_exception(error)

    async def _log_load(self) -> None:
        while True:
            await asyncio.sleep(STATS_SECONDS)
            line = self.metrics.load_line(self.stats, STATS_SECONDS)
            if line is not None:
                log.info("%s", line)
