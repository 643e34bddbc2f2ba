"""Products that two (fake) devices share: what one makes, by the same kernels, for one exchange."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from own_process import report_of


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return report_of("split_products.py")


@pytest.fixture(scope="module")
def products(report: dict[str, Any]) -> dict[str, Any]:
    return report["products"]


def test_they_are_those_of_one_device(products: dict[str, Any]) -> None:
    for name, found in products.items():
        # A sum in two parts, and in bfloat16 each of them rounded. In fp8 a device rounds its part
        # of a row by the largest of that.
        exact = 1e-3 if name.startswith("fp8") else 1e-6
        bound = exact if "float32" in name else 1e-2
        assert found["off"] < bound, name


def test_a_sum_is_exchanged_and_no_output(products: dict[str, Any]) -> None:
    for name, found in products.items():
        assert found["exchanged"] == ["all-reduce"] * ("outputs" not in name), name


def test_few_rows_take_a_kernel_where_terms_divide(products: dict[str, Any]) -> None:
    whole = ("int4, one group", "int8, ordered")
    for name, found in products.items():
        count = 2 if name.startswith("fp8") else 1  # one rounds rows
        expected = count * ("bfloat16" in name and not name.startswith(whole))
        assert found["kernels"] == expected, name


def test_each_device_rounds_its_part_of_a_row(report: dict[str, Any]) -> None:
    found = report["rounded"]
    assert found["kernels"] == 2  # before gates and ups, and after them
    assert found["off"] < 2e-2


def test_scales_go_where_their_terms_are(products: dict[str, Any]) -> None:
    assert products["int4, terms, bfloat16"]["whole"] == ["bias"]
    assert products["int4, outputs, bfloat16"]["whole"] == []
    assert products["int4, one group, terms, bfloat16"]["whole"] == [
        "bias",
        "kernel_scale",
    ]


def test_no_two_sums_by_stores_in_a_row_take_the_same_box(report: dict[str, Any]) -> None:
    found = report["model"]
    assert found["off"] < 2e-2
    embedding, *layers = found["boxes"]
    assert embedding not in layers
    assert len(layers) >= 2  # alike ones are traced once
    assert all(a != b for a, b in pairwise(layers))


def test_addresses_of_boxes_come_in_the_order_of_ranks(report: dict[str, Any]) -> None:
    found = report["boxes"]
    assert found["devices"] == [1, 0] and found["told"] == found["lie"]
