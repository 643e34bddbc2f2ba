"""The name of a request, which comes back in answers and logs."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping

_FITS = re.compile("[!-~]{1,256}")  # printable ASCII, as the field request_id of a body


def request_id(headers: Mapping[str, str]) -> str:
    """That of the X-Request-Id header, or a new one: also if it is long or no plain word."""
    given = headers.get("x-request-id", "")
    return given if _FITS.fullmatch(given) else uuid.uuid4().hex
