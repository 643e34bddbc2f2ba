"""Which of XLA's options an executable gets."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.machinery import PathFinder

import jax
import jax.numpy as jnp
import jaxlib.mlir.dialects as dialects
import pytest
from flax.traverse_util import unflatten_dict

from jaxpaged.config import EngineConfig
from jaxpaged.models import load_spec
from jaxpaged.models.decoder import Decoder
from jaxpaged.runtime.compilation import TRITON_DIALECT, Program, compile_options
from jaxpaged.runtime.plan import make_plan
from jaxpaged.runtime.programs import Sample, make_programs
from jaxpaged.runtime.weights import abstract_leaves
from tests.engine.harness import LLAMA


@pytest.mark.parametrize(("tokens", "devices"), [(8, 1), (0, 2), (256, 2)])
def test_one_device_and_many_rows_keep_xlas_choice(tokens: int, devices: int) -> None:
    assert compile_options("gpu", tokens, width=1024, devices=devices) == {}


def test_sums_of_few_rows_go_into_the_graph() -> None:
    options = compile_options("gpu", 128, width=4096, devices=2)
    assert options["xla_gpu_enable_triton_gemm"] is False
    known = jax.__version_info__[:2] == (0, 11)
    assert ("COLLECTIVES" in options.get("xla_gpu_enable_command_buffer", "")) == known
    assert "xla_gpu_enable_command_buffer" not in compile_options("cpu", 128, devices=2)


@pytest.mark.parametrize("quantized", [False, True])
def test_a_head_in_8_bit_floats_is_left_to_cublas(quantized: bool) -> None:
    """Choosing among Triton's products with it took minutes."""
    config = EngineConfig()
    spec = load_spec(LLAMA, "fp8_per_channel", quantized)
    plan = make_plan(config, spec, jnp.dtype("bfloat16"), "gpu", serving=True)
    plan = plan.with_pages(config, 1 << 20)
    model = Decoder(spec, plan.kv, jnp.dtype("bfloat16"), "xla")
    device = jax.devices()[0]
    params = unflatten_dict(abstract_leaves(model, device), sep="/")
    programs = replace(make_programs(model, plan, params, 20, device), platform="gpu")
    options = programs(Sample(8, "greedy")).options
    assert options == ({"xla_gpu_enable_triton_gemm": False} if quantized else {})


def test_tritons_dialect_has_no_module() -> None:
    """Or the empty one that `Program.lower` puts in its place would hide it."""
    Program(lambda: 0, (), (), None, {}).lower()
    assert TRITON_DIALECT in sys.modules
    assert PathFinder.find_spec(TRITON_DIALECT, dialects.__path__) is None
