from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import pytest

from jaxpaged.config import GIB, EngineConfig
from jaxpaged.models import ModelSpec, load_spec
from jaxpaged.models.decoder import Decoder
from jaxpaged.models.spec import LayerQuantization
from jaxpaged.planning.footprint import Layout, memory
from jaxpaged.planning.hardware import GPUS
from jaxpaged.planning.predict import Smallest, fit, fitting
from jaxpaged.quantization import ON_THE_FLY, FullPrecision, Quantized, Scheme, WeightOnly
from jaxpaged.quantization.fp8 import Fp8
from jaxpaged.runtime.memory import page_budget, resident_bytes
from jaxpaged.runtime.offload import offload
from jaxpaged.runtime.plan import EnginePlan
from jaxpaged.runtime.weights import abstract_leaves
from tests.engine.harness import GEMMA, LLAMA

CONFIG = EngineConfig(max_model_len=2048)
H200 = GPUS["H200"]


def partly_quantized() -> ModelSpec:
    """Of three layers the first alone, and of that not all."""
    spec = load_spec(LLAMA | {"num_hidden_layers": 3})
    how = LayerQuantization(
        o=ON_THE_FLY["fp8_per_channel"], gate_up=Quantized(WeightOnly("int8"), FullPrecision())
    )
    first = dataclasses.replace(spec.layers[0], quantization=how)
    return dataclasses.replace(spec, layers=(first, *spec.layers[1:]))


@pytest.mark.parametrize(
    "spec",
    [load_spec(LLAMA), load_spec(GEMMA | {"tie_word_embeddings": True}), partly_quantized()],
    ids=["Llama", "Gemma", "partly quantized"],
)
def test_weights_are_those_that_an_engine_loads(spec: ModelSpec) -> None:
    layout = Layout.of(spec, EngineConfig(), 1, 1)
    decoder = Decoder(spec, layout.plan(EngineConfig()).kv, jnp.dtype(jnp.float32))
    resident = resident_bytes(abstract_leaves(decoder))
    assert layout.weight_bytes == [pytest.approx(resident, rel=0.03)]
    assert layout.weight_bytes[0] <= resident  # that rounds up


def test_offloaded_weights_are_those_of_an_engine() -> None:
    spec = load_spec(LLAMA | {"num_hidden_layers": 6, "max_position_embeddings": 2048})
    (whole,) = memory(H200, CONFIG, *laid_out(spec, CONFIG))
    matrices = laid_out(spec, CONFIG)[0].layer_weights[0].matrices
    config = dataclasses.replace(CONFIG, cpu_offload_gb=2.5 * matrices / GIB)
    layout, plan = laid_out(spec, config)
    (taken,) = memory(H200, config, layout, plan)
    assert taken.weights == whole.weights - 3 * matrices
    assert taken.temporaries == whole.temporaries + 2 * matrices
    decoder = offload(Decoder(spec, plan.kv, layout.dtype), config.cpu_offload_gb)
    assert layout.offloaded[0].layers == decoder.host_layers == (1, 3, 5)
    assert taken.weights == pytest.approx(resident_bytes(abstract_leaves(decoder)), rel=0.05)


def laid_out(spec: ModelSpec, config: EngineConfig) -> tuple[Layout, EnginePlan]:
    layout = Layout.of(spec, config, 1, 1)
    return layout, layout.plan(config)


def test_a_part_of_the_model_lies_on_each_gpu(layouts: dict[tuple[int, int], Layout]) -> None:
    (whole,) = layouts[1, 1].weight_bytes
    assert whole == pytest.approx(7.616e9 * 2, rel=0.001)  # the model's card: 7.61 G parameters
    for (tp, pp), layout in layouts.items():
        assert len(layout.weight_bytes) == len(layout.stages) == pp
        assert sum(layout.stages) == 28
        assert sum(layout.weight_bytes) == pytest.approx(whole / tp, rel=0.001)


def test_each_stage_has_its_own_layers() -> None:
    plain = load_spec(LLAMA | {"num_hidden_layers": 4})
    how = LayerQuantization(gate_up=ON_THE_FLY["int4_per_group_weight_only"])
    mixed, small = (
        dataclasses.replace(
            plain,
            layers=tuple(
                dataclasses.replace(layer, quantization=how) if at in chosen else layer
                for at, layer in enumerate(plain.layers)
            ),
        )
        for chosen in (range(2), range(4))
    )
    first, last = (Layout.of(mixed, CONFIG, 1, 2).weight_bytes[at] for at in range(2))
    assert first == Layout.of(small, CONFIG, 1, 2).weight_bytes[0]
    assert last == Layout.of(plain, CONFIG, 1, 2).weight_bytes[1]


def test_a_page_is_split_with_the_heads_and_the_layers(
    layouts: dict[tuple[int, int], Layout],
) -> None:
    (page,) = pages(layouts[1, 1])
    assert page == 28 * 16 * 2 * 4 * 128 * 2
    for (tp, _), layout in layouts.items():
        assert pages(layout) == [page * layers / 28 / tp for layers in layout.stages]


def pages(layout: Layout) -> list[int]:
    """Bytes of a page on a GPU of each stage."""
    plan = layout.plan(CONFIG)
    return [plan.kv.part(layers).page_bytes for layers in plan.stages]


def test_the_scarcest_stage_decides(layouts: dict[tuple[int, int], Layout]) -> None:
    layout, config = layouts[1, 2], dataclasses.replace(CONFIG, max_num_seqs=4096)
    taken, plan, _ = fit(H200, config, layout)
    stages = memory(H200, config, layout, layout.plan(config))
    assert taken.left == min(stage.left for stage in stages)
    fitting_pages = [stage.left // size for stage, size in zip(stages, pages(layout), strict=True)]
    assert plan.kv.num_pages == min(fitting_pages)


def test_the_sum_is_the_engines(layouts: dict[tuple[int, int], Layout]) -> None:
    layout = layouts[1, 1]
    (taken,) = memory(H200, CONFIG, layout, layout.plan(CONFIG))
    assert taken.left == page_budget(
        kv_cache_memory_bytes=None,
        gpu_memory_utilization=CONFIG.gpu_memory_utilization,
        stats={"bytes_limit": taken.limit, "bytes_in_use": 0},
        resident_bytes=taken.weights + taken.state,
        step_temporary_bytes=taken.temporaries,
        step_input_bytes=0,
    )
    # What XLA says of the largest steps, compiled for this card: 1058 and 1189 MiB.
    assert taken.temporaries == pytest.approx(1189 * 2**20, rel=0.01)


@pytest.mark.parametrize(
    ("scheme", "widened"),
    [
        (Fp8(), False),
        (WeightOnly("int8"), False),
        (WeightOnly("float8_e4m3fn"), False),
        (WeightOnly("int8", group=128), True),
        (WeightOnly("float8_e4m3fn", group=128), True),
        (WeightOnly("int4"), True),
        (WeightOnly("int4", group=128, has_zero=True), True),
    ],
)
def test_one_product_is_widened_at_a_time(
    spec_7b: ModelSpec, scheme: Scheme, widened: bool
) -> None:
    plain = dataclasses.replace(spec_7b, vocab=8192)  # logits that are smaller than these
    stored = plain.quantized_like(Quantized(scheme, FullPrecision()))
    largest = 2 * 2 * 18_944 * 3584  # bytes of gates and ups in bfloat16
    for tokens, tp in ((65, 1), (2048, 1), (2048, 2)):
        before = 2 * tokens * (2 * 18_944 // tp + 3 * 3584)  # of the activation
        expected = before + largest // tp if widened else temporaries(plain, tokens, tp)
        assert temporaries(stored, tokens, tp) == expected
    # Kernels of few rows widen as they multiply, and what many set aside is more than a product.
    for tokens in (64, 16_384):
        assert temporaries(stored, tokens) == temporaries(plain, tokens)


def test_a_head_is_widened_where_it_is_stored_so(spec_7b: ModelSpec) -> None:
    logits, table = 4 * (16 + 256) * 152_064, 2 * 3584 * 152_064  # bytes, in float32 and bfloat16
    assert temporaries(spec_7b, 64) == 4 * logits
    for scheme, expected in (
        (WeightOnly("int4", group=128), logits + table),
        (WeightOnly("int8"), 4 * logits),
    ):
        headed = dataclasses.replace(spec_7b, head=Quantized(scheme, FullPrecision()))
        assert temporaries(headed, 64) == expected


def temporaries(spec: ModelSpec, tokens: int, tp: int = 1) -> int:
    """Bytes that the largest of steps of so many tokens set aside."""
    config = dataclasses.replace(CONFIG, max_num_seqs=16, max_num_batched_tokens=tokens)
    layout = Layout.of(spec, config, tp, 1)
    (taken,) = memory(H200, config, layout, layout.plan(config))
    return taken.temporaries


def test_a_model_that_is_too_large(large_config: dict[str, Any]) -> None:
    spec = load_spec(large_config)
    taken, _, problem = fit(H200, CONFIG, Layout.of(spec, CONFIG, 1, 1))
    assert taken.left < 0 and problem is not None
    assert next(fitting(H200, CONFIG, spec)) == Smallest(tp=2, pp=1)
    assert next(fitting(GPUS["L40S"], CONFIG, spec)) == Smallest(tp=4, pp=1)
    offloading = dataclasses.replace(CONFIG, cpu_offload_gb=40)  # less is there on four cards
    assert next(fitting(H200, offloading, spec)) == Smallest(tp=1, pp=1)
    assert next(fitting(GPUS["L40S"], offloading, spec)) == Smallest(tp=2, pp=1)


def test_stages_where_heads_do_not_divide(large_config: dict[str, Any]) -> None:
    odd = load_spec(large_config | {"num_attention_heads": 63, "num_key_value_heads": 9})
    assert next(fitting(H200, CONFIG, odd)) == Smallest(tp=1, pp=2)


def test_a_length_that_is_too_long(spec_7b: ModelSpec) -> None:
    config = EngineConfig(num_gpu_blocks_override=100)
    taken, _, problem = fit(H200, config, Layout.of(spec_7b, config, 1, 1))
    assert taken.left > 0 and problem is not None and "maximum model length" in problem


def test_more_stages_than_layers() -> None:
    with pytest.raises(ValueError, match="3 is more than this model's 2 layers"):
        Layout.of(load_spec(LLAMA), CONFIG, 1, 3)
