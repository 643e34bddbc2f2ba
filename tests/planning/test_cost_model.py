from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.config import GIB, EngineConfig
from jaxpaged.core.buckets import Buckets
from jaxpaged.core.scheduler_output import ScheduledSequence
from jaxpaged.models.spec import PRODUCTS, LayerQuantization
from jaxpaged.planning.cost_model import CostModel, Work, pairs, seen, work_of
from jaxpaged.planning.footprint import Layout
from jaxpaged.planning.hardware import GPUS, Calibration
from jaxpaged.quantization import ON_THE_FLY

H200 = GPUS["H200"]
BUCKETS = Buckets(256, 8192, "gpu")


def work(tokens: int = 8, seqs: int = 8, keys: int = 8192, chunk_pairs: int = 0) -> Work:
    return Work(tokens, seqs, seqs, {None: keys}, {None: chunk_pairs})


works = st.builds(
    work,
    st.integers(1, 8192),
    st.integers(1, 256),
    st.integers(1, 1 << 20),
    st.integers(0, 1 << 25),
)


def parts(cost: CostModel, step: Work) -> dict[str, float]:
    """Of all stages together."""
    stages = cost.seconds(step)
    return {kind: sum(stage[kind] for stage in stages) for kind in stages[0]}


def total(cost: CostModel, step: Work) -> float:
    found = parts(cost, step)
    assert all(seconds >= 0 for seconds in found.values())
    return sum(found.values())


def quantized(layout: Layout, head: str | None = None, every: int = 1, **products: str) -> Layout:
    """Of every `every`-th layer, products stored in schemes of these names."""
    how = LayerQuantization(**{product: ON_THE_FLY[name] for product, name in products.items()})
    layers = tuple(
        dataclasses.replace(layer, quantization=LayerQuantization() if at % every else how)
        for at, layer in enumerate(layout.spec.layers)
    )
    spec = dataclasses.replace(layout.spec, layers=layers, head=head and ON_THE_FLY[head])
    return Layout.of(spec, EngineConfig(), layout.tp, layout.pp)


@settings(max_examples=60, deadline=None)
@given(
    works,
    st.sampled_from(["bandwidth", "flops_16", "link"]),
    st.floats(1.0, 8.0),
    st.sampled_from([(1, 1), (2, 1), (4, 1), (1, 2), (2, 4)]),
)
def test_a_better_card_is_never_slower(
    layouts: dict[tuple[int, int], Layout],
    h200: Calibration,
    step: Work,
    figure: str,
    factor: float,
    shape: tuple[int, int],
) -> None:
    better = dataclasses.replace(H200, **{figure: factor * getattr(H200, figure)})
    now, then = (CostModel(gpu, h200, layouts[shape], 2) for gpu in (H200, better))
    assert total(then, step) <= total(now, step) * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(works, st.sampled_from(["num_tokens", "num_rows", "keys", "chunk_pairs"]))
def test_more_work_is_never_faster(cost: CostModel, step: Work, field: str) -> None:
    old = getattr(step, field)
    new = {None: 2 * old[None] + 1} if isinstance(old, dict) else old + 1
    assert total(cost, dataclasses.replace(step, **{field: new})) >= total(cost, step)


def test_what_bounds_a_step(cost: CostModel) -> None:
    def bound(step: Work) -> str:
        found = parts(cost, step)
        return max(found, key=lambda kind: found[kind])

    assert bound(work(8, 1, 1024)) == "weights"
    assert bound(work(256, 256, 256 * 8192)) == "KV"
    assert bound(work(8192, 16, 8192, 16 * 512 * 513 // 2)) == "FLOPs"


def test_bytes_and_operations_that_overlap_wholly_take_the_longer(
    layouts: dict[tuple[int, int], Layout], h200: Calibration
) -> None:
    each = [dataclasses.replace(h200, overlap=p) for p in (1.0, 100.0)]
    for step in (work(), work(8192, 0, 8192)):
        apart, together = (parts(CostModel(H200, of, layouts[1, 1], 2), step) for of in each)
        longer = max(apart["weights"], apart["FLOPs"])
        assert together["weights"] + together["FLOPs"] == pytest.approx(longer)


def test_rows_in_8_bit_floats_compute_in_half_the_time(
    layouts: dict[tuple[int, int], Layout], h200: Calibration
) -> None:
    layout, step = layouts[1, 1], work(8192, 0, 8192)
    fp8 = quantized(layout, **dict.fromkeys(PRODUCTS, "fp8_per_channel"))
    wide, narrow = (parts(CostModel(H200, h200, of, 2), step)["FLOPs"] for of in (layout, fp8))
    assert narrow == pytest.approx(wide / 2, rel=0.05)


def test_each_product_computes_at_its_own_rate(
    layouts: dict[tuple[int, int], Layout], h200: Calibration
) -> None:
    layout, fp8 = layouts[1, 1], "fp8_per_channel"
    figures = {"gemm_share": 0.75, "widened_share": 0.25, "overlap": 100.0}
    calibration = dataclasses.replace(h200, **figures)

    def seconds(tokens: int, **products: str) -> dict[str, float]:
        cost = CostModel(H200, calibration, quantized(layout, **products), 2)
        return parts(cost, work(tokens, 0, 8192))

    def flops(tokens: int = 8192, **products: str) -> float:
        return seconds(tokens, **products)["FLOPs"]

    plain, whole = flops(), flops(**dict.fromkeys(PRODUCTS, fp8))
    s = layout.spec
    share = s.num_heads * s.head_dim / ((2 * s.num_heads + 8) * s.head_dim + 3 * s.ffn)
    assert plain - flops(o=fp8) == pytest.approx(share * (plain - whole))
    # The kernels take up to 512 rows. For more, 4 bits are widened in memory before: 4.25 bits a
    # weight are read, and 16 written.
    weights = 28 * s.width * s.num_heads * s.head_dim
    for name, moved in (
        ("int8_per_channel_weight_only", 0),
        ("int4_per_group_weight_only", weights * (0.5 + 4 / 128 + 2)),
    ):
        assert flops(512, o=name) == pytest.approx((1 + 2 * share) * flops(512))
        assert flops(513, o=name) == pytest.approx(flops(513))
        widening = moved / (H200.bandwidth * calibration.weight_share)
        assert seconds(513, o=name)["weights"] == pytest.approx(widening, rel=1e-3, abs=1e-9)


def test_weights_are_read_at_the_share_of_how_they_are_stored(
    layouts: dict[tuple[int, int], Layout], h200: Calibration
) -> None:
    # Of few rows, and bytes and operations overlap wholly: nothing but bytes counts.
    figures = {"weight_share": 0.8, "int8_share": 0.4, "int4_share": 0.2, "overlap": 100.0}
    calibration = dataclasses.replace(h200, **figures)
    s = layouts[1, 1].spec
    heads, rest = s.num_heads * s.head_dim, 2 * s.num_kv_heads * s.head_dim  # rows of q; of k, v
    small = 2 * (heads + rest + 2 * s.width)  # bytes of biases and norms
    head = s.width * s.vocab
    int4 = s.width * heads / 2 + 4 * s.width * heads // 128  # a scale for 128 terms
    int8, fp8 = s.width * s.ffn + 4 * s.width, 2 * s.width * s.ffn + 4 * 2 * s.ffn
    unquantized = 2 * s.width * (heads + rest + heads + 3 * s.ffn) + small
    qkv = 2 * s.width * (heads + rest) + small
    mixed = (qkv + fp8) / 0.8 + int8 / 0.4 + int4 / 0.2
    schemes = {
        "o": "int4_per_group_weight_only",
        "gate_up": "fp8_per_channel",
        "down": "int8_per_channel_weight_only",
    }
    for every, of_head, layers in (
        (1, None, 28 * mixed + 2 * head / 0.8),
        (4, "int8_per_channel_weight_only",
         7 * mixed + 21 * unquantized / 0.8 + (head + 4 * s.vocab) / 0.4),
    ):  # fmt: skip
        layout = quantized(layouts[1, 1], of_head, every, **schemes)
        found = parts(CostModel(H200, calibration, layout, 2), work(1, 1, 1))["weights"]
        assert found == pytest.approx(layers / H200.bandwidth, rel=1e-4)


def test_products_that_round_their_rows_launch_more(
    layouts: dict[tuple[int, int], Layout], h200: Calibration
) -> None:
    def launches(layout: Layout) -> float:
        calibration = dataclasses.replace(h200, rounding_us=5.0)
        return 1e6 * parts(CostModel(H200, calibration, layout, 2), work())["launches"]

    layout, fp8, int8 = layouts[1, 1], "fp8_per_channel", "int8_per_channel_weight_only"
    plain = launches(layout)
    for products, head, every, count in (
        (PRODUCTS, None, 1, 4 * 28),
        (("o", "down"), fp8, 4, 2 * 7 + 1),
        ((), fp8, 1, 1),
    ):
        rounding = quantized(layout, head, every, **dict.fromkeys(products, fp8))
        assert launches(rounding) - plain == pytest.approx(5.0 * count)
    assert launches(quantized(layout, **dict.fromkeys(PRODUCTS, int8))) == pytest.approx(plain)


def test_a_head_in_8_bit_floats_computes_in_half_the_time(
    layouts: dict[tuple[int, int], Layout], h200: Calibration
) -> None:
    layout = layouts[1, 1]
    step = Work(8192, 8192, 8192, {None: 0}, {None: 0})
    plain, headed, halved = (
        parts(CostModel(H200, h200, dataclasses.replace(layout, spec=spec), 2), step)["FLOPs"]
        for spec in (
            layout.spec,
            dataclasses.replace(layout.spec, head=ON_THE_FLY["fp8_per_channel"]),
            dataclasses.replace(layout.spec, vocab=layout.spec.vocab // 2),
        )
    )
    assert headed == pytest.approx(halved, rel=0.01) and headed < 0.97 * plain


def test_splitting_pays_for_itself_and_costs_exchanges(
    layouts: dict[tuple[int, int], Layout], h200: Calibration
) -> None:
    step = work(256, 256, 256 * 1024)
    one, two = (parts(CostModel(H200, h200, layouts[shape], 2), step) for shape in ((1, 1), (2, 1)))
    assert two["KV"] == pytest.approx(one["KV"] / 2)
    assert one["collectives"] == 0 < two["collectives"]
    assert one["weights"] / 2 < two["weights"] + two["FLOPs"] < one["weights"] + one["FLOPs"]


def test_stages_share_the_layers_and_the_last_has_the_head(
    layouts: dict[tuple[int, int], Layout], h200: Calibration
) -> None:
    step = work(64, 64, 64 * 1024)
    (whole,) = CostModel(H200, h200, layouts[1, 1], 2).seconds(step)
    first, last = CostModel(H200, h200, layouts[1, 2], 2).seconds(step)
    for kind in ("KV", "weights", "launches", "activations"):
        assert first[kind] + last[kind] == pytest.approx(whole[kind])
    assert first["KV"] > last["KV"]  # the last has fewer layers, since it has the head
    assert first["weights"] == pytest.approx(last["weights"], rel=0.1)
    assert first["collectives"] > last["collectives"] == 0


def test_a_step_takes_as_long_as_its_copies(
    layouts: dict[tuple[int, int], Layout], h200: Calibration
) -> None:
    here, there = (
        CostModel(H200, h200, dataclasses.replace(layouts[1, 2], cpu_offload_gb=gib), 2)
        for gib in (0.0, 2.0)
    )
    for step in (work(), work(8192, 16, 8192, 16 * 512 * 513 // 2)):
        for alone, copying in zip(here.seconds(step), there.seconds(step), strict=True):
            copies = copying.pop("copies")
            assert copying == alone
            least = 2 * GIB / 55e9  # seconds; of a layer more than that at most
            assert max(sum(alone.values()), least) <= sum(alone.values()) + copies
            assert copies == 0 or sum(alone.values()) + copies < 1.3 * least


@given(st.integers(0, 60), st.integers(1, 40), st.none() | st.integers(1, 50))
def test_pairs_and_keys_are_counted(start: int, count: int, window: int | None) -> None:
    most = 1 << 30 if window is None else window
    visible = [range(max(0, p + 1 - most), p + 1) for p in range(start, start + count)]
    assert pairs(start, count, window) == sum(map(len, visible))
    assert seen(start + count, window, count) == len(set().union(*visible))


def test_work_is_padded_as_the_engine_pads_it() -> None:
    def item(start: int, count: int, samples: bool = True) -> ScheduledSequence:
        return ScheduledSequence(None, start, count, 0, samples, 0, 0)  # type: ignore[arg-type]

    decodes = [item(99, 1), item(9, 1), item(0, 1)]
    step = work_of(decodes, 3, BUCKETS, (None, 16))
    assert (step.num_tokens, step.num_rows, step.num_seqs) == (8, 8, 3)
    assert step.keys == {None: 100 + 10 + 1, 16: 16 + 10 + 1}
    assert step.chunk_pairs == {None: 0, 16: 0}

    mixed = work_of([*decodes, item(0, 20, samples=False)], 23, BUCKETS, (None,))
    assert (mixed.num_tokens, mixed.num_rows) == (32, 8)
    assert mixed.keys == {None: 111 + 20} and mixed.chunk_pairs == {None: 210}
    assert work_of([item(0, 20, samples=False)], 20, BUCKETS, (None,)).num_rows == 0
