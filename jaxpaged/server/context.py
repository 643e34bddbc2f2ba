"""What every endpoint needs, and how it gets it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request

from jaxpaged.engine.async_llm import AsyncLLM
from jaxpaged.engine.errors import BadRequestError
from jaxpaged.engine.tokenizer import Tokenizer
from jaxpaged.server.errors import NotFoundError
from jaxpaged.server.response_store import ResponseStore, StoredResponse
from jaxpaged.server_config import ServerConfig


@dataclass(frozen=True)
class ServerContext:
    """One engine and the settings of the server in front of it.

    Args:
        names: what requests may call the model; the first is echoed.
        root: what the model was named at start.
        chat_template: instead of the model's.
        responses: those that /v1/responses was asked to store.
    """

    engine: AsyncLLM
    config: ServerConfig
    names: tuple[str, ...]
    root: str
    chat_template: str | None
    responses: ResponseStore = field(default_factory=ResponseStore)

    @property
    def stores_responses(self) -> bool:
        """Whether the next request for a response comes to the process that keeps it."""
        return self.config.api_server_count == 1

    def stored_response(self, response_id: str) -> StoredResponse | None:
        """A response that was kept; None: it was not, or not until now.

        Raises:
            BadRequestError: nothing is kept here.
        """
        if not self.stores_responses:
            raise BadRequestError(
                "several processes answer and none keeps responses for the others: send the whole "
                "conversation, or start the server with --api-server-count 1"
            )
        return self.responses.get(response_id)

    @property
    def model_name(self) -> str:
        return self.names[0]

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            BadRequestError: the server was started without one.
        """
        if self.engine.tokenizer is None:
            raise BadRequestError("the server has no tokenizer (--skip-tokenizer-init)")
        return self.engine.tokenizer

    def check_model(self, name: str | None) -> None:
        """Raises NotFoundError unless the model is served here; no name means the one there is."""
        if name is not None and name not in self.names:
            served = ", ".join(map(repr, self.names))
            raise NotFoundError(f"there is no model {name!r} here; served: {served}", "model")


def _context(request: Request) -> ServerContext:
    return request.app.state.context


Context = Annotated[ServerContext, Depends(_context)]
