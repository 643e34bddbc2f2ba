"""Settings of `jaxpaged plan` beside the engine's own."""

from __future__ import annotations

import re
from dataclasses import dataclass

from jaxpaged.config import setting
from jaxpaged.validation import require

# Settings of the engine that change what is planned.
ENGINE_SETTINGS = (
    "revision",
    "download_dir",
    "dtype",
    "quantization",
    "quantize_lm_head",
    "max_model_len",
    "gpu_memory_utilization",
    "cpu_offload_gb",
    "num_gpu_blocks_override",
    "block_size",
    "kv_cache_dtype",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "max_num_batched_tokens",
    "max_num_seqs",
    "long_prefill_token_threshold",
)
LEAST_RATE = 1e-6  # requests a second: one in eleven days


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What to plan for.

    Raises:
        ValueError: values outside their range.
    """

    gpus: str = setting(
        "H200:1", "kind and number of GPUs: H200, H100, A100-80, L40S or B200", metavar="KIND:N"
    )
    tensor_parallel_size: int = setting(
        1, "GPUs that share each layer; more than a host has: of several hosts", short="-tp"
    )
    pipeline_parallel_size: int = setting(
        1, "stages, of as many GPUs each, that share the layers", short="-pp"
    )
    data_parallel_size: int = setting(1, "replicas of the model", short="-dp")
    trace: str = setting(
        "sharegpt",
        "lengths of requests: sharegpt, as in real conversations, or fixed:PROMPT,OUTPUT in tokens",
    )
    rate: float = setting(float("inf"), "requests a second, as a Poisson process; inf: all at once")
    requests: int = setting(256, "number of requests")
    shared_prefix: int = setting(
        0, "tokens with which all prompts begin: what the prefix cache finds", metavar="TOKENS"
    )
    seed: int = setting(0, "of lengths and arrivals")
    calibration: str | None = setting(
        None, "file that benchmarks/calibrate.py wrote; default: the card's own", metavar="FILE"
    )
    json: bool = setting(False, "print JSON")

    def __post_init__(self) -> None:
        for name in (
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "data_parallel_size",
            "requests",
        ):
            require(self, name, getattr(self, name) >= 1, "at least 1")
        require(self, "rate", self.rate >= LEAST_RATE, f"at least {LEAST_RATE:f}")
        for name in ("shared_prefix", "seed"):
            require(self, name, getattr(self, name) >= 0, "at least 0")
        if self.trace != "sharegpt" and self.fixed_lengths is None:
            raise ValueError(
                f"--trace must be sharegpt or fixed:PROMPT,OUTPUT, such as fixed:512,128, "
                f"got {self.trace!r}"
            )

    @property
    def parallel(self) -> tuple[int, int, int]:
        """tp, pp, dp: GPUs of a layer, stages, replicas."""
        return self.tensor_parallel_size, self.pipeline_parallel_size, self.data_parallel_size

    @property
    def fixed_lengths(self) -> tuple[int, int] | None:
        """Tokens of each prompt and of each output, if all are alike."""
        match = re.fullmatch(r"fixed:([1-9]\d*),([1-9]\d*)", self.trace)
        return None if match is None else (int(match[1]), int(match[2]))
