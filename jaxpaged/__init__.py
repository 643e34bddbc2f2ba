"""An LLM inference engine in JAX: paged KV cache, continuous batching, OpenAI-compatible server.

The names below load on first use, so that `import jaxpaged` costs nothing and a process that only
speaks to an engine never loads JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxpaged.config import EngineConfig
    from jaxpaged.engine.async_llm import AsyncLLM
    from jaxpaged.engine.llm import LLM
    from jaxpaged.outputs import CompletionOutput, Logprob, RequestOutput
    from jaxpaged.sampling_params import SamplingParams, StructuredOutputs

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EngineConfig",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
    "__version__",
]

MODULES = {
    "LLM": "jaxpaged.engine.llm",
    "AsyncLLM": "jaxpaged.engine.async_llm",
    "CompletionOutput": "jaxpaged.outputs",
    "EngineConfig": "jaxpaged.config",
    "Logprob": "jaxpaged.outputs",
    "RequestOutput": "jaxpaged.outputs",
    "SamplingParams": "jaxpaged.sampling_params",
    "StructuredOutputs": "jaxpaged.sampling_params",
}


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module 'jaxpaged' has no attribute {name!r}")
    return getattr(importlib.import_module(MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
