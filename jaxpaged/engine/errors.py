"""Failures that belong to one request; the engine goes on."""

from __future__ import annotations


class BadRequestError(ValueError):
    """The request asks for what cannot be: HTTP 400.

    Args:
        message: says what to change.
        param: the field at fault, if it is one.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class RequestFailedError(RuntimeError):
    """The engine refused or lost the request; `code` is the HTTP status (503: queue full)."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.message = message
        self.code = code


class EngineDeadError(RequestFailedError):
    """The engine's process is gone: no request will be served any more."""

    def __init__(self, message: str) -> None:
        super().__init__(message, 503)


class EngineStartError(RuntimeError):
    """The engine could not start; one line that says what to change."""
