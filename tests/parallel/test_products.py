"""Products that two (fake) devices share: what one makes, by the same kernels, for one exchange."""

from __future__ import annotations

from typing import Any

import pytest
from own_process import report_of


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return report_of("split_products.py")


def test_they_are_those_of_one_device(report: dict[str, Any]) -> None:
    for name, found in report.items():
        # A sum in two parts, and in bfloat16 each of them rounded.
        assert found["off"] < (1e-6 if "float32" in name else 1e-2), name


def test_a_sum_is_exchanged_and_no_output(report: dict[str, Any]) -> None:
    for name, found in report.items():
        largest = name.startswith("fp8")  # of each row, before it is rounded
        count = 0 if "outputs" in name else 2 if largest else 1
        assert found["exchanged"] == ["all-reduce"] * count, name


def test_few_rows_take_a_kernel_where_terms_divide(report: dict[str, Any]) -> None:
    whole = ("int4, one group", "int8, ordered")
    for name, found in report.items():
        assert found["kernels"] == ("bfloat16" in name and not name.startswith(whole)), name


def test_scales_go_where_their_terms_are(report: dict[str, Any]) -> None:
    assert report["int4, terms, bfloat16"]["whole"] == ["bias"]
    assert report["int4, outputs, bfloat16"]["whole"] == []
    assert report["int4, one group, terms, bfloat16"]["whole"] == [
        "bias",
        "kernel_scale",
    ]
