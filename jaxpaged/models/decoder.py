"""The decoder that every family shares, driven by a `ModelSpec`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxpaged.arrays.kv_pages import KVPages, KVPagesSpec
from jaxpaged.arrays.step_batch import StepBatch
from jaxpaged.layers.attention import write_places
from jaxpaged.layers.embedding import Embedding
from jaxpaged.layers.linear import Linear
from jaxpaged.layers.norm import RMSNorm
from jaxpaged.layers.rope import rope_tables
from jaxpaged.models.decoder_layer import EMBEDDING, SharedDecoderLayer, fuses
from jaxpaged.models.prefetch import WINDOW, fetch
from jaxpaged.models.spec import ModelSpec
from pallas_kernels.rms_norm import Rows

Params = Any  # nested dicts of arrays


class Decoder(nn.Module):
    """A pure function of parameters, a step's tokens and the KV pages.

    Attributes:
        spec: the family's sizes and switches.
        kv: where each layer's keys and values lie.
        dtype: of weights and activations.
        backend: of attention; see `layers.attention`.
        mesh: the devices that share every layer; None: one device.
        part: the layers of a stage, if several share the model; None: all of them. The first stage
            embeds tokens, the last one has the final norm and the head.
        stores_to_peers: the devices of the mesh make small sums by stores into each other's memory.
        host_layers: indices of those whose matrices lie in host memory.
    """

    spec: ModelSpec
    kv: KVPagesSpec
    dtype: Any
    backend: str = "xla"
    mesh: Mesh | None = None
    part: range | None = None
    stores_to_peers: bool = False
    host_layers: tuple[int, ...] = ()

    @property
    def own_layers(self) -> range:
        """Indices of the layers that this stage computes."""
        return range(len(self.spec.layers)) if self.part is None else self.part

    @property
    def is_first(self) -> bool:
        return self.own_layers.start == 0

    @property
    def is_last(self) -> bool:
        return self.own_layers.stop == len(self.spec.layers)

    def setup(self) -> None:
        s = self.spec
        if self.is_first or (self.is_last and s.tie_embeddings and s.head is None):
            self.embed = Embedding(s.vocab_rows, s.width, self.dtype, self.mesh)
        # What a layer is told is compared with what others were, at each layer of each trace.
        of_all = dataclasses.replace(s, layers=())
        self.layers = {
            str(index): SharedDecoderLayer(
                of_all,
                s.layers[index].window,
                s.layers[index].quantization,
                self.dtype,
                self.backend,
                self.mesh,
                self.kv.has_layer_scales,
            )
            for index in self.own_layers
        }
        if self.is_last:
            self.final_norm = RMSNorm(s.width, s.norm_eps, s.norm_plus_one, self.dtype)
            if s.head is not None:
                self.lm_head = Linear(
                    (s.width,),
                    (s.vocab_rows,),
                    (None,),
                    ("vocab",),
                    dtype=self.dtype,
                    fuse=fuses(self.backend),
                    scheme=s.head.scheme,
                    mesh=self.mesh,
                    result_dtype=jnp.float32,
                )
            elif not s.tie_embeddings:
                self.lm_head = Embedding(s.vocab_rows, s.width, self.dtype)

    def forward(
        self,
        batch: StepBatch,
        last_token: jax.Array,
        kv_pages: tuple[KVPages, ...],
        x_TD: jax.Array | None = None,
    ) -> tuple[jax.Array, tuple[KVPages, ...]]:
        """Compute the step's tokens and write their keys and values.

        Args:
            batch: tokens, positions, page tables.
            last_token: i32[slots], for tokens that the batch names by slot.
            kv_pages: arrays of the pool, written in place where they are donated.
            x_TD: what the stage before returned; None: this is the first.

        Returns:
            The hidden states of `batch.row_R` after the final norm [R, D], and the pages. A stage
            that is not the last returns those of every token [T, D], as its last layer left them.
        """
        x_TD, pages = self._run_layers(batch, last_token, kv_pages, x_TD)
        return self.final_norm(x_TD[batch.row_R]) if self.is_last else x_TD, pages

    def forward_all(
        self,
        batch: StepBatch,
        last_token: jax.Array,
        kv_pages: tuple[KVPages, ...],
        x_TD: jax.Array | None = None,
    ) -> tuple[jax.Array, tuple[KVPages, ...]]:
        """Like `forward` of the last stage, but with the hidden states of every token [T, D]."""
        x_TD, pages = self._run_layers(batch, last_token, kv_pages, x_TD)
        return self.final_norm(x_TD), pages

    def _embed_tokens(self, batch: StepBatch, last_token: jax.Array) -> jax.Array:
        token_T = batch.token_T
        token_T = jnp.where(token_T < 0, last_token[-1 - token_T], token_T)
        x_TD = self.embed(token_T, batch.peers(EMBEDDING))
        if self.spec.embed_scale is not None:
            x_TD *= jnp.asarray(self.spec.embed_scale, self.dtype)
        return x_TD

    def _run_layers(
        self,
        batch: StepBatch,
        last_token: jax.Array,
        kv_pages: tuple[KVPages, ...],
        x_TD: jax.Array | None,
    ) -> tuple[jax.Array, tuple[KVPages, ...]]:
        if x_TD is None:
            x_TD = self._embed_tokens(batch, last_token)
        own, kv = self.own_layers, self.kv.part(self.own_layers)
        kinds = tuple(dict.fromkeys(self.spec.layers[index].rope for index in own))
        tables = [rope_tables(rope, batch.position_T) for rope in kinds]
        used = [group for group, members in enumerate(kv.groups) if members.layers]
        places = {group: write_places(batch, group, kv.page_size) for group in used}
        # Without a barrier XLA computes these again inside every layer's fusions.
        tables, places = jax.lax.optimization_barrier((tables, places))
        ropes = dict(zip(kinds, tables, strict=True))
        batches = [dataclasses.replace(batch, page_tables=(x,)) for x in batch.page_tables]
        pages = list(kv_pages)
        norms = [self.layers[str(index)].attention_norm.scale for index in own[1:]]
        # Which norm comes first in the next stage, this one does not know.
        norms.append(self.final_norm.scale if self.is_last else None)
        rows = Rows(x_TD)
        layers: dict[int, Callable[..., Any]] = {index: self.layers[str(index)] for index in own}
        for index in self.host_layers[:WINDOW]:
            layers[index], rows = fetch(self.layers[str(index)], after=rows)
        successors = dict(zip(self.host_layers, self.host_layers[WINDOW:], strict=False))
        for index, next_scale_D in zip(own, norms, strict=True):
            group, array = kv.place(index)
            rope = ropes[self.spec.layers[index].rope]
            rows, pages[array] = layers[index](
                rows, next_scale_D, rope, pages[array], batches[group], places[group]
            )
            if index in successors:  # there is room on the device again
                following = successors[index]
                layers[following], rows = fetch(self.layers[str(following)], after=rows)
        return rows.x, tuple(pages)

    def logits(self, hidden_RD: jax.Array) -> jax.Array:
        """Float32 scores [R, V] of hidden states that `forward` returned; -inf of padding."""
        s, cap = self.spec, self.spec.final_softcap
        if s.head is not None:
            logits_RV = self.lm_head(Rows(hidden_RD)).x
        else:
            logits_RV = (self.embed if s.tie_embeddings else self.lm_head).logits(hidden_RD)
        if cap is not None:
            logits_RV = cap * jnp.tanh(logits_RV / cap)
        if s.vocab_padding:
            real_V = jnp.arange(s.vocab_rows) < s.vocab
            logits_RV = jnp.where(real_V, logits_RV, -jnp.inf)
        return logits_RV

    def __call__(
        self,
        batch: StepBatch,
        last_token: jax.Array,
        kv_pages: tuple[KVPages, ...],
        x_TD: jax.Array | None = None,
    ) -> tuple[jax.Array, tuple[KVPages, ...]]:
        """`forward` and, in the last stage, `logits` in one: ([R, V], pages)."""
        hidden_RD, kv_pages = self.forward(batch, last_token, kv_pages, x_TD)
        return self.logits(hidden_RD) if self.is_last else hidden_RD, kv_pages


def head_params(params: Params) -> Params:
    """The part of the parameters that `logits` reads."""
    name = "lm_head" if "lm_head" in params else "embed"
    return {name: params[name]}


def abstract_params(model: Decoder) -> Params:
    """Shapes, dtypes and logical axes of the parameters; nothing is computed."""
    model = model.clone(host_layers=())  # there is nothing to copy yet
    one = jnp.zeros((1,), jnp.int32)
    batch = StepBatch(
        token_T=one,
        position_T=one,
        seq_T=one,
        query_start_B1=jnp.zeros((2,), jnp.int32),
        kv_len_B=one,
        num_decodes=one[0],
        num_seqs=one[0],
        page_tables=(one[None],) * len(model.kv.groups),
        row_R=one,
        decode_only=True,
    )
    kv_pages = jax.eval_shape(model.kv.part(model.own_layers).zeros)
    x_TD = None if model.is_first else jnp.zeros((1, model.spec.width), model.dtype)
    return jax.eval_shape(model.init, jax.random.key(0), batch, one, kv_pages, x_TD)["params"]
