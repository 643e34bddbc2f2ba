"""Settings of an engine that benchmarks compare: their flags, and what they cost in memory."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import jax

from jaxpaged import LLM
from jaxpaged.config import EngineConfig
from jaxpaged.flags import add_flags

COMPARED = (
    "cpu_offload_gb",
    "tensor_parallel_size",
    "disable_custom_all_reduce",
    "pipeline_parallel_size",
    "quantization",
    "quantize_lm_head",
    "kv_cache_dtype",
)


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Those of the engine's flags that a benchmark compares."""
    others = {field.name for field in dataclasses.fields(EngineConfig)} - set(COMPARED)
    add_flags(parser, EngineConfig, skip=others)


def engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Engine settings of those flags."""
    return {name: getattr(args, name) for name in COMPARED}


def memory_figures(llm: LLM) -> dict[str, Any]:
    """What an engine's weights take on all devices, and how many tokens its pages hold."""
    params = [stage.params for stage in llm._core._runner.stages]
    return {
        "weights_gib": sum(leaf.nbytes for leaf in jax.tree.leaves(params)) / 2**30,
        "pool_tokens": llm.info.num_pages * llm.info.page_size,
    }
