"""The leaves of quantized kernels: what a checkpoint's tensors, or random numbers, become."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxpaged.models.checkpoint_rules import Pack, Rule
from jaxpaged.models.spec import ModelSpec
from jaxpaged.models.spread import spread_leaf
from jaxpaged.quantization import KERNEL, ORDER, Arrays, Quantized, arrange

Leaves = dict[str, jax.ShapeDtypeStruct]  # by path in the parameter tree, each with its sharding
Part = Mapping[str, jax.Array]  # what is stored of a product's part, by the end of its name


def quantized_kernel(spec: ModelSpec, rule: Rule) -> Quantized | None:
    """How the kernel that a rule makes is stored instead."""
    return None if rule.merge is None else spec.quantized(rule.leaf)


def part_names(rule: Rule) -> list[str]:
    """What the checkpoint calls the parts of a kernel: model.layers.0.mlp.gate_proj."""
    return [name.removesuffix(".weight") for name in rule.tensors]


def kernel_leaves(leaves: Leaves, kernel: str) -> Leaves:
    """Those that stand in the place of a leaf `.../kernel`, by their last name."""
    product = kernel.removesuffix("kernel")
    return {
        name.removeprefix(product): leaf
        for name, leaf in leaves.items()
        if name.startswith(kernel + "_")
    }


def pack_parts(
    rule: Rule, quantized: Quantized, spec: ModelSpec, name: str, targets: Leaves
) -> Any:
    """A compiled function from parts, as the checkpoint has them, to leaves by their last name.

    Args:
        name: of the kernel in every layer.
        targets: see `kernel_leaves`.
    """
    assert rule.merge is not None
    return _pack_parts(rule.merge, quantized, spec, name, tuple(targets.items()))


@functools.cache
def _pack_parts(
    merge: Pack,
    quantized: Quantized,
    spec: ModelSpec,
    name: str,
    targets: tuple[tuple[str, jax.ShapeDtypeStruct], ...],
) -> Any:
    """Compiled once for all layers."""

    def make(parts: Sequence[Part]) -> Arrays:
        unpacked = [quantized.source.unpack(quantized.scheme, part) for part in parts]
        leaves = {}
        for array in unpacked[0]:
            if array == ORDER:  # all parts have the same
                leaves[array] = unpacked[0][array]
                continue
            rows = merge(spec.stored, *(part[array] for part in unpacked))
            leaves[array] = arrange(array, rows, has_terms=unpacked[0][array].ndim > 1)
        return spread_leaves(spec, name, leaves, dict(targets))

    return jax.jit(make, out_shardings={leaf: target.sharding for leaf, target in targets})


def quantize_rows(
    quantized: Quantized, spec: ModelSpec, name: str, rows: jax.Array, targets: Leaves
) -> Arrays:
    """The leaves of a kernel [*outputs, I] of the stored model, in float32."""
    arrays = quantized.scheme.quantize(rows)
    arranged = {
        array: arrange(array, value, value.ndim == rows.ndim) for array, value in arrays.items()
    }
    return spread_leaves(spec, name, arranged, targets)


def spread_leaves(spec: ModelSpec, name: str, arrays: Arrays, targets: Leaves) -> Arrays:
    """The stored model's arrays as `spec` has them, in the leaves' dtypes."""
    product = name.removesuffix("kernel")
    return {
        array: (value if array == ORDER else spread_leaf(spec, product + array, value)).astype(
            targets[array].dtype
        )
        for array, value in arrays.items()
    }


def stored_shape(quantized: Quantized, stored: Leaves) -> tuple[int, ...]:
    """[*outputs, I] of a kernel whose leaves a checkpoint would have like this."""
    *outputs, terms = stored[KERNEL].shape
    return (*outputs, terms * quantized.scheme.packed)
