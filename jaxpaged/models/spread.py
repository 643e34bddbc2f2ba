"""Makes a model's axes divide by the devices that share it; what is stored stays as it is."""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxpaged.models.spec import ModelSpec

MASK_BITS = 32  # tokens to a word of the sampler's masks: a device has whole words


def spread_spec(spec: ModelSpec, num_devices: int) -> ModelSpec:
    """The model with KV heads copied and its vocabulary padded until both divide.

    Query heads lie with their KV head, so too few KV heads are copied, each copy with a part of
    the queries; a device then holds the keys and values that its queries need.

    Raises:
        ValueError: query heads, the MLP or what packed weights have of it do not divide; names them
            and the numbers that would do.
    """
    if num_devices == 1:
        return spec
    sizes = {"num_attention_heads": spec.num_heads, "intermediate_size": spec.ffn}
    for product, name, terms in (
        ("o", "num_attention_heads * head_dim", spec.num_heads * spec.head_dim),
        ("down", "intermediate_size", spec.ffn),
    ):
        hows = [getattr(layer.quantization, product) for layer in spec.layers]
        packed = max((how.scheme.packed for how in hows if how is not None), default=1)
        if packed > 1:  # a device has whole elements of the kernel
            name = f"{name} / {packed}, since {packed} weights of {product}_proj share an element"
            sizes[name] = terms // packed
    uneven = [f"{name} ({size})" for name, size in sizes.items() if size % num_devices]
    if uneven:
        most = math.gcd(*sizes.values())
        fitting = [str(n) for n in range(1, most + 1) if most % n == 0]
        raise ValueError(
            f"-tp {num_devices} does not divide this model's "
            f"{' and '.join(uneven)}; what does: {', '.join(fitting)}"
        )
    num_kv_heads = math.lcm(spec.num_kv_heads, num_devices)
    return replace(
        spec,
        num_kv_heads=num_kv_heads,
        kv_copies=num_kv_heads // spec.num_kv_heads,
        vocab_padding=-spec.vocab % (MASK_BITS * num_devices),
    )


def spread_leaf(spec: ModelSpec, name: str, leaf: jax.Array) -> jax.Array:
    """A leaf of the stored model as `spec` has it."""
    if name.startswith(("embed/", "lm_head/")) and spec.vocab_padding:
        # The vocabulary is the first axis of what is multiplied with, and the last of its scales.
        at = 0 if name.endswith(("/table", "/kernel_q")) else leaf.ndim - 1
        return jnp.pad(leaf, [(0, spec.vocab_padding * (axis == at)) for axis in range(leaf.ndim)])
    if "/attention/qkv/" in name and spec.kv_copies > 1:
        # [K, G + 2, H], of a quantized kernel before its terms, else after them, if it has any:
        # the queries are dealt out, key and value copied.
        at = 0 if name.endswith("/kernel_q") else leaf.ndim - 3
        lead, (_, _, *tail) = leaf.shape[:at], leaf.shape[at:]
        q, kv = jnp.split(leaf, (-2 % leaf.shape[at + 1],), axis=at + 1)
        q = q.reshape(*lead, spec.num_kv_heads, spec.queries_per_kv_head, *tail)
        kv = jnp.repeat(kv, spec.kv_copies, axis=at)
        return jnp.concatenate((q, kv), axis=at + 1)
    if name.endswith("/attention/o/kernel") and spec.kv_copies > 1:
        return leaf.reshape(spec.num_kv_heads, spec.queries_per_kv_head, *leaf.shape[2:])
    return leaf
