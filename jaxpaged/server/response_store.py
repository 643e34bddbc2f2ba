"""Responses that later requests may ask for or go on from, for a while and up to a size."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from cachetools import TTLCache

from jaxpaged.server.protocol import ChatMessage
from jaxpaged.server.responses_protocol import ResponsesResponse

MAX_BYTES = 256 << 20  # of all conversations together, about
SECONDS = 24 * 3600.0  # until a response is forgotten
OVERHEAD = 4096  # bytes of a response beside its text, about


@dataclass(frozen=True)
class StoredResponse:
    """A response and the conversation up to its answer, instructions left out."""

    response: ResponsesResponse
    conversation: list[ChatMessage]

    @property
    def size(self) -> int:
        # Calls count too; as Python's text, for it may hold half of a surrogate pair.
        texts = [str(message.model_dump(exclude_none=True)) for message in self.conversation]
        texts.append(self.response.model_dump_json())
        return OVERHEAD + sum(4 * len(text) for text in texts)


class ResponseStore:
    """Kept in this process's memory: the least recently used goes first, none outlives a restart.

    Args:
        max_bytes: of all that is kept; a response that is larger is not kept.
        seconds: how long a response is kept.
        now: the clock.
    """

    def __init__(
        self,
        max_bytes: int = MAX_BYTES,
        seconds: float = SECONDS,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kept: TTLCache[str, StoredResponse] = TTLCache(
            max_bytes, seconds, timer=now, getsizeof=lambda stored: stored.size
        )

    def put(self, stored: StoredResponse) -> None:
        """Keep a response, if there is any room for it."""
        if stored.size <= self._kept.maxsize:
            self._kept[stored.response.id] = stored

    def get(self, response_id: str) -> StoredResponse | None:
        """The response, if it is still kept."""
        return self._kept.get(response_id)

    def delete(self, response_id: str) -> bool:
        """Forget a response; False if it was not kept."""
        return self._kept.pop(response_id, None) is not None
