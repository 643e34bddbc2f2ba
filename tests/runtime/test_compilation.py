"""Which of XLA's options an executable gets."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxpaged.runtime.compilation import Executables, Program, compile_options


@pytest.mark.parametrize(("tokens", "devices"), [(8, 1), (0, 2), (256, 2)])
def test_one_device_and_many_rows_keep_xlas_choice(tokens: int, devices: int) -> None:
    assert compile_options("gpu", tokens, width=1024, devices=devices) == {}


def test_sums_of_few_rows_go_into_the_graph() -> None:
    options = compile_options("gpu", 128, width=4096, devices=2)
    assert options["xla_gpu_enable_triton_gemm"] is False
    known = jax.__version_info__[:2] == (0, 11)
    assert ("COLLECTIVES" in options.get("xla_gpu_enable_command_buffer", "")) == known
    assert "xla_gpu_enable_command_buffer" not in compile_options("cpu", 128, devices=2)


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")
def test_compiling_gives_way_to_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    seen: dict[int, tuple[int, int]] = {}
    compile_one = Executables._compile

    def program(key: int) -> Program:
        traced[key] = niceness()
        return Program(lambda x: x + key, (jnp.zeros(3),), (), None, {})

    def watched(own: Executables[int], key: int, *args: Any) -> Any:
        seen[key] = traced[key], niceness()
        return compile_one(own, key, *args)

    traced: dict[int, int] = {}
    monkeypatch.setattr(Executables, "_compile", watched)
    executables = Executables(program, None)
    executables.compile_all(range(3))
    assert {key: executables[key](jnp.zeros(3)).tolist() for key in seen} == {
        key: [key] * 3 for key in range(3)
    }
    assert all(then == min(19, now + 10) for now, then in seen.values())
    assert niceness() == traced[0]
