"""Measures scales for the keys and values of a model; see `kv_scales`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import jax.numpy as jnp
import numpy as np

from jaxpaged.arrays.kv_pages import KVGroup
from jaxpaged.models.decoder import Decoder, Params
from jaxpaged.runtime.teacher_forcing import TeacherForced

# Calibrated scales put the largest key or value seen there: half of what float8_e4m3fn holds.
# A float's precision does not suffer, and others may be larger.
LARGEST_STORED = float(jnp.finfo(jnp.float8_e4m3fn).max) / 2


def calibrate(
    model: Decoder, params: Params, prompts: Iterable[list[int]], num_tokens: int
) -> dict[str, np.ndarray]:
    """Scales, by name, that leave room above the keys and values of some prompts.

    Args:
        model: with pages that are wide enough for what it computes.
        prompts: of at most `num_tokens` tokens each.
    """
    spec = model.spec
    all_layers = (KVGroup(tuple(range(len(spec.layers))), None),)  # each with an array of its own
    model = model.clone(kv=model.kv.with_groups(all_layers))
    forced = TeacherForced(model, params, num_tokens)
    largest_L2K = np.full((len(spec.layers), 2, spec.num_kv_heads), 1e-6, np.float32)
    for prompt in prompts:
        _, pages = forced.run(prompt)
        # Page 0 holds padding.
        seen = [jnp.abs(x.values_P2KSH[1:].astype(jnp.float32)).max(axis=(0, 3, 4)) for x in pages]
        largest_L2K = np.maximum(largest_L2K, np.stack(seen))
    return {
        f"model.layers.{layer}.self_attn.{side}_scale": largest_L2K[layer, i] / LARGEST_STORED
        for layer in range(len(spec.layers))
        for i, side in enumerate("kv")
    }
