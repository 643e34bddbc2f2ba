"""Which of XLA's options an executable gets."""

from __future__ import annotations

import jax
import pytest

from jaxpaged.runtime.compilation import compile_options


@pytest.mark.parametrize(("tokens", "devices"), [(8, 1), (0, 2), (256, 2)])
def test_one_device_and_many_rows_keep_xlas_choice(tokens: int, devices: int) -> None:
    assert compile_options("gpu", tokens, width=1024, devices=devices) == {}


def test_sums_of_few_rows_go_into_the_graph() -> None:
    options = compile_options("gpu", 128, width=4096, devices=2)
    assert options["xla_gpu_enable_triton_gemm"] is False
    known = jax.__version_info__[:2] == (0, 11)
    assert ("COLLECTIVES" in options.get("xla_gpu_enable_command_buffer", "")) == known
    assert "xla_gpu_enable_command_buffer" not in compile_options("cpu", 128, devices=2)
