"""The Hopper kernel: what it refuses, that it compiles for an H200, and its results.

Those come from an H200 where there is one, and from the dialect's interpreter on CPUs. That one has
no products of registers with shared memory, no states of accumulators and no two views of one
memory, hence the stand-ins here: what is tested on CPUs is which pages are read, the masks, the
barriers and the arithmetic, not how queries and outputs travel.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from deviceless import check_mosaic, needs_compiler
from jax.experimental import pallas as pl
from ragged_attention import attention_by_definition, ragged_batch

from pallas_kernels import paged_attention_prefill_mosaic as module
from pallas_kernels.paged_attention_prefill_mosaic import (
    TuningConfig,
    paged_attention_prefill_mosaic,
    tuning_config,
)

MIXED = [(1, 5), (1, 100), (7, 7), (20, 90), (65, 300)]
SHAPES: tuple[dict[str, Any], ...] = (
    {"N": 32, "K": 8, "H": 128, "S": 16},
    {"N": 28, "K": 4, "H": 128, "S": 64},
    {"N": 16, "K": 1, "H": 128, "S": 32, "window": 20},
    {"N": 8, "K": 2, "H": 128, "S": 32, "window": 200, "softcap": 3.0},
    {"N": 14, "K": 2, "H": 64, "S": 32, "dtype": "float16"},
    {"N": 2, "K": 2, "H": 64, "S": 16},
    {"N": 4, "K": 1, "H": 256, "S": 16},
)


def is_hopper() -> bool:
    device = jax.devices()[0]
    return device.platform == "gpu" and device.compute_capability == "9.0"


@pytest.mark.parametrize(
    ("dtype", "H", "S", "message"),
    [
        ("float32", 128, 16, "bfloat16"),
        ("bfloat16", 80, 16, "head dim"),
        ("bfloat16", 128, 128, "page size"),
    ],
)
def test_refusals(dtype: str, H: int, S: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        paged_attention_prefill_mosaic(
            jnp.zeros((8, 4, H), dtype),
            jnp.zeros((4, 2, 2, S, H), dtype),
            jnp.zeros((1, 2), jnp.int32),
            query_start_B1=jnp.array([0, 8]),
            kv_len_B=jnp.array([8]),
            num_decodes=jnp.int32(0),
            num_seqs=jnp.int32(1),
            scale=1.0,
        )


def test_dtypes_must_agree() -> None:
    with pytest.raises(ValueError, match="both"):
        paged_attention_prefill_mosaic(
            jnp.zeros((8, 4, 64), jnp.bfloat16),
            jnp.zeros((4, 2, 2, 16, 64), jnp.float16),
            jnp.zeros((1, 2), jnp.int32),
            query_start_B1=jnp.array([0, 8]),
            kv_len_B=jnp.array([8]),
            num_decodes=jnp.int32(0),
            num_seqs=jnp.int32(1),
            scale=1.0,
        )


@pytest.mark.parametrize(("setting", "field"), [((96, 2), "block_keys"), ((64, 1), "num_stages")])
def test_settings_are_validated(setting: tuple[int, int], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        TuningConfig(*setting)


def test_rings_fit_in_shared_memory() -> None:
    for H in (64, 128, 256):
        config = tuning_config(H=H)
        rings = 2 * config.num_stages * config.block_keys * H * 2
        assert rings + 2 * 64 * H * 2 < 227 << 10


@needs_compiler
def test_compiles_with_products_that_overlap() -> None:
    check_mosaic("prefill", count=7)


class Accumulator:
    """A tensor core's accumulator that starts from an array."""

    def __init__(self, start: jax.Array) -> None:
        self.start = start
        self.ref: Any = None

    def __getitem__(self, _: Any) -> jax.Array:
        return self.start + self.ref[...]


def run_state(body: Any) -> Any:
    def run(accumulator: Accumulator) -> jax.Array:
        def scoped(ref: Any) -> jax.Array:
            accumulator.ref = ref
            body(accumulator)
            return accumulator[...]

        return pl.run_scoped(scoped, plgpu.ACC(accumulator.start.shape, jnp.float32))

    return run


def load_queries(scratch: Any, q_TGH: Any, first: Any, warpgroup: Any) -> None:
    rows, chunks = scratch.rows
    tokens, G, L = chunks[0][0].shape
    for t in range(tokens):
        for c in range(len(chunks[0])):
            token = jnp.minimum(first + t, q_TGH.shape[0] - 1)
            rows[warpgroup, c, pl.ds(t * G, G)] = q_TGH[token, :, pl.ds(c * L, L)]


def store_rows(
    scratch: Any, out_TGH: Any, first: Any, count: Any, _: Any, out_RH: jax.Array
) -> None:
    tokens, G, _ = scratch.rows[1][0][0].shape
    for t in range(tokens):

        @pl.when(t < count)
        def _(t: int = t) -> None:
            out_TGH[first + t] = out_RH[t * G : (t + 1) * G]


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    if jax.__version_info__ < (0, 11):
        pytest.skip("the interpreter of older versions lacks layouts")
    interpreter = pytest.importorskip("jax._src.pallas.mosaic_gpu.interpret.shared_memory")
    kernel, wgmma = plgpu.kernel, plgpu.wgmma

    def multiply(acc: Any, a: Any, b: Any) -> None:
        if isinstance(a, jax.Array):
            acc.start += jnp.dot(a, b[...], preferred_element_type=jnp.float32)
        else:
            wgmma(acc, a, b)

    def forget(barrier: Any) -> None:  # that some of its phases went by unseen
        with barrier.cv:
            barrier.ref_count -= 1

    interpret = plgpu.InterpretGPUParams(uninitialized_memory="zero")
    monkeypatch.setattr(plgpu, "kernel", partial(kernel, interpret=interpret))
    monkeypatch.setattr(plgpu, "wgmma", multiply)
    monkeypatch.setattr(plgpu.ACC, "init", staticmethod(Accumulator))
    monkeypatch.setattr(pl, "run_state", run_state)
    monkeypatch.setattr(interpreter.Barrier, "deallocate", forget)
    monkeypatch.setattr(module, "_load_queries", load_queries)
    monkeypatch.setattr(module, "_store_rows", store_rows)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("block_keys", "sequences", "shape", "options"),
    [
        (64, MIXED[:4], {"N": 14, "K": 2, "H": 64, "S": 32, "M": 6}, {}),
        # The last page, half full, is also the first one of the last tile's window.
        (128, MIXED[:4], {"N": 7, "K": 1, "H": 128, "S": 32, "M": 6}, {"window": 20}),
        # Some rows see nothing of the first block.
        (64, [(30, 300)], {"N": 2, "K": 1, "H": 64, "S": 16}, {"window": 100}),
        (128, MIXED[:4], {"N": 4, "K": 1, "H": 128, "S": 64}, {"window": 60, "softcap": 3.0}),
    ],
    ids=str,
)
def test_results_interpreted(
    block_keys: int,
    sequences: list[tuple[int, int]],
    shape: dict[str, int],
    options: dict[str, Any],
) -> None:
    r = ragged_batch(sequences, T=33, B=5, dtype="bfloat16", **shape)
    config = TuningConfig(block_keys, 2)
    out = paged_attention_prefill_mosaic(**vars(r), scale=0.125, config=config, **options)
    want = attention_by_definition(r, scale=0.125, **options)
    want[: int(r.num_decodes)] = 0
    np.testing.assert_allclose(np.asarray(out, np.float32), want, atol=2e-2)


@pytest.mark.skipif(not is_hopper(), reason="needs a Hopper GPU")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("sequences", "T"), [(MIXED, 120), ([(3, 40)], 4), ([(64, 64), (128, 256)], 200), ([], 8)]
)
def test_results(shape: dict[str, Any], sequences: list[tuple[int, int]], T: int) -> None:
    options = {name: shape[name] for name in ("window", "softcap") if name in shape}
    sizes = {name: value for name, value in shape.items() if name not in options}
    r = ragged_batch(sequences, T=T, B=7, M=512 // shape["S"], **{"dtype": "bfloat16", **sizes})
    run = partial(paged_attention_prefill_mosaic, scale=shape["H"] ** -0.5, **options)
    got = np.asarray(jax.jit(run)(**vars(r)), np.float32)
    want = attention_by_definition(r, scale=shape["H"] ** -0.5, **options)
    want[: int(r.num_decodes)] = 0
    np.testing.assert_allclose(got, want, atol=2e-2)
