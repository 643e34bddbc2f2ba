"""How the tensors of a Hugging Face checkpoint become the leaves of our parameters.

A rule names one leaf, the tensors it is made of and the function that packs them. Packing runs on
the device, so that a checkpoint is read once, in order, and never lies twice in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxpaged.models.spec import ModelSpec

Pack = Callable[..., jax.Array]  # (spec, *tensors) -> leaf


@dataclass(frozen=True)
class Rule:
    """One leaf; `{layer}` in the names stands for the layer's index."""

    leaf: str  # path in the parameter tree, joined by "/"
    tensors: tuple[str, ...]  # names in the checkpoint
    pack: Pack
    split_axis: int = 0  # of the tensors: what a mesh splits of the leaf
    merge: Pack | None = None  # of a kernel: its parts [out, ...] as [*outputs, ...]

    def at(self, layer: int) -> Rule:
        """This rule for one layer."""
        return Rule(
            self.leaf.format(layer=layer),
            tuple(name.format(layer=layer) for name in self.tensors),
            self.pack,
            self.split_axis,
            self.merge,
        )


def as_is(spec: ModelSpec, x: jax.Array) -> jax.Array:
    """Embeddings, norms, biases of one output axis."""
    return x


def merge_qkv(spec: ModelSpec, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """[N·H, ...], twice [K·H, ...] -> [K, G + 2, H, ...]: a KV head's queries, key and value."""
    heads = [x.reshape(spec.num_kv_heads, -1, spec.head_dim, *x.shape[1:]) for x in (q, k, v)]
    return jnp.concatenate(heads, axis=1)


def merge_gate_up(spec: ModelSpec, gate: jax.Array, up: jax.Array) -> jax.Array:
    """Twice [F, ...] -> [2, F, ...]."""
    return jnp.stack((gate, up))


def pack_o(spec: ModelSpec, o: jax.Array) -> jax.Array:
    """[D, N·H] -> [K, G, H, D]."""
    return o.T.reshape(spec.num_kv_heads, spec.queries_per_kv_head, spec.head_dim, -1)


def _inputs_first(merge: Pack) -> Pack:
    """[out, in] of each part -> [in, *outputs]."""

    def pack(spec: ModelSpec, *parts: jax.Array) -> jax.Array:
        return jnp.moveaxis(merge(spec, *parts), -1, 0)

    return pack


def _norm(leaf: str, tensor: str) -> Rule:
    """The scale of a norm in every layer."""
    return Rule(f"layers_{{layer}}/{leaf}/scale", (f"{_LAYER}.{tensor}.weight",), as_is)


def _linear(
    leaf: str,
    names: tuple[str, ...],
    merge: Pack = as_is,
    split_axis: int = 0,
    pack: Pack | None = None,
) -> tuple[Rule, ...]:
    """Kernel and bias of a product in every layer; biases lie like kernels without D."""
    leaf = f"layers_{{layer}}/{leaf}"
    weights, biases = (
        tuple(f"{_LAYER}.{name}.{kind}" for name in names) for kind in ("weight", "bias")
    )
    return (
        Rule(f"{leaf}/kernel", weights, pack or _inputs_first(merge), split_axis, merge),
        Rule(f"{leaf}/bias", biases, merge, split_axis),
    )


_LAYER = "model.layers.{layer}"
HEAD_KERNEL = "lm_head/kernel"  # of a head that is no table, since it is quantized

# Leaves and tensors that Llama and its descendants share. A rule whose leaf a model lacks (a bias,
# a head where it is tied) does not apply.
STANDARD = (
    Rule("embed/table", ("model.embed_tokens.weight",), as_is),
    Rule("lm_head/table", ("lm_head.weight",), as_is),
    Rule(HEAD_KERNEL, ("lm_head.weight",), _inputs_first(as_is), merge=as_is),
    Rule("final_norm/scale", ("model.norm.weight",), as_is),
    _norm("attention_norm", "input_layernorm"),
    _norm("attention/q_norm", "self_attn.q_norm"),
    _norm("attention/k_norm", "self_attn.k_norm"),
    *_linear(
        "attention/qkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), merge_qkv
    ),
    *_linear("attention/o", ("self_attn.o_proj",), split_axis=1, pack=pack_o),
    *_linear("mlp/gate_up", ("mlp.gate_proj", "mlp.up_proj"), merge_gate_up),
    *_linear("mlp/down", ("mlp.down_proj",), split_axis=1),
)

# A norm before each half of a layer (Llama), or before and after (Gemma).
PRE_NORMS = (_norm("mlp_norm", "post_attention_layernorm"),)
PRE_AND_POST_NORMS = (
    _norm("attention_post_norm", "post_attention_layernorm"),
    _norm("mlp_norm", "pre_feedforward_layernorm"),
    _norm("mlp_post_norm", "post_feedforward_layernorm"),
)
