"""What a model takes of each GPU's memory, and how many pages are left, without loading it."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from jaxpaged.config import EngineConfig
from jaxpaged.models.decoder import Decoder, abstract_params
from jaxpaged.models.prefetch import is_matrix
from jaxpaged.models.spec import LayerQuantization, ModelSpec
from jaxpaged.models.spread import spread_spec
from jaxpaged.models.stages import stage_layers
from jaxpaged.parallel.sharding import partition
from jaxpaged.planning.hardware import GPU
from jaxpaged.quantization import Quantized, Scheme, WeightOnly
from jaxpaged.runtime.memory import margin
from jaxpaged.runtime.offload import Offloaded, choose
from jaxpaged.runtime.plan import EnginePlan, make_plan, model_dtype
from pallas_kernels import quantized_linear_mosaic as mosaic
from pallas_kernels.quantized_linear import MAX_ROWS
from pallas_kernels.wide_integers import RUN

# What XLA sets aside for the largest steps of three models of `benchmarks/models`, compiled for an
# H200 by JAX 0.11.2, is within 8 % of these multiples.
TEMPORARY_FFNS, TEMPORARY_WIDTHS = 3, 3  # of a token in `forward`, in the model's dtype
TEMPORARY_LOGITS = 4  # of a row in `sample`, in float32


@dataclass
class LayerWeights:
    """Bytes of one GPU's part of a layer."""

    stored: Counter[Scheme | None]  # by how the product is stored that they are of
    matrices: int = 0  # what may lie in host memory


@dataclass(frozen=True)
class Weights:
    """Bytes of one GPU's part of the parameters."""

    layers: Mapping[LayerQuantization, LayerWeights]  # of a layer of each kind
    embed: int
    head: int
    final_norm: int
    tied: bool  # embedding and head are one table


@dataclass(frozen=True)
class Layout:
    """How one replica of a model lies on tp x pp GPUs."""

    spec: ModelSpec  # of all stages, with what `spread_spec` adds
    dtype: jnp.dtype
    tp: int
    pp: int
    weights: Weights
    cpu_offload_gb: float = 0.0

    @classmethod
    def of(cls, stored: ModelSpec, config: EngineConfig, tp: int, pp: int) -> Layout:
        """Lay a model out.

        Raises:
            ValueError: it does not divide so.
        """
        spec = spread_spec(stored, tp)
        stage_layers(spec, pp)
        dtype = model_dtype(config, spec.dtype, "gpu")
        return cls(spec, dtype, tp, pp, _weights(spec, dtype, tp), config.cpu_offload_gb)

    @property
    def stages(self) -> list[int]:
        """Layers of each stage."""
        return [len(layers) for layers in stage_layers(self.spec, self.pp)]

    @property
    def products(self) -> dict[str, int]:
        """Weights of a GPU's part of each matrix of a layer: what a token is multiplied with."""
        s = self.spec
        outputs = {
            "qkv": (s.num_heads + 2 * s.num_kv_heads) * s.head_dim,
            "o": s.num_heads * s.head_dim,
            "gate_up": 2 * s.ffn,
            "down": s.ffn,
        }
        return {name: s.width * size // self.tp for name, size in outputs.items()}

    @property
    def head_products(self) -> int:
        """The same of the head."""
        return self.spec.width * self.spec.vocab_rows // self.tp

    @property
    def stored(self) -> Iterator[tuple[int, Scheme | None]]:
        """Weights and scheme of each product of the layers."""
        products = self.products
        for layer in self.spec.layers:
            for name, count in products.items():
                yield count, scheme_of(getattr(layer.quantization, name))

    @property
    def layer_weights(self) -> list[LayerWeights]:
        """Of each layer."""
        return [self.weights.layers[layer.quantization] for layer in self.spec.layers]

    @property
    def offloaded(self) -> list[Offloaded]:
        """Layers of each stage whose matrices lie in host memory.

        Raises:
            ValueError: see `runtime.offload.choose`.
        """
        if not self.cpu_offload_gb:
            return [Offloaded((), 0, 0)] * self.pp
        weights = self.layer_weights
        sizes = (
            {at: weights[at].matrices for at in layers}
            for layers in stage_layers(self.spec, self.pp)
        )
        return [choose(each, self.cpu_offload_gb) for each in sizes]

    @property
    def weight_bytes(self) -> list[int]:
        """Of a GPU of each stage, host memory included."""
        weights = self.layer_weights
        stages = [
            sum(weights[at].stored.total() for at in layers)
            for layers in stage_layers(self.spec, self.pp)
        ]
        stages[0] += self.weights.embed
        stages[-1] += self.weights.final_norm
        if self.pp > 1 or not self.weights.tied:
            stages[-1] += self.weights.head
        return stages

    def plan(self, config: EngineConfig) -> EnginePlan:
        """Sizes of an engine that serves, but for the number of its pages.

        Raises:
            ValueError: settings that contradict the model or each other.
        """
        config = dataclasses.replace(
            config, tensor_parallel_size=self.tp, pipeline_parallel_size=self.pp
        )
        return make_plan(config, self.spec, self.dtype, "gpu", serving=True)


@dataclass(frozen=True)
class Memory:
    """Where one GPU's memory goes, in bytes: the sum that `runtime.memory.page_budget` makes."""

    limit: int  # XLA's share of the card
    weights: int
    state: int  # beside the pages: penalty counts, page tables, hidden rows, inputs in flight
    temporaries: int  # of the largest step, with what it copies from host memory
    margin: int

    @property
    def left(self) -> int:
        """For pages; negative: so much is missing."""
        return self.limit - self.weights - self.state - self.temporaries - self.margin


def memory(gpu: GPU, config: EngineConfig, layout: Layout, plan: EnginePlan) -> list[Memory]:
    """What an engine of this plan takes on a GPU of each stage.

    Raises:
        ValueError: see `Layout.offloaded`.
    """
    spec, shapes = layout.spec, plan.shapes
    itemsize = layout.dtype.itemsize
    limit = int(gpu.memory_bytes * config.gpu_memory_utilization)
    slots = plan.max_num_seqs + 1
    state = 4 * slots * (spec.vocab_rows + shapes.num_groups * shapes.pages_per_seq)
    state += shapes.max_rows * spec.width * itemsize
    state += 2 * 4 * shapes.input_sizes(plan.buckets)[-1]
    temporaries = max(
        _forward_bytes(layout, plan.max_num_batched_tokens), _sample_bytes(layout, shapes.max_rows)
    )
    return [
        Memory(limit, size - there.size, state, temporaries + there.window, margin(limit))
        for size, there in zip(layout.weight_bytes, layout.offloaded, strict=True)
    ]


def _forward_bytes(layout: Layout, tokens: int) -> int:
    """Of what a step sets aside on a GPU. While the largest product is widened, its activation is
    yet to come: gates and ups are there, but not what becomes of them.
    """
    widths, ffn = TEMPORARY_WIDTHS * layout.spec.width, layout.spec.ffn // layout.tp
    size = tokens * (TEMPORARY_FFNS * ffn + widths)
    widened = max((count for count, scheme in layout.stored if widens(scheme)), default=0)
    if widened and tokens > MAX_ROWS:
        size = max(size, tokens * ((TEMPORARY_FFNS - 1) * ffn + widths) + widened)
    return layout.dtype.itemsize * size


def _sample_bytes(layout: Layout, rows: int) -> int:
    """Of what sampling sets aside; a head that is widened counts so for any number of rows."""
    logits, head = 4 * rows * layout.spec.vocab_rows // layout.tp, layout.spec.head
    widened = layout.head_products if head is not None and widens(head.scheme) else 0
    return max(TEMPORARY_LOGITS * logits, logits + layout.dtype.itemsize * widened)


def scheme_of(how: Quantized | None) -> Scheme | None:
    """None: as tables are."""
    return None if how is None else how.scheme


def widens(scheme: Scheme | None) -> bool:
    """Whether weights are widened in memory for more rows than kernels take, one product at a time.

    XLA multiplies with others as they are stored, or widens them on their way into the product.
    """
    return isinstance(scheme, WeightOnly) and (
        scheme.storage == "int4" or scheme.group is not None or scheme.has_zero
    )


def rows_of_kernels(scheme: WeightOnly, gpu: GPU) -> int:
    """The most rows for which a kernel widens weights on their way; see `few_rows_fit`."""
    if scheme.group is not None and scheme.group % RUN:
        return 0
    on_hopper = gpu.compute_capability == 9 and scheme.packed > 1
    return mosaic.MAX_ROWS if on_hopper else MAX_ROWS


def _weights(spec: ModelSpec, dtype: jnp.dtype, tp: int) -> Weights:
    """Sizes of the very parameters that an engine would make, of a model of one layer a kind."""
    examples = {layer.quantization: layer for layer in spec.layers}
    few = dataclasses.replace(spec, layers=tuple(examples.values()))
    plan = make_plan(EngineConfig(), few, dtype, "gpu", serving=True)
    layers = {f"layers_{at}": LayerWeights(Counter()) for at in range(len(examples))}
    sizes = Counter[str]()
    boxed = flatten_dict(abstract_params(Decoder(few, plan.kv, dtype)), sep="/")
    for name, leaf in boxed.items():
        split = any(axis is not None for axis in partition(leaf.names))
        size = math.prod(leaf.value.shape) // (tp if split else 1) * leaf.value.dtype.itemsize
        module = name.partition("/")[0]
        if module not in layers:
            sizes[module] += size
            continue
        layers[module].stored[scheme_of(few.quantized(name))] += size
        if is_matrix(name):
            layers[module].matrices += size
    return Weights(
        layers=dict(zip(examples, layers.values(), strict=True)),
        embed=sizes["embed"],
        head=sizes["lm_head"] or sizes["embed"],
        final_norm=sizes["final_norm"],
        tied=not sizes["lm_head"],
    )
