"""Devices that do not reach each other's memory, and what lies ready on those that do."""

from __future__ import annotations

import jax
import numpy as np

from jaxpaged.parallel.mesh import make_mesh
from jaxpaged.parallel.peers import make_boxes, reach_each_other
from pallas_kernels.peer_sum import EMPTY


def test_a_cpu_is_no_gpu() -> None:
    assert not reach_each_other(jax.devices())


def test_boxes_are_empty_and_addresses_are_words() -> None:
    kept, where_N2 = make_boxes(make_mesh())
    assert where_N2.dtype == np.int32
    assert np.asarray(where_N2).view(np.uint64).item() == kept.unsafe_buffer_pointer()
    assert (kept == EMPTY).all()
