"""The check that every settings class makes of its fields."""

from __future__ import annotations


def require(settings: object, name: str, ok: bool, rule: str, *, secret: bool = False) -> None:
    """Refuse a field of `settings` unless it is ok.

    Args:
        rule: what it must be, to follow "must be".
        secret: leave the value out of the message.

    Raises:
        ValueError: it is not; one line that begins with the field's name.
    """
    if not ok:
        got = "" if secret else f", got {getattr(settings, name)!r}"
        raise ValueError(f"{name} must be {rule}{got}")
