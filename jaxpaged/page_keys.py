"""What a page of tokens is known by: a chain of hashes over the sequence up to its end."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256


def page_keys(
    token_ids: Sequence[int], page_size: int, parent: bytes | None = None, origin: object = None
) -> list[bytes]:
    """A key for each full page of `token_ids`: the SHA-256 over the key before and its ids.

    Args:
        parent: key of the page before the first; None: they begin the sequence.
        origin: what must be equal, too, for equal tokens to have equal pages; only for the first.
    """
    key = sha256(repr(origin).encode()).digest() if parent is None else parent
    ids = array("i", token_ids[: len(token_ids) // page_size * page_size])
    data, step = ids.tobytes(), page_size * ids.itemsize
    keys = []
    for start in range(0, len(data), step):
        key = sha256(key + data[start : start + step]).digest()
        keys.append(key)
    return keys
