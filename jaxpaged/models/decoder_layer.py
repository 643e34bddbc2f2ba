"""One layer of the decoder: attention and MLP, each around a residual."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxpaged.arrays.kv_pages import KVPages
from jaxpaged.arrays.step_batch import StepBatch
from jaxpaged.layers.attention import WritePlaces, attend
from jaxpaged.layers.linear import Linear
from jaxpaged.layers.norm import RMSNorm
from jaxpaged.models.spec import LayerQuantization, ModelSpec
from jaxpaged.parallel.sharding import LAYER_SCALES_AXES, split_attention
from jaxpaged.quantization import Quantized, Scheme
from pallas_kernels.peer_sum import BOXES
from pallas_kernels.rms_norm import Norm, Rows

# Of `peer_sum`: no two sums in a row take the same.
ATTENTION, MLP_OUT, EMBEDDING = range(BOXES)


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
        linear = partial(Linear, dtype=self.dtype, fuse=fuses(self.backend), mesh=self.mesh)
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
            attend,
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
        mixed = self.o(
            Rows(out_TNH), residual=residual_TD, next_norm=next_norm, peers=batch.peers(ATTENTION)
        )
        return mixed, pages


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
            Linear, use_bias=bias, dtype=self.dtype, fuse=fuses(self.backend), mesh=self.mesh
        )
        gate_up, down = scheme(self.quantization.gate_up), scheme(self.quantization.down)
        self.gate_up = linear((D,), (2, F), (None,), (None, "ffn"), scheme=gate_up)
        self.down = linear((F,), (D,), ("ffn",), (None,), scheme=down)

    def __call__(
        self,
        rows: Rows,
        norm: RMSNorm,
        residual_TD: jax.Array | None,
        next_norm: Norm | None,
        batch: StepBatch,
    ) -> Rows:
        hidden = self.gate_up(rows, norm=norm.operands(), activation=self.spec.activation)
        return self.down(
            hidden, residual=residual_TD, next_norm=next_norm, peers=batch.peers(MLP_OUT)
        )


def fuses(backend: str) -> bool:
    """Whether products of few rows may take their own kernels."""
    return backend != "xla"


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
            out = self.mlp(rows, self.mlp_norm, None, None, batch)
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
        return self.mlp(rows, self.mlp_norm, rows.x, next_norm, batch), pages


# Layers that are built alike share one trace: tracing holds the GIL, and no cache saves it.
SharedDecoderLayer = nn.jit(DecoderLayer)
