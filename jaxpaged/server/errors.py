"""Every failure as OpenAI's error body: {"error": {"message", "type", "param", "code"}}.

Routes of Anthropic's get theirs: {"type": "error", "error": {"type", "message"}}.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import Scope

from jaxpaged.engine.errors import BadRequestError, RequestFailedError
from jaxpaged.server.protocol import ErrorInfo, ErrorResponse

RETRY_SECONDS = 1  # what Retry-After says when the queue is full
MAX_MESSAGE = 1000  # characters: a message may quote the request
MAX_PLACES = 5  # of a body at which something was found
CLIENT_GONE = 499  # nginx's code; nobody is there to read it
TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "RequestTooLargeError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}
ANTHROPIC_PATH = "/v1/messages"
ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class NotFoundError(Exception):
    """HTTP 404."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message, self.param = message, param


class ClientGoneError(Exception):
    """The client closed the connection before the answer was complete."""


@contextmanager
def named_as_sent(names: Mapping[str, str]) -> Iterator[None]:
    """Let the engine's complaints call a field what the request calls it.

    Args:
        names: the engine's name -> the request's, where they differ.
    """
    try:
        yield
    except BadRequestError as error:
        field = error.param or ""
        if field in names:
            error.param = names[field]
            if error.message.startswith(f"{field} "):
                error.message = names[field] + error.message.removeprefix(field)
        raise


def error_body(code: int, message: str, param: str | None = None) -> str:
    """JSON of an error."""
    kind = TYPES.get(code, "APIError")
    # A message may quote the request, and so half of a surrogate pair, which no JSON can hold.
    message = _short(message).encode("utf-8", "backslashreplace").decode()
    info = ErrorInfo(message=message, type=kind, param=param, code=code)
    return ErrorResponse(error=info).model_dump_json()


def anthropic_error_body(code: int, message: str) -> str:
    """JSON of an error as Anthropic's clients read it."""
    kind = ANTHROPIC_TYPES.get(code, "invalid_request_error" if code < 500 else "api_error")
    return json.dumps({"type": "error", "error": {"type": kind, "message": _short(message)}})


def error_response(
    code: int,
    message: str,
    param: str | None = None,
    *,
    scope: Scope | None = None,
    retry_after: int = RETRY_SECONDS,
) -> Response:
    """A failure; 429 and 503 invite to try again, in `retry_after` seconds.

    Args:
        scope: the request's; routes of Anthropic's have an error body of their own.
    """
    headers = {"Retry-After": str(retry_after)} if code in (429, 503) else None
    if code == 401:
        headers = {"WWW-Authenticate": "Bearer"}
    if scope is not None and route_path(scope).startswith(ANTHROPIC_PATH):
        body = anthropic_error_body(code, message)
    else:
        body = error_body(code, message, param)
    return Response(body, code, headers, media_type="application/json")


def route_path(scope: Scope) -> str:
    """The path of a request without what a proxy in front strips off."""
    return scope.get("path", "").removeprefix(scope.get("root_path", ""))


def describe(error: Exception) -> tuple[int, str, str | None]:
    """HTTP status, message and field at fault; 500 for what nobody foresaw."""
    match error:
        case BadRequestError():
            return 400, error.message, error.param
        case NotFoundError():
            return 404, error.message, error.param
        case RequestFailedError():
            return error.code, error.message, None
        case RequestValidationError():
            return 400, *_explain(error.errors())
        case UnicodeEncodeError():
            return 400, "the request holds half of a surrogate pair, which is no text", None
        case HTTPException():
            return error.status_code, str(error.detail), None
    return 500, "internal error; the server's log says more", None


def install(app: FastAPI) -> None:
    """Answer every failure of `app` in the one form."""

    async def respond(request: Request, error: Exception) -> Response:
        code, message, param = describe(error)
        if code in (404, 405) and isinstance(error, HTTPException):
            message = f"{message}: {request.method} {request.url.path}"
        response = error_response(code, message, param, scope=request.scope)
        if isinstance(error, HTTPException) and error.headers:
            response.headers.update(error.headers)
        return response

    async def forget(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_GONE)

    expected = (BadRequestError, NotFoundError, RequestFailedError, UnicodeEncodeError)
    for kind in (*expected, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, respond)
    app.add_exception_handler(ClientGoneError, forget)


def _explain(errors: Sequence[Any]) -> tuple[str, str | None]:
    """One line about what pydantic found, and the first field at fault."""
    if any(error["type"] == "json_invalid" for error in errors):
        return f"the body is no valid JSON: {errors[0]['ctx']['error']}", None
    if any(error["type"] == "model_attributes_type" and len(error["loc"]) == 1 for error in errors):
        return "the body must be a JSON object, sent with Content-Type: application/json", None
    found: dict[str, list[str]] = {}  # messages by place, such as "messages.0.role"
    for error in errors:
        message = error["msg"].removeprefix("Value error, ").removeprefix("Input ")
        place = _place(error["loc"])
        if place not in found and len(found) == MAX_PLACES:
            break
        said = found.setdefault(place, [])
        if message not in said:
            said.append(message)
    text = "; ".join(f"{place}: {' or '.join(said)}" for place, said in found.items())
    first = next(iter(found))
    return text, None if first == "body" else first.split(".")[0]


def _short(message: str) -> str:
    return message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]}..."


def _place(loc: Sequence[int | str]) -> str:
    """("body", kind of body?, field, index or kind of value, ...) without the kinds."""
    names = [name for name in loc[1:] if isinstance(name, int) or _is_field(name)]
    return ".".join(map(str, names)) or "body"


def _is_field(name: str) -> bool:
    return name.isidentifier() and name[0].islower() and name not in ("str", "int", "float")
