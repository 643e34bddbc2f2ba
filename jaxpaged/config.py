"""Every setting of the engine, once: the CLI makes its flags from these fields."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from jaxpaged.validation import require

GIB = 1 << 30


def setting(
    default: Any,
    help: str,
    *,
    flag: str | None = None,
    short: str | None = None,
    choices: tuple[str, ...] = (),
    metavar: str | None = None,
) -> Any:
    """A dataclass field that carries what `--help` says of it."""
    metadata = {"help": help, "flag": flag, "short": short, "choices": choices, "metavar": metavar}
    return field(default=default, metadata=metadata)


def parse_token_count(text: str | int) -> int | None:
    """Read 4096, '8k' (8000), '8K' (8192), '1m', '1M'; 'auto' and -1 give None."""
    text = str(text)
    if text in ("auto", "-1"):
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmM]?)", text)
    if match is None or float(match[1]) == 0:
        raise ValueError(f"expected a number of tokens such as 4096, 8k, 8K or auto, got {text!r}")
    scale = {"": 1, "k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2}[match[2]]
    return int(float(match[1]) * scale)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of one engine. Frozen: what the engine derives from them lives in `EngineInfo`.

    Raises:
        ValueError: values that contradict each other or lie outside their range.
    """

    model: str | None = setting(
        None,
        "folder, .gguf file or hub id of the model; without it the built-in demo model runs",
    )
    tokenizer: str | None = setting(None, "folder or hub id of the tokenizer, if not the model's")
    skip_tokenizer_init: bool = setting(False, "load no tokenizer: token ids in, token ids out")
    revision: str | None = setting(None, "branch, tag or commit of a hub model")
    download_dir: str | None = setting(
        None, "where hub files are kept (default: the Hugging Face cache)"
    )
    trust_remote_code: bool = setting(False, "accepted for vLLM's sake; no remote code is ever run")
    load_format: str = setting(
        "auto",
        "where weights come from; dummy: random weights",
        choices=("auto", "safetensors", "orbax", "gguf", "dummy"),
    )
    dtype: str = setting(
        "auto",
        "weights and activations; auto: the checkpoint's on GPU, float32 on CPU",
        choices=("auto", "half", "float16", "bfloat16", "float", "float32"),
    )
    quantization: str | None = setting(
        None,
        "store the layers' matrices in fewer bits, made from ordinary weights while loading; what "
        "a checkpoint stores is recognised without it: its name (awq and those that follow) says "
        "that it must be so",
        short="-q",
        choices=(
            "fp8_per_tensor",
            "fp8_per_channel",
            "int8_per_channel_weight_only",
            "int4_per_group_weight_only",
            "awq",
            "compressed-tensors",
            "fbgemm_fp8",
            "fp8",
            "gptq",
            "modelopt",
        ),
    )
    quantize_lm_head: bool = setting(
        False, "with --quantization: store the matrix that scores the vocabulary so, too"
    )
    cpu_offload_gb: float = setting(
        0.0,
        "GiB of the layers' matrices, of each device, that stay in host memory: every step copies "
        "them to the device while other layers are computed, and takes as long as that",
    )
    tensor_parallel_size: int = setting(
        1, "devices that share the model, each holding a part of it", short="-tp"
    )
    disable_custom_all_reduce: bool = setting(
        False, "add up over devices by XLA alone, never by their own stores to each other"
    )
    pipeline_parallel_size: int = setting(
        1,
        "stages that share the model, each with some of its layers on devices of its own",
        short="-pp",
    )
    data_parallel_size: int = setting(
        1,
        "engines of the whole model, each a process on devices of its own, behind one server",
        short="-dp",
    )
    num_hosts: int = setting(
        1, "hosts that run one model together; each runs the same command with its own --host-id"
    )
    host_id: int = setting(
        0, "which of the hosts this is; 0 serves, the others follow it and take no requests"
    )
    distributed_coordinator: str | None = setting(
        None, "where host 0 waits for the others: its address and a free port", metavar="HOST:PORT"
    )
    distributed_timeout: float = setting(
        300.0, "until all hosts must have come together", metavar="SECONDS"
    )
    engine_timeout: float = setting(
        300.0,
        "a served engine that does not answer for so long is killed (0: never); more than any step "
        "takes, its compilation included",
        metavar="SECONDS",
    )
    seed: int = setting(0, "origin of every random draw that has no seed of its own")
    generation_config: str = setting(
        "auto",
        "auto: default sampling from the model's generation_config.json; vllm or none: ignore it",
        choices=("auto", "vllm", "none"),
    )

    max_model_len: int | str | None = setting(
        None,
        "longest prompt + output in tokens (4096, 8k = 8000, 8K = 8192); "
        "auto or -1: the longest that fits memory; default: the model's own",
        metavar="TOKENS",
    )
    gpu_memory_utilization: float = setting(
        0.92, "share of the card for weights, step temporaries and pages"
    )
    kv_cache_memory_bytes: int | None = setting(
        None, "exact size of the page pool on each device in bytes (on CPU 1 GiB unless told)"
    )
    num_gpu_blocks_override: int | None = setting(
        None, "exact number of pages, instead of profiling memory"
    )
    block_size: int = setting(16, "slots (tokens) a page", choices=("16", "32", "64", "128"))
    kv_cache_dtype: str = setting(
        "auto",
        "dtype of the KV pages; auto: the model's; one byte holds twice the tokens: "
        "fp8 (= fp8_e4m3) and fp8_e5m2 with a scale a layer and KV head, int8 with one a token too "
        "(1.9 times the tokens)",
        choices=(
            "auto",
            "bfloat16",
            "float16",
            "float32",
            "fp8",
            "fp8_e4m3",
            "fp8_e5m2",
            "int8",
        ),
    )
    kv_cache_scales: str | None = setting(
        None,
        "scales of fp8 pages: a file that `jaxpaged calibrate-kv` wrote, .safetensors or .json "
        "(default: the checkpoint's k_scale and v_scale, else 1)",
        metavar="FILE",
    )

    enable_prefix_caching: bool = setting(True, "reuse the pages of equal prompt prefixes")
    enable_chunked_prefill: bool = setting(True, "split long prompts over several steps")
    max_num_batched_tokens: int | None = setting(
        None, "tokens a step (default 8192 on GPU when serving, 16384 for LLM, 512 on CPU)"
    )
    max_num_seqs: int | None = setting(None, "sequences a step (default 256, 32 on CPU)")
    long_prefill_token_threshold: int = setting(
        0, "at most this many tokens of one prompt a step (0: no limit)"
    )
    scheduling_policy: str = setting("fcfs", "order of admission", choices=("fcfs", "priority"))
    max_num_queued_reqs: int | None = setting(
        None, "waiting requests of an engine beyond which new ones get 503"
    )
    max_num_queued_tokens: int | None = setting(
        None, "waiting prompt tokens of an engine beyond which new requests get 503"
    )
    async_scheduling: bool = setting(True, "prepare the next step while the device runs this one")

    pooling: str = setting(
        "last",
        "what /v1/embeddings gives: the last token's hidden state or the mean over all tokens, "
        "which reads no cached prefix",
        choices=("last", "mean"),
    )
    max_logprobs: int = setting(20, "most log-probabilities a request may ask for at a position")
    attention_backend: str = setting(
        "auto",
        "paged attention implementation; auto: the best for the platform",
        choices=("auto", "xla", "triton", "mosaic"),
    )
    enforce_eager: bool = setting(
        False, "compile buckets on first use: fast start, slow first requests"
    )
    compile_cache_dir: str | None = setting(
        None,
        "folder that keeps compiled steps; writable by you alone, since what it holds is run "
        "(default: in the user's cache folder; 'none': off)",
    )

    @property
    def num_devices(self) -> int:
        """Devices of one engine, on all of its hosts."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def __post_init__(self) -> None:
        if self.max_model_len is not None and self.max_model_len not in ("auto", -1):
            object.__setattr__(self, "max_model_len", parse_token_count(self.max_model_len))
        elif self.max_model_len is not None:
            object.__setattr__(self, "max_model_len", "auto")
        require(self, "seed", -(2**63) <= self.seed < 2**63, "a 64-bit int")
        require(self, "gpu_memory_utilization", 0 < self.gpu_memory_utilization <= 1, "in (0, 1]")
        require(self, "cpu_offload_gb", 0 <= self.cpu_offload_gb < float("inf"), "at least 0")
        require(
            self,
            "engine_timeout",
            self.engine_timeout == 0 or 1 <= self.engine_timeout < float("inf"),
            "0, or at least 1",
        )
        require(self, "block_size", self.block_size in (16, 32, 64, 128), "16, 32, 64 or 128")
        for name in (
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "data_parallel_size",
            "num_hosts",
            "kv_cache_memory_bytes",
            "num_gpu_blocks_override",
            "max_num_batched_tokens",
            "max_num_seqs",
            "max_num_queued_reqs",
            "max_num_queued_tokens",
        ):
            value = getattr(self, name)
            require(self, name, value is None or value >= 1, "at least 1")
        _check_hosts(self)
        require(self, "max_logprobs", self.max_logprobs >= 0, "at least 0")
        require(
            self,
            "long_prefill_token_threshold",
            self.long_prefill_token_threshold >= 0,
            "at least 0",
        )
        if self.quantization is not None:
            choices = self.__dataclass_fields__["quantization"].metadata["choices"]
            known = self.quantization in choices
            require(self, "quantization", known, f"one of {', '.join(choices)}, or left out")
        with_it = self.quantization is not None or not self.quantize_lm_head
        require(self, "quantize_lm_head", with_it, "left out unless --quantization says how")
        require(
            self,
            "kv_cache_scales",
            self.kv_cache_scales is None or self.kv_cache_dtype.startswith("fp8"),
            "left out unless --kv-cache-dtype is fp8_e4m3 or fp8_e5m2",
        )
        for f in (
            "load_format",
            "dtype",
            "generation_config",
            "kv_cache_dtype",
            "scheduling_policy",
            "pooling",
            "attention_backend",
        ):
            choices = self.__dataclass_fields__[f].metadata["choices"]
            require(self, f, getattr(self, f) in choices, "one of " + ", ".join(choices))


def _is_address(text: str) -> bool:
    match = re.fullmatch(r"[^\s:]+:([1-9]\d{0,4})", text)
    return match is not None and int(match[1]) < 1 << 16


def _check_hosts(config: EngineConfig) -> None:
    if (config.num_hosts > 1) != (config.distributed_coordinator is not None):
        raise ValueError("num_hosts and distributed_coordinator need each other")
    where = config.distributed_coordinator
    require(
        config,
        "distributed_coordinator",
        where is None or _is_address(where),
        "like 10.0.0.1:9100, an IPv4 address or a name and a port up to 65535",
    )
    require(config, "host_id", 0 <= config.host_id < config.num_hosts, "less than num_hosts")
    in_a_day = 0 < config.distributed_timeout <= 86400
    require(config, "distributed_timeout", in_a_day, "in (0, 86400]")
    require(
        config,
        "tensor_parallel_size",
        config.tensor_parallel_size % config.num_hosts == 0,
        f"a multiple of num_hosts, {config.num_hosts}: every host has as many of the devices",
    )
    require(
        config,
        "data_parallel_size",
        config.num_hosts == 1 or config.data_parallel_size == 1,
        "1 with several hosts, which run one engine",
    )
    require(
        config,
        "pipeline_parallel_size",
        config.num_hosts == 1 or config.pipeline_parallel_size == 1,
        "1 with several hosts: tensor_parallel_size spans them",
    )
