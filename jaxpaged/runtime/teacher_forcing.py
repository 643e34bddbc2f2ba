"""One sequence computed whole, beside any engine: what a model says of given tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.arrays.kv_pages import KVPages
from jaxpaged.arrays.step_batch import StepBatch
from jaxpaged.config import GIB, EngineConfig
from jaxpaged.models.decoder import Decoder, Params, head_params
from jaxpaged.runtime.startup import start_runner

ROWS = 64  # whose logits are computed at once: a large vocabulary takes a megabyte each


@dataclass(frozen=True)
class TeacherForced:
    """Runs sequences of up to `num_tokens` tokens through pages of the model's own kind."""

    model: Decoder
    params: Params
    num_tokens: int

    @classmethod
    def load(cls, config: EngineConfig, num_tokens: int) -> TeacherForced:
        """The model of an engine with these settings; the engine itself is kept small.

        Raises:
            ValueError, OSError: see `start_runner`.
        """
        small = replace(
            config,
            max_model_len=num_tokens,
            max_num_seqs=1,
            max_num_batched_tokens=num_tokens,
            kv_cache_memory_bytes=GIB,
            pipeline_parallel_size=1,
            enforce_eager=True,
            compile_cache_dir="none",
        )
        (stage,) = start_runner(small, serving=False).runner.stages
        return cls(stage.model, stage.params, num_tokens)

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Float32 scores [T, V] of the token after each of `token_ids`."""
        hidden_TD, _ = self.run(token_ids)
        return self.scores(hidden_TD)[: len(token_ids)]

    def scores(self, hidden_TD: jax.Array | np.ndarray) -> np.ndarray:
        """Float32 [T, V] of hidden states after the final norm."""
        rows = (hidden_TD[at : at + ROWS] for at in range(0, len(hidden_TD), ROWS))
        logits = [np.asarray(self._head(head_params(self.params), x_RD)) for x_RD in rows]
        return np.concatenate(logits)

    def run(self, token_ids: Sequence[int]) -> tuple[jax.Array, tuple[KVPages, ...]]:
        """Hidden states [num_tokens, D] after the final norm, and the pages with all that was
        written; tokens that are not there wrote into page 0.
        """
        token_T = np.zeros(self.num_tokens, np.int32)
        token_T[: len(token_ids)] = token_ids
        return self._forward(self.params, token_T, np.int32(len(token_ids)))

    @functools.cached_property
    def _head(self) -> Callable[..., jax.Array]:
        return jax.jit(lambda params, x: self.model.apply({"params": params}, x, method="logits"))

    @functools.cached_property
    def _forward(self) -> Callable[..., tuple[jax.Array, tuple[KVPages, ...]]]:
        T, kv = self.num_tokens, self.model.kv
        columns, groups = -(-T // kv.page_size), len(kv.groups)
        pages = replace(kv, num_pages=1 + groups * columns)

        def forward(
            params: Params, token_T: jax.Array, length: jax.Array
        ) -> tuple[jax.Array, tuple[KVPages, ...]]:
            one = jnp.ones((), jnp.int32)
            batch = StepBatch(
                token_T=token_T,
                position_T=jnp.arange(T),
                seq_T=jnp.zeros(T, jnp.int32),
                query_start_B1=jnp.stack([0 * length, length]),
                kv_len_B=length[None],
                num_decodes=0 * one,
                num_seqs=one,
                page_tables=tuple(
                    1 + g * columns + jnp.arange(columns)[None] for g in range(groups)
                ),
                row_R=jnp.zeros(1, jnp.int32),
            )
            return self.model.apply(
                {"params": params}, batch, one[None], pages.zeros(), method="forward_all"
            )

        return jax.jit(forward)
