from __future__ import annotations

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from paged_runner import make_decoder
from tiny_models import CONFIGS

from jaxpaged.models.decoder import abstract_params
from jaxpaged.parallel.mesh import make_mesh, model_mesh, stage_devices
from jaxpaged.parallel.sharding import kv_pages_sharding, param_shardings, replicated

# Sharding rules need the mesh's shape, not its devices.
TWO = AbstractMesh((1, 2), ("data", "model"))


def test_axes_are_left_to_xla() -> None:
    mesh = make_mesh()
    assert dict(mesh.shape) == {"data": 1, "model": 1}
    assert set(mesh.axis_types) == {AxisType.Auto}


def test_too_few_devices_are_counted() -> None:
    with pytest.raises(ValueError, match="2 x 64 devices are needed, 1 are present"):
        make_mesh(data=2, model=64, devices=jax.devices()[:1])


def test_one_device_has_no_mesh_and_too_many_are_refused() -> None:
    assert model_mesh(jax.devices()[:1]) is None
    with pytest.raises(ValueError, match=r"--tensor-parallel-size 64 needs 64 .* shows 1 \(cpu\)"):
        stage_devices(64, 1)
    flags = "--tensor-parallel-size 2 with --pipeline-parallel-size 4 needs 8 devices"
    with pytest.raises(ValueError, match=flags):
        stage_devices(2, 4)


def test_what_is_split_and_what_is_whole() -> None:
    boxed = abstract_params(make_decoder({**CONFIGS["qwen3"], "vocab_size": 96}))
    specs = jax.tree.map(lambda sharding: tuple(sharding.spec), param_shardings(boxed, TWO))
    layer = specs["layers_0"]
    assert layer["attention"]["qkv"]["kernel"] == (None, "model", None, None)
    assert layer["attention"]["o"]["kernel"] == ("model", None, None, None)
    assert layer["mlp"]["gate_up"]["kernel"] == (None, None, "model")
    assert layer["mlp"]["down"]["kernel"] == ("model", None)
    assert specs["embed"]["table"] == ("model", None)
    assert layer["attention_norm"]["scale"] == (None,)
    assert kv_pages_sharding(TWO).spec == PartitionSpec(None, None, "model", None, None)
    assert replicated(TWO).spec == PartitionSpec()


def test_axis_that_does_not_divide_is_named() -> None:
    boxed = abstract_params(make_decoder(CONFIGS["qwen3"]))
    with pytest.raises(ValueError, match=r"vocab \(97\) of .*table.* does not divide by 2"):
        param_shardings(boxed, TWO)
