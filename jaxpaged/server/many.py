"""Lists in request bodies, which may be as long as a body: what is read of them is bounded."""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import Field

T = TypeVar("T")

MAX_MESSAGES = 10_000  # of one conversation
MAX_TOOLS = 1024  # of one request or message
MAX_STRINGS = 10_000  # of one field; less may be allowed

# A body of 32 MiB has room for ten million wrong items: the first one is reported.
Many = Annotated[list[T], Field(fail_fast=True)]
Messages = Annotated[list[T], Field(fail_fast=True, max_length=MAX_MESSAGES)]
Strings = Annotated[list[str], Field(fail_fast=True, max_length=MAX_STRINGS)]
Tools = Annotated[list[T], Field(fail_fast=True, max_length=MAX_TOOLS)]
