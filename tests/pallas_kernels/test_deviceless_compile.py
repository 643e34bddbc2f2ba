"""The kernels compile for an H200, and but for Mosaic's for an A100, where there is none."""

from __future__ import annotations

import pytest
from deviceless import compile_without_card, needs_compiler

pytestmark = needs_compiler


def compiled(*arguments: str) -> list[str]:
    """Cases that the program says it compiled."""
    out, _ = compile_without_card("pallas_kernels/compile_for_h200.py", *arguments)
    return [line for line in out.splitlines() if line.startswith("compiled")]


def test_real_models_in_bfloat16() -> None:
    names = ["qwen2.5-7b", "llama-3.1-8b", "qwen3-0.6b", "gemma-3"]
    assert len(compiled("--names", *names)) == 3 * len(names)


def test_other_head_dims_and_dtypes() -> None:
    arguments = ("--names", "head-80", "head-64", "gemma-3", "--steps", "8x8", "64x8")
    assert len(compiled(*arguments, "--dtypes", "float32", "float16")) == 12


@pytest.mark.parametrize(
    ("pages", "gib"),
    [("float8_e4m3fn", "3"), ("float8_e4m3fn", "5"), ("float8_e5m2", "3"), ("int8", "5")],
)
def test_pages_of_one_byte(pages: str, gib: str) -> None:
    names = ("--names", "qwen2.5-7b", "head-80", "--pages", pages, "--gib", gib)
    lines = compiled(*names, "--steps", "8x8", "2048x256")
    assert len(lines) == 4
    lines += compiled("--rope-write", *names, "--steps", "1x1", "64x64")
    assert len(lines) == 8
    assert all(int(line.split()[-2]) < 8 << 20 for line in lines)  # no copy of pool or scales


def test_rope_write_in_place() -> None:
    arguments = ("--rope-write", "--steps", "1x1", "64x64", "4096x4096")
    lines = compiled(*arguments, "--dtypes", "bfloat16", "float32")
    assert len(lines) == 7 * 6
    # A copy of the pool would take more than a hundred megabytes.
    assert all(int(line.split()[-2]) < 1 << 20 for line in lines)


def test_sampling_needs_little_memory() -> None:
    lines = compiled("--sampling", "1", "256", "--names")
    assert len(lines) == 2
    # Far less than the logits, of which a second array would take 156 megabytes.
    assert all(int(line.split()[-2]) < 20 << 20 for line in lines)


def test_products_of_few_rows() -> None:
    assert len(compiled("--names", "--linear", "1", "16", "32")) == 21


def test_sums_over_several_cards() -> None:
    assert len(compiled("--names", "--peers", "2", "8")) == 2


def test_products_with_quantized_kernels() -> None:
    assert len(compiled("--names", "--quantized", "1", "32", "64")) == 18


def test_rows_that_are_rounded_for_the_next_product() -> None:
    assert len(compiled("--names", "--rounded", "17")) == 3


def test_an_a100_takes_them_too() -> None:
    card = ("--card", "a100")
    assert len(compiled(*card)) == 21
    assert len(compiled(*card, "--rope-write", "--names", "qwen3-0.6b", "--steps", "64x64")) == 1
    others = ("--linear", "8", "64", "--sampling", "256", "--quantized", "1", "64")
    assert len(compiled(*card, "--names", *others)) == 14 + 1 + 6
    assert len(compiled(*card, "--names", "qwen2.5-7b", "--pages", "int8", "--steps", "8x8")) == 1
