"""Counts the tokens of one HTTP request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxpaged.engine.messages import AddRequest
from jaxpaged.outputs import RequestOutput
from jaxpaged.server.protocol import PromptTokensDetails, Usage


@dataclass
class UsageCounter:
    """Usage over all prompts and choices.

    Args:
        requests: one a prompt.
        details: tell what the prefix cache served.
        prompt_only: outputs don't count.
    """

    requests: Sequence[AddRequest]
    details: bool
    prompt_only: bool = False
    completion_tokens: int = 0
    _cached: dict[str, int] = field(default_factory=dict)

    def add(self, output: RequestOutput) -> None:
        """Count the tokens of an output: all of a request, or what is new of it."""
        if not self.prompt_only:
            self.completion_tokens += sum(len(choice.token_ids) for choice in output.outputs)
        self._cached[output.request_id] = output.num_cached_tokens

    @property
    def cached_tokens(self) -> int:
        """Of the prompts, those that the prefix cache served."""
        return sum(self._cached.values())

    def usage(self) -> Usage:
        """What was counted so far."""
        prompt_tokens = sum(len(request.prompt_token_ids) for request in self.requests)
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=self.completion_tokens,
            total_tokens=prompt_tokens + self.completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self.cached_tokens)
            if self.details
            else None,
        )
