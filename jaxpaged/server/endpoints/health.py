"""GET /health, /ping, /version, /metrics."""

from __future__ import annotations

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

import jaxpaged
from jaxpaged.server.context import Context

router = APIRouter(tags=["operation"])


@router.get("/health", response_class=Response)
@router.head("/health", include_in_schema=False)
async def health(context: Context) -> Response:
    """200 while an engine lives, with a line about those that are dead; 503 after."""
    engine = context.engine
    if engine.dead is not None:
        raise engine.dead
    dead = [replica.dead.message for replica in engine.replicas if replica.dead is not None]
    if not dead:
        return Response()
    said = f"degraded: {len(dead)} of {len(engine.replicas)} engines dead: {'; '.join(dead)}\n"
    return Response(said, media_type="text/plain")


@router.get("/ping", response_class=Response)
@router.head("/ping", include_in_schema=False)
@router.post("/ping", response_class=Response)
async def ping(context: Context) -> Response:
    """The same, by the name that SageMaker asks for."""
    return await health(context)


@router.get("/version")
async def version() -> dict[str, str]:
    """Of jaxpaged."""
    return {"version": jaxpaged.__version__}


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(context: Context) -> Response:
    """Every metric, for Prometheus."""
    return Response(context.engine.metrics.text(), media_type=CONTENT_TYPE_LATEST)
