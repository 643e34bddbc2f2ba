"""The HTTP application: routers, middleware and error bodies around one engine."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

import jaxpaged
from jaxpaged.server import errors
from jaxpaged.server.client_limits import ConcurrencyLimitMiddleware, RateLimitMiddleware
from jaxpaged.server.context import ServerContext
from jaxpaged.server.endpoints import (
    admin,
    chat,
    completions,
    embeddings,
    engine_state,
    health,
    messages,
    models,
    page,
    responses,
    tokens,
)
from jaxpaged.server.middleware import (
    ApiKeyMiddleware,
    BodyLimitMiddleware,
    RequestIdMiddleware,
)
from jaxpaged.server.protocol import ErrorResponse
from jaxpaged.server.tracing import TraceContextMiddleware
from jaxpaged.server_config import ServerConfig

ROUTERS = (
    chat.router,
    completions.router,
    responses.router,
    messages.router,
    embeddings.router,
    models.router,
    tokens.router,
    health.router,
    engine_state.router,
    page.router,
)


def create_app(context: ServerContext) -> FastAPI:
    """The application for an engine that has started."""
    config = context.config
    app = FastAPI(
        title="jaxpaged",
        version=jaxpaged.__version__,
        root_path=config.root_path,
        responses={code: {"model": ErrorResponse} for code in (400, 401, 404, 413, 429, 500, 503)},
    )
    app.state.context = context
    for router in ROUTERS:
        app.include_router(router)
    if config.enable_admin:
        app.include_router(admin.router)
    errors.install(app)
    guard(app, config)
    return app


def guard(app: FastAPI, config: ServerConfig) -> None:
    """Set what stands between the socket and the routes."""
    # The last one added is the outermost: a preflight request of CORS carries no key.
    app.add_middleware(BodyLimitMiddleware, limit=config.max_request_bytes)
    if config.max_concurrent_requests is not None:
        app.add_middleware(ConcurrencyLimitMiddleware, limit=config.max_concurrent_requests)
    if config.rate_limit is not None:
        app.add_middleware(RateLimitMiddleware, rates=config.rate_limit)
    if config.otlp_traces_endpoint is not None:
        app.add_middleware(TraceContextMiddleware)
    if config.api_key:
        app.add_middleware(ApiKeyMiddleware, keys=config.api_key)
    if config.enable_request_id_headers:
        app.add_middleware(RequestIdMiddleware)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
        )
