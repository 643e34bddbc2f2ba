import dataclasses

import jax.numpy as jnp
import pytest

from jaxpaged.arrays.kv_pages import KVGroup, KVPagesSpec, group_layers


def spec(windows: tuple[int | None, ...]) -> KVPagesSpec:
    return KVPagesSpec(
        group_layers(windows), num_pages=5, page_size=16, num_kv_heads=2, head_dim=8,
        dtype=jnp.dtype("bfloat16"),
    )  # fmt: skip


def test_equal_layers_are_one_group() -> None:
    assert group_layers((None,) * 4) == (KVGroup((0, 1, 2, 3), None),)


def test_the_rarest_kind_gives_the_size() -> None:
    windows = (8, 8, None, 8, 8, None)
    assert group_layers(windows) == (
        KVGroup((2, 5), None),
        KVGroup((0, 3), 8),
        KVGroup((1, 4), 8),
    )


def test_halves_of_the_layers_need_half_of_the_arrays() -> None:
    kv = spec(((8,) * 5 + (None,)) * 4)  # 4 full layers, 20 with a window: groups of 4
    first, second = kv.part(range(12)), kv.part(range(12, 24))
    assert (kv.num_arrays, first.num_arrays, second.num_arrays) == (4, 2, 2)
    assert len(first.groups) == len(second.groups) == len(kv.groups) == 6
    for layer in range(24):
        part = first if layer < 12 else second
        assert part.place(layer)[0] == kv.place(layer)[0]


@pytest.mark.parametrize("windows", [(None,), (8, 8, 8, None), (8,) * 5 + (None,) * 2])
def test_every_layer_has_a_place_of_its_own(windows: tuple[int | None, ...]) -> None:
    kv = spec(windows)
    places = [kv.place(layer) for layer in range(len(windows))]
    assert len(set(places)) == len(windows)
    for (group, array), window in zip(places, windows, strict=True):
        assert kv.groups[group].window == window
        assert 0 <= array < kv.num_arrays
    with pytest.raises(ValueError, match="no KV group"):
        kv.place(len(windows))


def test_a_page_costs_what_its_arrays_hold() -> None:
    kv = spec((8, 8, None, 8, 8, None))
    arrays = kv.zeros()
    assert [array.shape for array in arrays] == [(5, 2, 2, 16, 8)] * 2
    assert kv.page_bytes * kv.num_pages == sum(array.nbytes for array in arrays)


def test_devices_that_share_the_heads_share_the_cost() -> None:
    kv = spec((None,))
    assert dataclasses.replace(kv, num_devices=2).page_bytes * 2 == kv.page_bytes
