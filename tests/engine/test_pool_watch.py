from __future__ import annotations

import asyncio

import pytest

from jaxpaged.engine import pool_watch
from jaxpaged.engine.messages import AskPool, PoolSnapshot
from jaxpaged.engine.pool_watch import PoolWatch


def picture(stride: int = 1) -> PoolSnapshot:
    return PoolSnapshot(stride, b"\0", [])


def test_one_picture_serves_many():
    asked: list[AskPool] = []

    async def main() -> None:
        watch = PoolWatch(asked.append)
        watch.take(None)
        lookers = [asyncio.create_task(watch.look()) for _ in range(3)]
        await asyncio.sleep(0)
        watch.take(picture(7))
        assert [found.stride for found in await asyncio.gather(*lookers)] == [7, 7, 7]
        assert (await watch.look()).stride == 7  # fresh enough

    asyncio.run(main())
    assert len(asked) == 1


def test_a_busy_core_leaves_the_old_picture(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pool_watch, "WAIT_SECONDS", 0.01)
    monkeypatch.setattr(pool_watch, "FRESH_SECONDS", 0.0)
    asked: list[AskPool] = []

    async def main() -> None:
        watch = PoolWatch(asked.append)
        assert await watch.look() is None
        watch.take(picture())
        await asyncio.sleep(0.001)
        assert await watch.look() is not None

    asyncio.run(main())
    assert len(asked) == 2
