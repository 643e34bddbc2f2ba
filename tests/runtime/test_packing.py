import jax.numpy as jnp
import numpy as np

from jaxpaged.runtime.packing import Packing

PACKING = Packing((("count", (), "int32"), ("p_R", (3,), "float32"), ("seed_R2", (2, 2), "uint32")))


def test_views_write_into_one_buffer_and_come_back_on_the_device() -> None:
    buffer = np.zeros(PACKING.size + 2, np.int32)
    views = PACKING.views(buffer)
    views["count"][...] = -7
    views["p_R"][:] = [0.5, -1.25, 3e-20]
    views["seed_R2"][:] = [[0xFFFFFFFF, 1], [2, 0x80000000]]
    assert PACKING.size == 8 and not buffer[8:].any()

    arrays = PACKING.unpack(jnp.asarray(np.roll(buffer, 2)), 2)
    assert arrays["count"] == -7
    assert {name: array.dtype.name for name, array in arrays.items()} == {
        "count": "int32", "p_R": "float32", "seed_R2": "uint32",
    }  # fmt: skip
    np.testing.assert_array_equal(arrays["p_R"], views["p_R"])
    np.testing.assert_array_equal(arrays["seed_R2"], views["seed_R2"])
