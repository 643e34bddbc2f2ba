"""Measures scales for the keys and values of a model; see `kv_scales`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from jaxpaged.arrays.kv_pages import KVGroup
from jaxpaged.runtime.teacher_forcing import TeacherForced

# The largest key or value seen is stored as this: half of what float8_e4m3fn holds, since others
# may be larger and a float's precision does not suffer.
LARGEST_STORED = float(jnp.finfo(jnp.float8_e4m3fn).max) / 2
NOTHING = 1e-6  # in place of a head whose keys or values are all 0


def calibrate(forced: TeacherForced, texts: Iterable[list[int]]) -> dict[str, np.ndarray]:
    """Scales, by name, for the keys and values of some texts.

    Args:
        forced: its pages are of a dtype that holds what it computes.
        texts: token ids, each at most as many as `forced` takes.
    """
    model = forced.model
    spec, layers = model.spec, range(len(model.spec.layers))
    kv = replace(model.kv, groups=(KVGroup(tuple(layers), None),))  # each layer its own array
    forced = replace(forced, model=model.clone(kv=kv))
    largest_L2K = np.full((len(layers), 2, spec.num_kv_heads), NOTHING, np.float32)
    for text in texts:
        _, pages = forced.run(text)
        # Page 0 holds padding.
        seen = [jnp.abs(x.values_P2KSH[1:].astype(jnp.float32)).max(axis=(0, 3, 4)) for x in pages]
        largest_L2K = np.maximum(largest_L2K, np.stack(seen))
    return {
        f"model.layers.{layer}.self_attn.{side}_scale": largest_L2K[layer, i] / LARGEST_STORED
        for layer in layers
        for i, side in enumerate("kv")
    }
