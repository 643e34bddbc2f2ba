"""The words that go up with a step."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.core.buckets import Buckets
from jaxpaged.runtime.step import NO_ENTRY, StepShapes

BUCKETS = Buckets(max_num_seqs=8, max_num_batched_tokens=64, platform="cpu")
SHAPES = StepShapes(
    num_groups=2, max_num_seqs=8, pages_per_seq=16, page_size=16, max_rows=32, vocab=100
)


@pytest.mark.parametrize("bucket", [b for b in BUCKETS.forward if b.decode_only], ids=str)
def test_the_input_counts_on_alike_on_host_and_device(bucket) -> None:
    draw = np.random.default_rng(0)
    num_seqs = max(1, bucket.num_seqs - 1)
    words_X = draw.integers(0, 50, SHAPES.input_sizes(BUCKETS)[-1]).astype(np.int32)
    packing = SHAPES.forward_packing(bucket)
    before = packing.views(words_X[SHAPES.forward_offset :])
    before["num_seqs"][...] = num_seqs
    next_X = np.asarray(SHAPES.next_input(bucket, jnp.asarray(words_X)))
    counted_X = words_X.copy()
    SHAPES.count_on(packing.views(counted_X[SHAPES.forward_offset :]))
    np.testing.assert_array_equal(next_X, counted_X)

    assert next_X.dtype == np.int32 and next_X.size == words_X.size
    after = packing.views(next_X[SHAPES.forward_offset :])
    live = np.arange(bucket.num_seqs) < num_seqs
    np.testing.assert_array_equal(after.pop("position_T"), before["position_T"] + live)
    np.testing.assert_array_equal(after.pop("kv_len_B"), before["kv_len_B"] + live)
    assert (after.pop("table_index_X") == NO_ENTRY).all()
    assert (after.pop("table_page_X") == 0).all()
    for name, same in after.items():
        np.testing.assert_array_equal(same, before[name], err_msg=name)
    end = SHAPES.forward_offset + packing.size
    np.testing.assert_array_equal(next_X[: SHAPES.forward_offset], words_X[: SHAPES.forward_offset])
    np.testing.assert_array_equal(next_X[end:], words_X[end:])


def test_no_input_is_longer_than_what_may_go_up_with_it() -> None:
    small, large = SHAPES.input_sizes(BUCKETS)
    for bucket in BUCKETS.forward:
        size = SHAPES.forward_offset + SHAPES.forward_packing(bucket).size
        assert size <= (small if bucket.decode_only else large)
