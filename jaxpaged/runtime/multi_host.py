"""An engine over several hosts: joining them, and what all but the first do."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import jax

from jaxpaged import model_files
from jaxpaged.config import EngineConfig
from jaxpaged.gguf.header import SUFFIX
from jaxpaged.parallel.hosts import Group, OnLoss, join
from jaxpaged.parallel.meeting import Place
from jaxpaged.runtime.command_stream import received
from jaxpaged.runtime.executable_store import code_version
from jaxpaged.runtime.kv_scales import read_scales
from jaxpaged.runtime.programs import all_keys
from jaxpaged.runtime.startup import start_runner

# Settings that each host may have its own way. Of files, what they hold is compared instead.
OWN = {
    *("host_id", "distributed_timeout", "model", "revision", "download_dir", "compile_cache_dir"),
    *("tokenizer", "skip_tokenizer_init", "generation_config", "kv_cache_scales"),
    "engine_timeout",
}


def join_hosts(config: EngineConfig, on_loss: OnLoss, parent: int | None = None) -> Group | None:
    """Wait for the other hosts that `config` speaks of; None: there are none.

    Args:
        on_loss: see `parallel.hosts.join`.
        parent: the process that this one ends with.

    Raises:
        ValueError, OSError: they do not come, or were started otherwise; one line.
    """
    if config.num_hosts == 1:
        return None
    assert config.distributed_coordinator is not None
    place = Place(config.distributed_coordinator, config.num_hosts, config.host_id, parent)
    return join(place, started_with(config), timeout=config.distributed_timeout, on_loss=on_loss)


def started_with(config: EngineConfig) -> dict[str, str]:
    """What hosts must have in common to compile the same programs for the same weights."""
    folder = model_files.resolve_model(config.model, config.revision, config.download_dir)
    settings = {
        f"--{field.name.replace('_', '-')}": str(getattr(config, field.name))
        for field in dataclasses.fields(config)
        if field.name not in OWN
    }
    return {
        "its version of JAX": jax.__version__,
        "its code of jaxpaged": _short(code_version()),
        "its files of the model": _short(_files(folder)),
        "its scales of keys and values": _short(_scales(config.kv_cache_scales)),
        **settings,
    }


def follow(config: EngineConfig, on_loss: OnLoss, parent: int | None = None) -> None:
    """Do what host 0 does, until it ends.

    Args:
        on_loss, parent: see `join_hosts`.

    Raises:
        ValueError, OSError: as `join_hosts` and `start_runner`; one line.
    """
    group = join_hosts(config, on_loss, parent)
    assert group is not None and not group.leads
    runner = start_runner(config, serving=True, group=group).runner
    (stage,), plan = runner.stages, runner.plan  # a pipeline has no followers
    keys = all_keys(stage.model, plan.buckets, plan.shapes.input_sizes(plan.buckets))
    for key, words in received(group.commands[0], keys):
        stage.execute(key, words)
    group.leave()


def _files(folder: Path) -> str:
    """Settings of the model and the sizes of what may hold weights: no host reads all of them."""
    sizes = sorted(
        (str(path.relative_to(folder)), path.stat().st_size)
        for path in folder.rglob("*")
        if path.suffix in (".safetensors", SUFFIX)
    )
    return f"{model_files.read_config(folder)} {sizes}"


def _scales(path: str | None) -> str:
    scales = {} if path is None else read_scales(Path(path))
    return str([(name, scales[name].tolist()) for name in sorted(scales)])


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
