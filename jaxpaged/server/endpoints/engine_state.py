"""GET /engine_state: the engine's load and its page pool, for something that draws them."""

from __future__ import annotations

import time
from base64 import b64encode

from fastapi import APIRouter
from pydantic import BaseModel, Field

from jaxpaged.engine.messages import PageOwner
from jaxpaged.server.context import Context

router = APIRouter(tags=["operation"])


class SequencePages(BaseModel):
    """A choice of a request that holds pages."""

    request_id: str = Field(description="the answer's id and a number of the engine's")
    index: int
    num_tokens: int
    num_pages: int
    table: list[int] = Field(
        description="its first pages in order, 0: given back; of the newest sequences alone"
    )


class PoolState(BaseModel):
    """Who holds which page."""

    stride: int = Field(description="one in so many pages is told of, from page 1 on")
    cells: str = Field(
        description="base64 of a byte for each such page: free (0), free but cached (1), held by "
        "several sequences (2), held by one that is not listed (3), held by sequences[byte - 4]"
    )
    sequences: list[SequencePages]


class EngineState(BaseModel):
    """Gauges as they are; the others are sums since the start, for rates between two calls.

    Of several engines they are told together; the pool is that of one.
    """

    time: float = Field(description="seconds since 1970")
    model: str
    num_engines: int
    engine: int = Field(description="whose pool is told of: the first that lives")
    num_pages: int = Field(description="of one engine")
    page_size: int = Field(description="tokens a page")
    num_requests_running: int
    num_requests_waiting: int
    kv_cache_usage: float = Field(description="share of the pages that sequences hold, 0 to 1")
    num_preemptions: int
    prefix_cache_queries: int = Field(description="tokens")
    prefix_cache_hits: int = Field(description="tokens")
    prompt_tokens: int
    generation_tokens: int
    first_tokens: int = Field(description="requests that got their first token")
    first_token_seconds: float = Field(description="arrival to first token, over all of them")
    pool: PoolState | None = Field(description="null: the engine is too busy to tell")


@router.get("/engine_state")
async def engine_state(context: Context) -> EngineState:
    """What the page at / draws. Cheap enough to be asked a few times a second."""
    engine = context.engine
    replica, picture = await engine.pool()
    stats, totals = engine.stats, engine.metrics.totals()
    return EngineState(
        time=time.time(),
        model=context.model_name,
        num_engines=len(engine.replicas),
        engine=replica.number,
        num_pages=replica.info.num_pages,
        page_size=engine.info.page_size,
        num_requests_running=stats.num_running,
        num_requests_waiting=stats.num_waiting,
        kv_cache_usage=stats.kv_cache_usage,
        num_preemptions=stats.num_preemptions,
        prefix_cache_queries=stats.prefix_cache_queries,
        prefix_cache_hits=stats.prefix_cache_hits,
        prompt_tokens=int(totals.prompt_tokens),
        generation_tokens=int(totals.generation_tokens),
        first_tokens=int(totals.first_tokens),
        first_token_seconds=totals.first_token_seconds,
        pool=None
        if picture is None
        else PoolState(
            stride=picture.stride,
            cells=b64encode(picture.cells).decode(),
            sequences=[_sequence(owner) for owner in picture.owners],
        ),
    )


def _sequence(owner: PageOwner) -> SequencePages:
    return SequencePages(
        request_id=owner.request_id,
        index=owner.index,
        num_tokens=owner.num_tokens,
        num_pages=owner.num_pages,
        table=owner.table,
    )
