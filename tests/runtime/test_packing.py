import jax.numpy as jnp
import numpy as np

from jaxpaged.runtime.packing import Packing

PACKING = Packing((("count", (), "int32"), ("p_R", (3,), "float32"), ("seed_R2", (2, 2), "uint32")))


def test_views_write_into_one_buffer_and_come_back_on_the_device() -> None:
    buffer, views = PACKING.host()
    views["count"][...] = -7
    views["p_R"][:] = [0.5, -1.25, 3e-20]
    views["seed_R2"][:] = [[0xFFFFFFFF, 1], [2, 0x80000000]]
    assert buffer.dtype == np.int32 and buffer.size == PACKING.size == 8

    arrays = PACKING.unpack(jnp.asarray(buffer))
    assert arrays["count"] == -7
    assert {name: array.dtype.name for name, array in arrays.items()} == {
        "count": "int32", "p_R": "float32", "seed_R2": "uint32",
    }  # fmt: skip
    np.testing.assert_array_equal(arrays["p_R"], views["p_R"])
    np.testing.assert_array_equal(arrays["seed_R2"], views["seed_R2"])


def test_each_host_buffer_is_new() -> None:
    first, _ = PACKING.host()
    _, views = PACKING.host()
    views["count"][...] = 1
    assert not first.any()
