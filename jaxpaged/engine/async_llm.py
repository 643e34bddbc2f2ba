"""The engine for a server: many requests at once, each core in a process of its own."""

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
from jaxpaged.engine.core_client import FrontEnd
from jaxpaged.engine.core_fleet import CORE_COMMAND, CoreFleet
from jaxpaged.engine.errors import BadRequestError, EngineDeadError, RequestFailedError
from jaxpaged.engine.grammar_checker import GrammarChecker
from jaxpaged.engine.input_processor import InputProcessor, Prompt
from jaxpaged.engine.load_log import LoadLog
from jaxpaged.engine.messages import (
    AbortRequests,
    AddRequest,
    Command,
    EngineInfo,
    EngineStats,
    PoolSnapshot,
    SequenceOutput,
)
from jaxpaged.engine.metrics import MetricsRegistry, RequestTimes
from jaxpaged.engine.output_processor import OutputProcessor
from jaxpaged.engine.replica import Replica, connect, least_full, living_pages, together
from jaxpaged.engine.router import TYPICAL_OUTPUT, Route, Router
from jaxpaged.engine.tokenizer import Tokenizer, generation_defaults
from jaxpaged.outputs import RequestOutput
from jaxpaged.sampling_params import SamplingParams

log = logging.getLogger(__name__)

LONG_TEXT = 20_000  # characters beyond which a text is tokenized in a thread

Failure = RequestFailedError | BadRequestError
# Called as a request begins, in the context of who began it; what it returns is called with the
# reason when the request has ended.
Observer = Callable[[RequestTimes], Callable[[str], None]]


@dataclass
class _Flight:
    """A request that somebody waits for."""

    replica: Replica
    route: Route
    times: RequestTimes
    delta: bool
    tell_end: list[Callable[[str], None]]
    queue: asyncio.Queue[RequestOutput | Failure] = field(default_factory=asyncio.Queue)


class AsyncLLM:
    """Generates for many callers of one event loop; `start` first, `shutdown` at the end.

    Args:
        config: settings of the cores; data_parallel_size says how many there are.
        core_command: what runs a core.
        front_end: this process shares cores that run already; None: it starts its own.
        metrics: where its series are shown.
        log_stats: log throughput and load every ten seconds in which there was any.
        observers: are told of each request's begin and end.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        core_command: Sequence[str] = CORE_COMMAND,
        front_end: FrontEnd | None = None,
        metrics: MetricsRegistry | None = None,
        log_stats: bool = False,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.config = config
        self.tokenizer: Tokenizer | None = None
        self._grammars: GrammarChecker | None = None  # None: there is no tokenizer
        self.sampling_defaults: dict[str, Any] = {}  # from the model's generation_config.json
        self.replicas: list[Replica] = []
        self.metrics = metrics or MetricsRegistry("demo", "jaxpaged")
        self._fleet = CoreFleet(config, core_command) if front_end is None else None
        self._front_end = front_end
        self._log_stats = log_stats
        self._observers = observers
        self._flights: dict[str, _Flight] = {}  # by the engine's id
        self._died = asyncio.Event()  # every replica has
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> EngineInfo:
        """Start the cores and load the tokenizer meanwhile.

        Raises:
            EngineStartError: a core could not start.
            ValueError: there are too few devices.
            OSError: the model's or the tokenizer's files are missing.
        """
        config = self.config
        folder = await asyncio.to_thread(
            model_files.resolve_model, config.model, config.revision, config.download_dir
        )
        if config.generation_config == "auto":
            self.sampling_defaults = generation_defaults(folder)
        try:
            front_end = self._front_end
            if self._fleet is not None:
                (front_end,) = await self._fleet.launch()
            assert front_end is not None
            if not config.skip_tokenizer_init:
                self.tokenizer = await asyncio.to_thread(self._load_tokenizer, folder)
                self._grammars = GrammarChecker(self.tokenizer.file)
                self._grammars.warm_up()
            self.replicas = await connect(front_end, self.metrics)
        except BaseException:
            if self._grammars is not None:
                self._grammars.close()
            if self._fleet is not None:
                await asyncio.shield(self._fleet.kill())
            raise
        infos = [replica.info for replica in self.replicas]
        self.info = msgspec.structs.replace(
            infos[0], max_model_len=min(info.max_model_len for info in infos)
        )
        pages = [info.num_pages if config.enable_prefix_caching else 0 for info in infos]
        self._router = Router(pages, self.info.page_size, turn=front_end.index)
        self._numbers = itertools.count(front_end.index, front_end.count)  # see FrontEnd
        self._inputs = InputProcessor(self.info, self.tokenizer, self._grammars)
        self._outputs = OutputProcessor(self.tokenizer)
        self._tasks += [asyncio.create_task(self._read(replica)) for replica in self.replicas]
        self._tasks += [asyncio.create_task(r.watch(config.engine_timeout)) for r in self.replicas]
        if self._log_stats and front_end.index == 0:
            load_log = LoadLog(lambda: living_pages(self.replicas))
            logging_load = load_log.run(lambda: self.stats, self.metrics.totals)
            self._tasks.append(asyncio.create_task(logging_load))
        return self.info

    @property
    def living(self) -> list[Replica]:
        """The engines that serve; none before the start and after the last one's death."""
        return [replica for replica in self.replicas if replica.dead is None]

    @property
    def dead(self) -> EngineDeadError | None:
        """Why no request will be served any more."""
        return None if self.living or not self.replicas else self.replicas[0].dead

    @property
    def stats(self) -> EngineStats:
        """The state of all engines together."""
        return together(self.replicas)

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
            RequestFailedError: too many grammars wait to be compiled.
        """
        make = functools.partial(
            self._inputs.request,
            request_id,
            prompt,
            params,
            **{"arrival_time": time.time(), **options},
        )
        if params.structured_outputs is not None and self._grammars is not None:
            grammar = await self._grammars.checked(params.structured_outputs)
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
            BadRequestError: it cannot be fulfilled, as showed only now.
            EngineDeadError: its engine died meanwhile, or all of them before.
        """
        route = self._route(request)
        replica = self.replicas[route.engine]
        # The engine knows it by an id of its own: late news of a request that had the same id,
        # and was aborted, must not reach this one.
        given_id = request.request_id
        times = RequestTimes(request)
        request_id = f"{given_id}-{next(self._numbers)}"
        request = msgspec.structs.replace(request, request_id=request_id)
        flight = _Flight(
            replica, route, times, delta, [observe(times) for observe in self._observers]
        )
        self._flights[request_id] = flight
        self._outputs.add(request, prompt, delta=delta)
        try:
            replica.send(request)
            finished = False
            while not finished:
                output = await flight.queue.get()
                if isinstance(output, Failure):
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
        """End every request; those that wait get an output with finish_reason abort.

        Requests whose grammars are compiled fail, and so does any that brings one later.
        """
        if self._grammars is not None:
            self._grammars.close()
        for replica in self.living:
            own = [name for name, flight in self._flights.items() if flight.replica is replica]
            if own:
                replica.send(AbortRequests(own))

    async def command(self, name: str, arguments: Sequence[str] = ()) -> None:
        """Have every living engine do something beside requests; see `Command`.

        Args:
            arguments: one for each engine, if it takes one.

        Raises:
            BadRequestError: it cannot be done now; in the core's words.
            EngineDeadError: one died meanwhile, or all of them before.
        """
        if self.dead is not None:
            raise self.dead
        doing = []
        for replica in self.living:
            argument = arguments[replica.number] if arguments else ""
            doing.append(replica.command(Command(next(self._numbers), name, argument)))
        await asyncio.gather(*doing)

    @property
    def num_requests(self) -> int:
        """Requests that somebody waits for."""
        return len(self._flights)

    async def pool(self) -> tuple[Replica, PoolSnapshot | None]:
        """The first living engine and a picture of its page pool, some tenths of a second old.

        Raises:
            EngineDeadError: there is no pool any more.
        """
        if self.dead is not None:
            raise self.dead
        first = self.living[0]
        return first, await first.pool()

    async def wait_dead(self) -> None:
        """Return when the last engine has died."""
        await self._died.wait()

    async def shutdown(self) -> None:
        """End the cores, if they are its own; requests in flight fail."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for replica in self.living:
            self._die(replica, EngineDeadError("the server is shutting down"))
        if self._grammars is not None:
            await asyncio.to_thread(self._grammars.close)
        for replica in self.replicas:
            replica.close()
        if self._fleet is not None:
            await self._fleet.stop()

    def _route(self, request: AddRequest) -> Route:
        if self.dead is not None:
            raise self.dead
        params, prompt = request.params, request.prompt_token_ids
        output = params.n * min(params.max_tokens or TYPICAL_OUTPUT, TYPICAL_OUTPUT)
        engines = least_full(self.living, self.config, len(prompt))
        return self._router.route(engines, prompt, request.cache_salt, output)

    def _abort(self, request_id: str) -> None:
        """End a request that nobody waits for any more; nothing happens if it has ended."""
        flight = self._flights.pop(request_id, None)
        if flight is None:
            return
        self._outputs.abort(request_id)
        flight.replica.send(AbortRequests([request_id]))
        self._tell_end(flight, "error" if flight.replica.dead else "abort")

    def _load_tokenizer(self, folder: Path) -> Tokenizer:
        if self.config.tokenizer is None:
            return Tokenizer.load(folder)
        return Tokenizer.load(model_files.resolve_model(self.config.tokenizer), folder)

    async def _read(self, replica: Replica) -> None:
        """Hand an engine's news to those who wait."""
        try:
            epoch = replica.stats.prefix_cache_epoch
            async for outputs in replica.news():
                if replica.stats.prefix_cache_epoch != epoch:  # whichever front end asked for it
                    epoch = replica.stats.prefix_cache_epoch
                    self._router.forget(replica.number)
                now = time.time()
                for news in outputs:
                    self._take(news, now)
        except EngineDeadError as error:
            log.error("%s", error.message)
            self._die(replica, error)
        except Exception as error:
            log.exception("reading the engine's outputs failed")
            self._die(replica, EngineDeadError(f"reading the engine's outputs failed: {error}"))

    def _take(self, news: SequenceOutput, now: float) -> None:
        flight = self._flights.get(news.request_id)
        if flight is None:
            return
        try:
            output, tell = self._outputs.process(news)
        except (RequestFailedError, BadRequestError) as error:
            self._end(news.request_id, "error")
            flight.queue.put_nowait(error)
            return
        except Exception:  # say, a tokenizer that fails on these tokens: no reason to end the rest
            log.exception("reading the output of request %s failed", news.request_id)
            self._outputs.abort(news.request_id)
            flight.replica.send(AbortRequests([news.request_id]))
            self._end(news.request_id, "error")
            flight.queue.put_nowait(RequestFailedError("reading the output failed", 500))
            return
        if output is None:
            return
        if tell is not None:
            flight.replica.send(tell)
        if flight.times.first_token is None:
            self._router.prompt_done(flight.route)
        flight.replica.metrics.tokens(flight.times, news, now)
        if output.finished:
            choice = output.outputs[0 if flight.delta else news.index]
            self._end(news.request_id, choice.finish_reason or "stop")
        if flight.delta or output.finished:
            flight.queue.put_nowait(output)

    def _end(self, request_id: str, reason: str) -> None:
        self._tell_end(self._flights.pop(request_id), reason)

    def _tell_end(self, flight: _Flight, reason: str) -> None:
        self._router.end(flight.route)
        flight.replica.metrics.finish(flight.times, reason)
        for tell in flight.tell_end:
            tell(reason)

    def _die(self, replica: Replica, error: EngineDeadError) -> None:
        replica.die(error)
        for flight in self._flights.values():
            if flight.replica is replica:
                flight.queue.put_nowait(error)
        if not self.living:
            self._died.set()
