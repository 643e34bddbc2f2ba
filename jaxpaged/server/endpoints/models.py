"""GET /v1/models, GET /v1/models/{name}."""

from __future__ import annotations

from fastapi import APIRouter

from jaxpaged.server.context import Context, ServerContext
from jaxpaged.server.protocol import ModelCard, ModelList

router = APIRouter(tags=["OpenAI"])


def _card(name: str, context: ServerContext) -> ModelCard:
    length = context.engine.info.max_model_len
    return ModelCard(id=name, root=context.root, max_model_len=length)


@router.get("/v1/models")
async def list_models(context: Context) -> ModelList:
    """The names that requests may use."""
    return ModelList(data=[_card(name, context) for name in context.names])


@router.get("/v1/models/{name:path}")
async def get_model(name: str, context: Context) -> ModelCard:
    """One of them."""
    context.check_model(name)
    return _card(name, context)
