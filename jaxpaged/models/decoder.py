"""The decoder that every family shares, driven by a `ModelSpec`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxpaged.arrays.kv_pages import KVPages, KVPagesSpec
from jaxpaged.arrays.step_batch import StepBatch
from jaxpaged.layers.attention import WritePlaces, attend, write_places
from jaxpaged.layers.embedding import Embedding
from jaxpaged.layers.linear import Linear
from jaxpaged.layers.norm import RMSNorm
from jaxpaged.layers.rope import rope_tables
from jaxpaged.models.prefetch import WINDOW, fetch
from jaxpaged.models.spec import LayerQuantization, ModelSpec
from jaxpaged.parallel.sharding import LAYER_SCALES_AXES, split_attention
from jaxpaged.quantization import Quantized, Scheme
from pallas_kernels.rms_norm import Norm, Rows

Params = Any  # nested dicts of arrays


class Attention(nn.Module):
    """Queries, keys and values; pages written, then read; heads mixed."""

    spec: ModelSpec
    window: int | None
    quantization: LayerQuantization
    dtype: Any
    backend: str
    mesh: Mesh | None
    scales_kv: bool

    def setup(self) -> None:
        s, quantized = self.spec, self.quantization
        K, G, H, D = s.num_kv_heads, s.queries_per_kv_head, s.head_dim, s.width
        # A KV head's queries, key and value lie side by side: split over KV heads, every slice
        # below stays on its device.
        split = ("kv_heads", None, None)
        linear = partial(Linear, dtype=self.dtype, fuse=fuses(self.backend, self.mesh))
        self.qkv = linear(
            (D,), (K, G + 2, H), (None,), split, s.qkv_bias, scheme=scheme(quantized.qkv)
        )
        self.o = linear((K, G, H), (D,), split, (None,), s.o_bias, scheme=scheme(quantized.o))
        if s.qk_norm:
            self.q_norm = RMSNorm(H, s.norm_eps, s.norm_plus_one, self.dtype)
            self.k_norm = RMSNorm(H, s.norm_eps, s.norm_plus_one, self.dtype)
        self.kv_scale = None
        if self.scales_kv:
            ones = nn.with_logical_partitioning(nn.initializers.ones, LAYER_SCALES_AXES)
            self.kv_scale = self.param("kv_scale", ones, (2, K), jnp.float32)

    def __call__(
        self,
        rows: Rows,
        norm: RMSNorm,
        residual_TD: jax.Array | None,
        next_norm: Norm | None,
        rope: tuple[jax.Array, jax.Array],
        pages: KVPages,
        batch: StepBatch,
        places: WritePlaces,
    ) -> tuple[Rows, KVPages]:
        s = self.spec
        scales = (self.q_norm.scale, self.k_norm.scale) if s.qk_norm else None
        attend_heads: Callable[..., Any] = partial(
            _attend_heads,
            backend=self.backend,
            norm_eps=s.norm_eps,
            norm_plus_one=s.norm_plus_one,
            scale=s.attention_scale,
            window=self.window,
        )
        if self.mesh is not None:
            attend_heads = split_attention(attend_heads, self.mesh)
        qkv_TKXH = self.qkv(rows, norm=norm.operands()).x
        out_TNH, pages = attend_heads(qkv_TKXH, pages, self.kv_scale, scales, rope, batch, places)
        return self.o(Rows(out_TNH), residual=residual_TD, next_norm=next_norm), pages


def _attend_heads(
    qkv_TKXH: jax.Array,
    pages: KVPages,
    layer_scales_2K: jax.Array | None,
    scales: tuple[jax.Array, jax.Array] | None,
    rope: tuple[jax.Array, jax.Array],
    batch: StepBatch,
    places: WritePlaces,
    **options: Any,
) -> tuple[jax.Array, KVPages]:
    """Attention of one layer, whose KV group's page table is the only one in `batch`."""
    return attend(qkv_TKXH, pages, layer_scales_2K, scales, rope, batch, 0, places, **options)


class MLP(nn.Module):
    """down(activation(gate) * up)."""

    spec: ModelSpec
    quantization: LayerQuantization
    dtype: Any
    backend: str
    mesh: Mesh | None

    def setup(self) -> None:
        D, F, bias = self.spec.width, self.spec.ffn, self.spec.mlp_bias
        linear = partial(
            Linear, use_bias=bias, dtype=self.dtype, fuse=fuses(self.backend, self.mesh)
        )
        gate_up, down = scheme(self.quantization.gate_up), scheme(self.quantization.down)
        self.gate_up = linear((D,), (2, F), (None,), (None, "ffn"), scheme=gate_up)
        self.down = linear((F,), (D,), ("ffn",), (None,), scheme=down)

    def __call__(
        self, rows: Rows, norm: RMSNorm, residual_TD: jax.Array | None, next_norm: Norm | None
    ) -> Rows:
        hidden = self.gate_up(rows, norm=norm.operands(), activation=self.spec.activation)
        return self.down(hidden, residual=residual_TD, next_norm=next_norm)


def fuses(backend: str, mesh: Mesh | None) -> bool:
    """Whether products of few rows may take their own kernels."""
    return backend != "xla" and mesh is None


def scheme(quantized: Quantized | None) -> Scheme | None:
    """How a product's kernel is stored."""
    return None if quantized is None else quantized.scheme


class DecoderLayer(nn.Module):
    """Attention and MLP, each around a residual."""

    spec: ModelSpec
    window: int | None
    quantization: LayerQuantization
    dtype: Any
    backend: str
    mesh: Mesh | None
    scales_kv: bool

    def setup(self) -> None:
        s = self.spec
        norm = partial(RMSNorm, s.width, s.norm_eps, s.norm_plus_one, self.dtype)
        self.attention = Attention(
            s, self.window, self.quantization, self.dtype, self.backend, self.mesh, self.scales_kv
        )
        self.mlp = MLP(s, self.quantization, self.dtype, self.backend, self.mesh)
        self.attention_norm, self.mlp_norm = norm(), norm()
        if s.post_norms:
            self.attention_post_norm, self.mlp_post_norm = norm(), norm()

    def __call__(
        self,
        rows: Rows,
        next_scale_D: jax.Array | None,
        rope: tuple[jax.Array, jax.Array],
        pages: KVPages,
        batch: StepBatch,
        places: WritePlaces,
    ) -> tuple[Rows, KVPages]:
        """Hidden states and pages after this layer.

        Args:
            rows: hidden states, [T, D].
            next_scale_D: of the norm that comes after this layer; None: another stage has it.
            rope: cos and sin tables of the layer's kind.
            pages: this layer's array of the pool.
            batch: the step, with the page table of the layer's KV group alone, so that layers of
                different groups are alike.
            places: where the step's tokens go in that group's pages.
        """
        s = self.spec
        if s.post_norms:
            mixed, pages = self.attention(
                rows, self.attention_norm, None, None, rope, pages, batch, places
            )
            rows = Rows(rows.x + self.attention_post_norm(mixed.x))
            out = self.mlp(rows, self.mlp_norm, None, None)
            return Rows(rows.x + self.mlp_post_norm(out.x)), pages
        # No norm stands before a residual: the product adds it, and may begin the next norm.
        next_norm = None
        if next_scale_D is not None:
            next_norm = Norm(next_scale_D, s.norm_eps, s.norm_plus_one)
        rows, pages = self.attention(
            rows,
            self.attention_norm,
            rows.x,
            self.mlp_norm.operands(),
            rope,
            pages,
            batch,
            places,
        )
        return self.mlp(rows, self.mlp_norm, rows.x, next_norm), pages


# Layers that are built alike share one trace: tracing holds the GIL, and no cache saves it.
SharedDecoderLayer = nn.jit(DecoderLayer)


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
        host_layers: indices of those whose matrices lie in host memory.
    """

    spec: ModelSpec
    kv: KVPagesSpec
    dtype: Any
    backend: str = "xla"
    mesh: Mesh | None = None
    part: range | None = None
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
        if self.is_first or (self.is_last and s.tie_embeddings):
            self.embed = Embedding(s.vocab_rows, s.width, self.dtype)
        self.layers = {
            str(index): SharedDecoderLayer(
                s,
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
            if not s.tie_embeddings:
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
        x_TD = self.embed(token_T)
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
        head = self.embed if self.spec.tie_embeddings else self.lm_head
        logits_RV, cap = head.logits(hidden_RD), self.spec.final_softcap
        if cap is not None:
            logits_RV = cap * jnp.tanh(logits_RV / cap)
        if self.spec.vocab_padding:
            real_V = jnp.arange(self.spec.vocab_rows) < self.spec.vocab
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
