"""A dense Llama for training: Flax Linen, whole rows at once, several documents to a row.

Axes: N rows, T positions, D width, G query heads of a key head, K key heads, H head size, V tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class NetworkConfig:
    """Sizes, as `config.json` of a Llama names them, and the dropout of training."""

    vocab_size: int
    hidden_size: int = 256
    intermediate_size: int = 512
    num_hidden_layers: int = 5
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    max_position_embeddings: int = 2048
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-5
    dropout: float = 0.2
    dtype: str = "bfloat16"  # of the activations; the parameters are float32
    attention: Literal["xla", "cudnn"] = "xla"  # cudnn: on a GPU, without the T x T scores

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


def rotate(x_NTKH: jax.Array, theta: float) -> jax.Array:
    """Rotary position embedding, halves as pairs (Hugging Face's order of the two)."""
    T, H = x_NTKH.shape[1], x_NTKH.shape[-1]
    frequency = theta ** (-jnp.arange(0, H, 2, dtype=jnp.float32) / H)
    angle_T1F = (jnp.arange(T)[:, None] * frequency)[:, None, :]
    cos, sin = jnp.cos(angle_T1F), jnp.sin(angle_T1F)
    left, right = jnp.split(x_NTKH.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
    return rotated.astype(x_NTKH.dtype)


class Block(nn.Module):
    """Attention and gated feed-forward, each with a norm in front and dropout behind.

    `same_N1TT`: whether two positions belong to one document.
    """

    config: NetworkConfig

    @nn.compact
    def __call__(self, x_NTD: jax.Array, same_N1TT: jax.Array, train: bool) -> jax.Array:
        c = self.config
        depth_init = nn.initializers.normal(0.02 / (2 * c.num_hidden_layers) ** 0.5)

        def dense(features: int, name: str, init: nn.initializers.Initializer) -> nn.Dense:
            return nn.Dense(features, use_bias=False, dtype=c.dtype, kernel_init=init, name=name)

        init = nn.initializers.normal(0.02)
        drop = nn.Dropout(c.dropout, deterministic=not train)
        h_NTD = nn.RMSNorm(epsilon=c.rms_norm_eps, dtype=c.dtype, name="input_layernorm")(x_NTD)
        heads = {"q": c.num_attention_heads, "k": c.num_key_value_heads, "v": c.num_key_value_heads}
        q, k, v = (
            dense(n * c.head_dim, f"{part}_proj", init)(h_NTD).reshape(
                *x_NTD.shape[:2], n, c.head_dim
            )
            for part, n in heads.items()
        )
        mixed_NTKH = jax.nn.dot_product_attention(
            rotate(q, c.rope_theta),
            rotate(k, c.rope_theta),
            v,
            mask=same_N1TT,
            is_causal=True,
            implementation=c.attention,
        )
        mixed_NTD = mixed_NTKH.reshape(*x_NTD.shape[:2], -1)
        x_NTD = x_NTD + drop(dense(c.hidden_size, "o_proj", depth_init)(mixed_NTD))

        norm = nn.RMSNorm(epsilon=c.rms_norm_eps, dtype=c.dtype, name="post_attention_layernorm")
        h_NTD = norm(x_NTD)
        gate_NTF = nn.silu(dense(c.intermediate_size, "gate_proj", init)(h_NTD))
        up_NTF = dense(c.intermediate_size, "up_proj", init)(h_NTD)
        return x_NTD + drop(dense(c.hidden_size, "down_proj", depth_init)(gate_NTF * up_NTF))


class Llama(nn.Module):
    """Token ids [N, T] -> float32 logits [N, T, V]. A document sees nothing before its BOS."""

    config: NetworkConfig
    bos_token_id: int

    @nn.compact
    def __call__(self, ids_NT: jax.Array, train: bool = False) -> jax.Array:
        c = self.config
        document_NT = jnp.cumsum(ids_NT == self.bos_token_id, axis=1)
        same_N1TT = (document_NT[:, :, None] == document_NT[:, None, :])[:, None]

        embed = nn.Embed(
            c.vocab_size,
            c.hidden_size,
            dtype=c.dtype,
            embedding_init=nn.initializers.normal(0.02),
            name="embed_tokens",
        )
        x_NTD = nn.Dropout(c.dropout, deterministic=not train)(embed(ids_NT))
        for layer in range(c.num_hidden_layers):
            x_NTD = Block(c, name=f"layers_{layer}")(x_NTD, same_N1TT, train)
        x_NTD = nn.RMSNorm(epsilon=c.rms_norm_eps, dtype=c.dtype, name="norm")(x_NTD)
        return embed.attend(x_NTD).astype(jnp.float32)
