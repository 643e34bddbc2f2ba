"""Layers whose matrices stay in host memory: which, and that they get there."""

from __future__ import annotations

import dataclasses
import logging
import re
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny_models
from flax.traverse_util import flatten_dict
from paged_runner import make_decoder

from jaxpaged.config import GIB
from jaxpaged.models.decoder import Decoder
from jaxpaged.models.prefetch import is_matrix
from jaxpaged.parallel.sharding import HOST
from jaxpaged.runtime.checkpoint import convert
from jaxpaged.runtime.memory import resident_bytes, shard_bytes
from jaxpaged.runtime.offload import choose, offload, spaced
from jaxpaged.runtime.weights import abstract_leaves, load_params

SMALL = tiny_models.CONFIGS["qwen3"]  # two layers
CONFIG = SMALL | {"num_hidden_layers": 6}


def matrices(model: Decoder) -> int:
    """Bytes of one layer's."""
    leaves = abstract_leaves(model)
    return sum(
        shard_bytes(leaf)
        for name, leaf in leaves.items()
        if name.startswith("layers_0/") and is_matrix(name)
    )


def test_layers_are_evenly_spread_and_the_last_is_among_them() -> None:
    assert spaced(range(28), 4) == (6, 13, 20, 27)
    assert spaced(range(10, 15), 3) == (11, 13, 14)  # of a stage
    assert spaced(range(3), 3) == (0, 1, 2)


@pytest.mark.parametrize("part", [None, range(2, 6)])
def test_as_few_layers_as_hold_what_was_asked_for(
    part: range | None, caplog: pytest.LogCaptureFixture
) -> None:
    whole = make_decoder(CONFIG).clone(part=part)
    layer = matrices(make_decoder(CONFIG))
    with caplog.at_level(logging.INFO):
        model = offload(whole, 2.5 * layer / GIB)
    assert model.host_layers == ((1, 3, 5) if part is None else (3, 4, 5))
    steps = 55e9 / (3 * layer)
    assert f"3 of {len(whole.own_layers)} layers" in caplog.text
    assert f"about {steps:.3g} steps/s at 55 GB/s" in caplog.text

    leaves = abstract_leaves(model)
    hosted = {name for name, leaf in leaves.items() if leaf.sharding.memory_kind == HOST}
    assert len(hosted) == 3 * 4
    assert all(int(name[len("layers_")]) in model.host_layers for name in hosted)
    saved = resident_bytes(abstract_leaves(whole)) - resident_bytes(leaves)
    assert saved == 3 * layer


def test_too_much_and_too_little_are_refused() -> None:
    model = make_decoder(CONFIG)
    layer = matrices(model) / GIB
    with pytest.raises(ValueError, match="at most [0-9].* GiB") as error:
        offload(model, 6.5 * layer)
    most = float(str(error.value).split("at most ")[1].split()[0])
    assert 5.9 * layer < most <= 6 * layer
    offload(model, most)
    assert offload(model, 6 * layer).host_layers == tuple(range(6))


@pytest.mark.parametrize("layers", [0.5, 1, 1.5, 2])
def test_the_least_useful_value_is_told(layers: float) -> None:
    sizes = dict.fromkeys(range(28), 466_092_032)  # bytes: the 7B model's
    gib = layers * sizes[0] / GIB
    told = r"would save nothing, ([\d.]+) and more do: the matrices of 2 of 28 layers, 0\.868 GiB"
    with pytest.raises(ValueError, match=told) as error:
        choose(sizes, gib)
    found = re.search(told, str(error.value))
    assert found is not None
    useful = float(found[1])
    assert len(choose(sizes, useful).layers) == 3 and useful < 1.02 * 2 * sizes[0] / GIB


def test_two_layers_are_always_on_the_device() -> None:
    sizes = {4: GIB}  # a stage of one layer
    with pytest.raises(ValueError, match=r"no value does: the matrices of 1 of 1 layers, 1 GiB"):
        choose(sizes, 0.5)


@pytest.mark.parametrize("quantization", [None, "int4_per_group_weight_only"])
def test_weights_of_every_origin_go_to_host_memory(
    tmp_path: Path, quantization: str | None
) -> None:
    path = tiny_models.write_model(tmp_path / "model", SMALL)
    convert(path, tmp_path / "out", progress=False)
    model = make_decoder(SMALL, quantization=quantization)
    hosting = dataclasses.replace(model, host_layers=(1,))
    origins = {"safetensors": path, "dummy": path}
    if quantization is None:
        origins["orbax"] = tmp_path / "out"
    for origin, folder in origins.items():
        want, found = (
            flatten_dict(load_params(folder, each, load_format=origin, progress=False), sep="/")
            for each in (model, hosting)
        )
        kinds = {name: leaf.sharding.memory_kind for name, leaf in found.items()}
        assert sorted(kinds.values()).count(HOST) == 4
        for name, leaf in abstract_leaves(hosting).items():
            assert found[name].sharding == leaf.sharding, name
            np.testing.assert_array_equal(jax.device_get(found[name]), want[name])
