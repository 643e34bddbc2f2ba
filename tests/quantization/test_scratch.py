"""Weights are widened for one product at a time, not for all layers before the first."""

from __future__ import annotations

import pytest
from deviceless import compile_without_card, needs_compiler

from jaxpaged.quantization.weight_only import WeightOnly
from jaxpaged.runtime.compilation import compile_options
from tests.quantization.widened_products import (
    ROWS,
    SCHEMES,
    WIDENED,
    WIDTH,
    lowered,
    scratch_bytes,
)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_on_a_cpu(scheme: WeightOnly) -> None:
    options = compile_options("cpu", ROWS, WIDTH, {False})
    programs = [lowered(scheme, count, None) for count in (2, 6)]
    few, many = (scratch_bytes(program, options) for program in programs)
    assert many - few < WIDENED
    # What a GPU needs for that, but where the product's own kernel widens.
    assert ("optimization_barrier" in programs[0].as_text()) == (scheme.group is not None)


@needs_compiler
def test_on_an_h200() -> None:
    out, _ = compile_without_card("quantization/widened_products.py")
    found = [tuple(map(int, line.split())) for line in out.splitlines()]
    assert len(found) == len(SCHEMES)
    assert all(many - few < WIDENED for few, many in found), found
