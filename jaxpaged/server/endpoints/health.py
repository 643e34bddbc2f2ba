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
    """200 while the engine lives, 503 after."""
    if context.engine.dead is not None:
        raise context.engine.dead
    return Response()


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
