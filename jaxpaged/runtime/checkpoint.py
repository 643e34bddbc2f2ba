"""Turns a Hugging Face checkpoint into an Orbax one, which restores straight to its sharding."""

from __future__ import annotations

import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from jaxpaged.arrays.kv_pages import KVPagesSpec, group_layers
from jaxpaged.model_files import ModelFilesError, read_config
from jaxpaged.models import load_spec
from jaxpaged.models.decoder import Decoder
from jaxpaged.parallel.mesh import make_mesh
from jaxpaged.runtime.kv_scales import write_scales
from jaxpaged.runtime.safetensor_files import INDEX_FILE
from jaxpaged.runtime.weights import (
    ORBAX_FOLDER,
    SCALES_FILE,
    find_format,
    load_params,
    stored_scales,
)

COMPANIONS = ("*.json", "tokenizer*", "*.jinja")  # config, generation config, tokenizer, template


def convert(model_dir: Path, out_dir: Path, *, progress: bool = True) -> None:
    """Write `model_dir`'s weights to `out_dir` as an Orbax checkpoint, in the checkpoint's dtype,
    and copy config and tokenizer files beside it: a model folder like any other. Scales of keys
    and values, which only some pages want, go into a file of their own.

    Raises:
        ModelFilesError: `model_dir` is no complete model folder, or `out_dir` holds weights.
        UnsupportedModelError: no family runs this model.
    """
    target = out_dir.resolve() / ORBAX_FOLDER
    if target.exists():
        raise ModelFilesError(f"{target} exists already")
    spec = load_spec(read_config(model_dir))
    dtype = jnp.dtype(spec.dtype)
    windows = tuple(layer.window for layer in spec.layers)
    kv = KVPagesSpec(group_layers(windows), 1, 1, spec.num_kv_heads, spec.head_dim, dtype)
    host = make_mesh(devices=jax.local_devices(backend="cpu"))
    params = load_params(model_dir, Decoder(spec, kv, dtype, mesh=host), progress=progress)
    scales = stored_scales(model_dir, find_format(model_dir))
    out_dir.mkdir(parents=True, exist_ok=True)
    if scales:
        write_scales(out_dir / SCALES_FILE, scales)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(target, params)
    for pattern in COMPANIONS:
        for file in model_dir.glob(pattern):
            if file.name != INDEX_FILE:
                shutil.copyfile(file, out_dir / file.name)
