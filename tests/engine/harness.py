"""Tiny engines, and the naive loop that says what they should have answered."""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxpaged.arrays.step_batch import StepBatch
from jaxpaged.engine.engine_core import EngineCore
from jaxpaged.engine.messages import AddRequest, SequenceOutput
from jaxpaged.models.decoder import Decoder, Params
from jaxpaged.sampling_params import SamplingParams

VOCAB = 128
TIE = 1e-4  # a lead of the best token below this may be lost to rounding

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32",
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128, "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip
GEMMA = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "dtype": "float32",
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0,
    "sliding_window": 24, "query_pre_attn_scalar": 16, "hidden_activation": "gelu_pytorch_tanh",
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
}  # fmt: skip


def write_model(folder: Path, config: dict[str, Any], **changes: Any) -> Path:
    """A model folder with config.json alone, for `load_format="dummy"`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


@dataclasses.dataclass(frozen=True)
class Naive:
    """Greedy decoding of one sequence that computes its whole prefix anew for every token."""

    model: Decoder
    params: Params
    max_len: int = 128

    @functools.cached_property
    def _hidden(self) -> Any:
        T, S = self.max_len, self.model.kv.page_size
        kv = dataclasses.replace(self.model.kv, num_pages=len(self.model.kv.groups) * (T // S) + 1)
        tables = [
            1 + jnp.arange(T // S)[None] + g * (T // S) for g in range(len(self.model.kv.groups))
        ]

        def hidden(token_T: jax.Array, length: jax.Array) -> jax.Array:
            batch = StepBatch(
                token_T=token_T,
                position_T=jnp.arange(T),
                seq_T=jnp.zeros(T, jnp.int32),
                query_start_B1=jnp.stack([0, length]).astype(jnp.int32),
                kv_len_B=length[None],
                num_decodes=jnp.int32(0),
                num_seqs=jnp.int32(1),
                page_tables=tuple(tables),
                row_R=jnp.arange(T),
            )
            hidden_TD, _ = self.model.apply(
                {"params": self.params},
                batch,
                jnp.zeros(1, jnp.int32),
                kv.zeros(),
                method="forward",
            )
            return hidden_TD

        return jax.jit(hidden)

    @functools.cached_property
    def _head(self) -> Any:
        return jax.jit(
            lambda hidden: self.model.apply({"params": self.params}, hidden, method="logits")
        )

    def hidden(self, token_ids: Sequence[int]) -> jax.Array:
        """Hidden states [T, D] of `token_ids` after the final norm."""
        count = len(token_ids)
        padded = jnp.zeros(self.max_len, jnp.int32).at[:count].set(jnp.asarray(token_ids))
        return self._hidden(padded, jnp.int32(count))[:count]

    def logits(self, token_ids: Sequence[int]) -> jax.Array:
        """Float32 scores [V] of the token after `token_ids`."""
        return self._head(self.hidden(token_ids)[-1:])[0]

    def greedy(self, prompt: Sequence[int], count: int) -> tuple[list[int], list[float]]:
        """The best next tokens and the lead of each over the second best."""
        token_ids, leads = list(prompt), []
        for _ in range(count):
            best, ids = jax.lax.top_k(self.logits(token_ids), 2)
            token_ids.append(int(ids[0]))
            leads.append(float(best[0] - best[1]))
        return token_ids[len(prompt) :], leads


def naive_of(core: EngineCore) -> Naive:
    (stage,) = core._runner.stages
    return Naive(stage.model, stage.params)


def assert_greedy(naive: Naive, prompt: Sequence[int], found: Sequence[int]) -> int:
    """The tokens are the naive loop's, up to the first place where two tokens tie.

    Returns:
        1 if such a tie ended the comparison, else 0.
    """
    expected, leads = naive.greedy(prompt, len(found))
    for position, (want, got, lead) in enumerate(zip(expected, found, leads, strict=True)):
        if want != got:
            assert lead < TIE, f"token {position}: {got} instead of {want}, which leads by {lead}"
            return 1
    return 0


def request(request_id: str, prompt: Sequence[int], **params: Any) -> AddRequest:
    eos = params.pop("eos_token_ids", [])
    salt = params.pop("cache_salt", None)
    bad_word_ids = params.pop("bad_word_ids", [])
    pooling = params.pop("pooling", False)
    return AddRequest(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        params=SamplingParams(**({"temperature": 0.0} | params)),
        arrival_time=time.time(),
        eos_token_ids=eos,
        bad_word_ids=bad_word_ids,
        cache_salt=salt,
        pooling=pooling,
    )


def drain(core: EngineCore) -> list[SequenceOutput]:
    """Step until nothing is left to do."""
    outputs: list[SequenceOutput] = []
    while core.has_work:
        outputs += core.step()
        core._scheduler.check_integrity()
    return outputs


def run(core: EngineCore, requests: Iterable[AddRequest]) -> dict[tuple[str, int], list[int]]:
    """Tokens by (request, choice) of requests that arrive together."""
    for message in requests:
        core.add(message)
    tokens: dict[tuple[str, int], list[int]] = {}
    for output in drain(core):
        tokens.setdefault((output.request_id, output.index), []).extend(output.token_ids)
    return tokens
