"""From settings, model and device to the sizes that an engine runs with."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax.numpy as jnp

from jaxpaged.arrays.kv_pages import KVPagesSpec, group_layers
from jaxpaged.config import EngineConfig
from jaxpaged.core.buckets import Buckets
from jaxpaged.core.scheduler_config import SchedulerConfig
from jaxpaged.models.spec import ModelSpec
from jaxpaged.models.stages import stage_layers
from jaxpaged.runtime.memory import PageNeeds, check_model_len
from jaxpaged.runtime.step import StepShapes

DTYPES = {
    "half": jnp.float16,
    "float16": jnp.float16,
    "bfloat16": jnp.bfloat16,
    "float": jnp.float32,
    "float32": jnp.float32,
}
KV_DTYPES = DTYPES | {
    "fp8": jnp.float8_e4m3fn,
    "fp8_e4m3": jnp.float8_e4m3fn,
    "fp8_e5m2": jnp.float8_e5m2,
    "int8": jnp.int8,
}


def model_dtype(config: EngineConfig, checkpoint_dtype: str, platform: str) -> jnp.dtype:
    """auto follows the checkpoint on GPU and is float32 on CPU."""
    if config.dtype != "auto":
        return jnp.dtype(DTYPES[config.dtype])
    return jnp.dtype(jnp.float32 if platform == "cpu" else DTYPES[checkpoint_dtype])


@dataclass(frozen=True)
class EnginePlan:
    """Sizes of one engine: everything that the shapes of its executables depend on."""

    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    kv: KVPagesSpec
    buckets: Buckets
    vocab: int
    width: int  # of a hidden state
    stages: tuple[range, ...]  # the layers of each
    pool_means: bool  # embeddings are means over the prompt, not of its last token

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(group.window for group in self.kv.groups)

    @property
    def shapes(self) -> StepShapes:
        return StepShapes(
            num_groups=len(self.kv.groups),
            max_num_seqs=self.max_num_seqs,
            pages_per_seq=-(-self.max_model_len // self.kv.page_size),
            page_size=self.kv.page_size,
            max_rows=max(self.buckets.scoring_rows),
            vocab=self.vocab,
        )

    def needs(self, config: EngineConfig) -> PageNeeds:
        """Pages that sequences need."""
        chunk = min(self.max_num_batched_tokens, config.long_prefill_token_threshold or 1 << 30)
        return PageNeeds(self.windows, self.kv.page_size, chunk)

    def scheduler_config(self, config: EngineConfig) -> SchedulerConfig:
        """Limits of the scheduler.

        Raises:
            ValueError: under these limits a single long request could never run.
        """
        return SchedulerConfig(
            page_size=self.kv.page_size,
            num_pages=self.kv.num_pages,
            windows=self.windows,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            enable_prefix_caching=config.enable_prefix_caching,
            enable_chunked_prefill=config.enable_chunked_prefill,
            policy=config.scheduling_policy,
            max_num_queued_reqs=config.max_num_queued_reqs,
            max_num_queued_tokens=config.max_num_queued_tokens,
            num_stages=len(self.stages),
        )

    def with_pages(self, config: EngineConfig, *budgets: int) -> EnginePlan:
        """Size the pool, and the model length if it is 'auto'.

        Args:
            budgets: bytes for pages on a device of each stage. A page lies on all of them: the
                scarcest stage decides.

        Raises:
            ValueError: one sequence of max_model_len does not fit.
        """
        needs = self.needs(config)
        useful = self.max_num_seqs * needs.pages(self.max_model_len)
        # Page 0 belongs to nobody: padding writes there.
        sizes = [self.kv.part(layers).page_bytes for layers in self.stages]
        fitting = [budget // size - 1 for budget, size in zip(budgets, sizes, strict=True)]
        num_pages = config.num_gpu_blocks_override or min(*fitting, useful)
        max_model_len = self.max_model_len
        if config.max_model_len == "auto":
            max_model_len = needs.longest(num_pages, max_model_len)
        if max_model_len < 1 or num_pages < 1:
            max_model_len = self.max_model_len
        page_bytes = sizes[fitting.index(min(fitting))]  # on a device of the scarcest stage
        check_model_len(needs, num_pages, page_bytes, max_model_len)
        return dataclasses.replace(
            self,
            max_model_len=max_model_len,
            kv=dataclasses.replace(self.kv, num_pages=num_pages + 1),
        )


def make_plan(
    config: EngineConfig, spec: ModelSpec, dtype: jnp.dtype, platform: str, serving: bool
) -> EnginePlan:
    """Everything but the number of pages, which is known once the weights are loaded.

    Args:
        platform: of the devices, as JAX names it.

    Raises:
        ValueError: settings that contradict the model or each other.
    """
    if isinstance(config.max_model_len, int):
        max_model_len = config.max_model_len
        if max_model_len > spec.max_position:
            raise ValueError(
                f"--max-model-len {max_model_len} is more than the model's own maximum, "
                f"{spec.max_position} (max_position_embeddings in config.json)."
            )
    else:
        max_model_len = spec.max_position
    on_cpu = platform == "cpu"
    max_num_seqs = config.max_num_seqs or (32 if on_cpu else 256)
    tokens = config.max_num_batched_tokens
    if tokens is None:
        # A larger step gains nothing on a CPU, and each size more is compiled at start-up.
        tokens = 512 if on_cpu else 8192 if serving else 16384
        tokens = max(min(tokens, max_num_seqs * max_model_len), max_num_seqs)
        if not config.enable_chunked_prefill:
            tokens = max(tokens, max_model_len)
    if tokens < max_num_seqs:
        raise ValueError(
            f"--max-num-batched-tokens {tokens} is less than --max-num-seqs "
            f"{max_num_seqs}: every running sequence needs a token a step."
        )
    if not config.enable_chunked_prefill and tokens < max_model_len:
        raise ValueError(
            f"--max-num-batched-tokens {tokens} is less than the model length {max_model_len}, "
            f"and --no-enable-chunked-prefill forbids to split a prompt."
        )
    kv_dtype = dtype if config.kv_cache_dtype == "auto" else KV_DTYPES[config.kv_cache_dtype]
    if config.kv_cache_dtype == "auto" and on_cpu and dtype == jnp.bfloat16:
        kv_dtype = jnp.float32  # XLA's CPU backend copies a bfloat16 pool at every write
    return EnginePlan(
        max_model_len=max_model_len,
        max_num_batched_tokens=tokens,
        max_num_seqs=max_num_seqs,
        kv=KVPagesSpec(
            groups=group_layers(tuple(layer.window for layer in spec.layers)),
            num_pages=2,
            page_size=config.block_size,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=jnp.dtype(kv_dtype),
            num_devices=config.tensor_parallel_size,
        ),
        buckets=Buckets(
            max_num_seqs,
            tokens,
            platform,
            steady=spec.rounds_activations or jnp.dtype(kv_dtype).itemsize == 1,
        ),
        vocab=spec.vocab,
        width=spec.width,
        stages=tuple(stage_layers(spec, config.pipeline_parallel_size)),
        pool_means=config.pooling == "mean",
    )
