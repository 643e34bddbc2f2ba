"""Which cards are told that the next kernel may start."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.dependents import is_supported, let_next_start


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    is_supported.cache_clear()
    yield
    is_supported.cache_clear()


@pytest.mark.parametrize(
    ("platform", "capability", "supported"),
    [("cpu", "", False), ("gpu", "8.0", False), ("gpu", "8.9", False), ("gpu", "9.0", True),
     ("gpu", "10.0", True), ("gpu", "12.0", True)],
)  # fmt: skip
def test_from_hopper_on(
    platform: str, capability: str, supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SimpleNamespace(platform=platform, compute_capability=capability)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert is_supported() == supported


def test_elsewhere_a_program_keeps_its_number() -> None:
    number = jnp.int32(7)
    assert let_next_start(number, on_card=True) is number
    assert let_next_start(number, on_card=False) is number
