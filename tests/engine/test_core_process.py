"""The core's message loop around a stand-in for the engine: no JAX, no sockets."""

from __future__ import annotations

import os
import time

import msgspec
import pytest

from jaxpaged.engine import core_process
from jaxpaged.engine.core_process import CoreServer
from jaxpaged.engine.messages import (
    AskPool,
    Command,
    CommandDone,
    CoreMessage,
    EngineInfo,
    EngineStats,
    FinishSequence,
    FrontMessage,
    PoolSnapshot,
    SequenceOutput,
    Shutdown,
    StepOutputs,
)


class Engine:
    """Works for so many steps; a picture of its pool takes a while of the processor."""

    def __init__(self, info: EngineInfo, steps: int = 0, picture_seconds: float = 0.0) -> None:
        self.info, self.steps, self.picture_seconds = info, steps, picture_seconds
        self.drawn = 0

    @property
    def has_work(self) -> bool:
        return self.steps > 0

    def step(self) -> list[SequenceOutput]:
        self.steps -= 1
        return []

    def stats(self) -> EngineStats:
        return EngineStats()

    def finish(self, request_id: str, index: int, num_tokens: int) -> None:
        pass

    def pool(self) -> PoolSnapshot:
        self.drawn += 1
        end = time.thread_time() + self.picture_seconds
        while time.thread_time() < end:
            pass
        return PoolSnapshot(1, b"\0", [])


class Socket:
    """Messages for the core, one before each step, then the end; and what it sends."""

    def __init__(self, engine: Engine, *messages: FrontMessage) -> None:
        self.engine, self.messages = engine, list(messages)
        self.sent: list[CoreMessage] = []
        self.given_at = -1

    def poll(self, timeout: int) -> bool:
        return self.given_at != self.engine.steps or not self.engine.has_work

    def recv(self) -> bytes:
        self.given_at = self.engine.steps
        message = self.messages.pop(0) if self.messages else Shutdown()
        return msgspec.msgpack.encode(message)

    def send(self, data: bytes) -> None:
        self.sent.append(msgspec.msgpack.decode(data, type=CoreMessage))


def run(engine: Engine, *messages: FrontMessage) -> list[StepOutputs]:
    socket = Socket(engine, *messages)
    CoreServer(engine, socket, [socket], os.getppid()).run()
    assert isinstance(socket.sent[0], EngineInfo)
    return [message for message in socket.sent if isinstance(message, StepOutputs)]


def test_a_picture_comes_only_to_who_asked(info: EngineInfo):
    steps = run(Engine(info, steps=3), AskPool(), FinishSequence("r", 0, 1))
    assert [step.pool is not None for step in steps] == [True, False]
    engine = Engine(info, steps=1)
    assert run(engine) == [] and engine.drawn == 0


def test_costly_pictures_are_rare(info: EngineInfo, monkeypatch: pytest.MonkeyPatch):
    engine = Engine(info, steps=20, picture_seconds=0.002)
    steps = run(engine, *[AskPool()] * 20)
    assert len(steps) == 20 and engine.drawn == 1
    monkeypatch.setattr(core_process, "PICTURE_SECONDS", 0.0)
    engine = Engine(info, steps=20, picture_seconds=0.002)
    run(engine, *[AskPool()] * 20)
    assert engine.drawn == 20


def test_each_front_end_hears_of_its_own_requests_and_all_of_the_state(info: EngineInfo):
    class Two(Engine):
        def step(self) -> list[SequenceOutput]:
            super().step()
            return [SequenceOutput(request_id=f"a-b-{number}", index=0) for number in range(5)]

        def command(self, command: Command) -> CommandDone:
            return CommandDone(command.number)

    engine = Two(info, steps=2)
    first = Socket(engine, Command(7, "any"), Command(8, "any"))
    second = Socket(engine)
    CoreServer(engine, first, [first, second], os.getppid()).run()
    assert [type(sink.sent[0]) for sink in (first, second)] == [EngineInfo] * 2
    done = [[m.number for m in sink.sent if isinstance(m, CommandDone)] for sink in (first, second)]
    assert done == [[8], [7]]
    steps = [[m for m in sink.sent if isinstance(m, StepOutputs)] for sink in (first, second)]
    told = [[output.request_id for output in step[0].outputs] for step in steps]
    assert told == [["a-b-0", "a-b-2", "a-b-4"], ["a-b-1", "a-b-3"]]
    assert [len(step) for step in steps] == [2, 2]


def test_news_say_nothing_of_what_is_not_there():
    news = SequenceOutput(request_id="a", index=0, token_ids=[5], finish_reason="stop")
    data = msgspec.msgpack.encode(news)
    assert set(msgspec.msgpack.decode(data)) == {
        "request_id",
        "index",
        "token_ids",
        "finish_reason",
    }
    assert msgspec.msgpack.decode(data, type=SequenceOutput) == news
