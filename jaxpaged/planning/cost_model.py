"""Seconds that a step takes on GPUs: bytes, operations, exchanges and launches.

A product reads its weights and computes at the same time: its seconds are the p-norm of both, which
is the longer of the two where they differ much and more than either where they don't. Everything
else adds up. See `hardware.Calibration` for the figures and docs/planning.md for how good they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxpaged.core.buckets import Buckets
from jaxpaged.core.scheduler_output import ScheduledSequence
from jaxpaged.planning.footprint import Layout, rows_of_kernels, scheme_of, widens
from jaxpaged.planning.hardware import GPU, Calibration
from jaxpaged.quantization import Scheme, WeightOnly
from jaxpaged.runtime.offload import PCIE_BYTES

# Elements that a token reads and writes between a layer's products: around two norms and residuals,
# around attention, and around the activation.
WIDTHS, HEADS, FFNS = 8, 3, 6

Seconds = dict[str, float]  # by what they go to; see `CostModel.seconds`


@dataclass(frozen=True)
class Product:
    """Matrices on a GPU that rows are multiplied with, stored in one way. Of a layer: at the mean
    of all layers.
    """

    scheme: Scheme | None
    weight_bytes: float
    size: float  # multiplications a row
    count: float  # of matrices


@dataclass(frozen=True)
class Work:
    """What a step asks of the GPUs. Attention's figures are those of one layer, by its window."""

    num_tokens: int  # padded
    num_rows: int  # that are sampled, padded
    num_seqs: int
    keys: Mapping[int | None, float]  # that attention reads, of all sequences
    chunk_pairs: Mapping[int | None, float]  # a query and a key that it sees, of chunks alone


def work_of(
    scheduled: Sequence[ScheduledSequence],
    num_tokens: int,
    buckets: Buckets,
    windows: Sequence[int | None],
) -> Work:
    """The work of what the scheduler chose, padded as the engine pads it.

    Args:
        windows: the kinds of layers.
    """
    lengths = [item.start + 1 for item in scheduled if item.num_tokens == 1]
    chunks = [(item.start, item.num_tokens) for item in scheduled if item.num_tokens > 1]
    rows = sum(item.samples for item in scheduled)
    return Work(
        num_tokens=buckets.fit(num_tokens, len(scheduled), decode_only=not chunks).num_tokens,
        num_rows=buckets.fit_rows(rows, scoring=False) if rows else 0,
        num_seqs=len(scheduled),
        keys={
            window: sum(seen(length, window) for length in lengths)
            + sum(seen(start + count, window, count) for start, count in chunks)
            for window in windows
        },
        chunk_pairs={
            window: sum(pairs(start, count, window) for start, count in chunks)
            for window in windows
        },
    )


def seen(length: int, window: int | None, count: int = 1) -> int:
    """Keys that the last `count` of `length` tokens see together."""
    return length if window is None else min(length, window + count - 1)


def pairs(start: int, count: int, window: int | None) -> int:
    """Pairs of a query in [start, start + count) and a key that it sees."""
    end = start + count
    most = end if window is None else min(end, window)
    growing = max(0, most - start)  # queries that see one key more than the one before
    return count * most - growing * (growing - 1) // 2


class CostModel:
    """Prices the steps of one replica.

    Args:
        layout: the model on its GPUs.
        kv_itemsize: bytes of an element of the pages.
    """

    def __init__(
        self, gpu: GPU, calibration: Calibration, layout: Layout, kv_itemsize: int
    ) -> None:
        self.windows = tuple(dict.fromkeys(layer.window for layer in layout.spec.layers))
        self._layers = Counter(layer.window for layer in layout.spec.layers)
        self._gpu, self._fitted, self._layout = gpu, calibration, layout
        self._kv_itemsize = kv_itemsize
        size, count = Counter[Scheme | None](), Counter[Scheme | None]()
        for weights, scheme in layout.stored:
            size[scheme] += weights
            count[scheme] += 1
        layers = len(layout.spec.layers)
        stored = sum((each.stored for each in layout.layer_weights), Counter[Scheme | None]())
        self._layer = [
            Product(scheme, stored[scheme] / layers, size[scheme] / layers, count[scheme] / layers)
            for scheme in stored
        ]
        head = scheme_of(layout.spec.head)
        self._head = Product(head, layout.weights.head, layout.head_products, 1)
        self._copies = [there.size / PCIE_BYTES for there in layout.offloaded]  # seconds a step

    @property
    def num_stages(self) -> int:
        return self._layout.pp

    def host_seconds(self, num_seqs: int) -> float:
        """Of the host's work for a step; the GPUs are busy with the one before meanwhile."""
        fitted, layers = self._fitted, len(self._layout.spec.layers)
        calls = fitted.dispatch_us * layers
        return 1e-6 * (fitted.host_us + fitted.host_us_per_seq * num_seqs + calls)

    def seconds(self, work: Work) -> list[Seconds]:
        """Of a step on the GPUs of each stage, by what bounds them: weights, KV, FLOPs,
        activations, launches, collectives; and copies from host memory, where they are the longer.
        """
        layout = self._layout
        stages = [
            self._stage(work, layers / len(layout.spec.layers), head=at == layout.pp - 1)
            for at, layers in enumerate(layout.stages)
        ]
        for stage in stages[:-1]:
            stage["collectives"] += self._hand_over(work.num_tokens)
        for stage, copies in zip(stages, self._copies, strict=True):
            if copies:
                stage["copies"] = max(0.0, copies - sum(stage.values()))
        return stages

    def _stage(self, work: Work, share: float, head: bool) -> Seconds:
        """Of one stage with a share of the layers."""
        layout, spec, fitted, gpu = self._layout, self._layout.spec, self._fitted, self._gpu
        itemsize, tp = layout.dtype.itemsize, layout.tp
        flops = gpu.flops(itemsize)
        num_layers = share * len(spec.layers)
        T = work.num_tokens
        products = [self._product(product, T) for product in self._layer]
        weights, operations, rounding = (
            num_layers * sum(each) for each in zip(*products, strict=True)
        )

        heads, kv_heads = spec.num_heads // tp, spec.num_kv_heads // tp
        keys = share * sum(count * work.keys[kind] for kind, count in self._layers.items())
        kv = keys * 2 * kv_heads * spec.head_dim * self._kv_itemsize
        chunks = share * sum(count * work.chunk_pairs[kind] for kind, count in self._layers.items())
        attention = 4 * heads * spec.head_dim * chunks / (flops * fitted.prefill_share)

        moved = WIDTHS * spec.width + HEADS * (heads + 2 * kv_heads) * spec.head_dim
        moved += FFNS * spec.ffn // tp
        bandwidth = gpu.bandwidth * fitted.weight_share
        activations = num_layers * T * moved * itemsize / bandwidth
        launches = 1e-6 * num_layers * (fitted.layer_us + fitted.attention_us) + rounding
        collectives = num_layers * 2 * self._all_reduce(T)
        if head:
            read, computed, rounding = self._product(self._head, work.num_rows)
            weights, operations = weights + read, operations + computed
            launches += 1e-6 * fitted.step_us + rounding
            activations += work.num_rows * 4 * spec.vocab_rows // tp * 2 / bandwidth
            collectives += self._all_reduce(T) + self._all_reduce(work.num_rows, width=2)
        return {
            "weights": weights,
            "KV": kv / (gpu.bandwidth * fitted.kv_share),
            "FLOPs": operations + attention,
            "activations": activations,
            "launches": launches,
            "collectives": collectives,
        }

    def _product(self, product: Product, rows: int) -> tuple[float, float, float]:
        """Seconds of rows times weights: those bound by reading them, those bound by computing, and
        those of kernels that round rows.
        """
        if rows == 0:
            return 0.0, 0.0, 0.0
        fitted, gpu, scheme = self._fitted, self._gpu, product.scheme
        itemsize, rounding, widening = self._layout.dtype.itemsize, 0.0, 0.0
        read_share, gemm_share, flops = fitted.weight_share, fitted.gemm_share, gpu.flops(itemsize)
        if scheme is not None and scheme.rounds_rows:
            flops, rounding = gpu.flops(1), 1e-6 * fitted.rounding_us * product.count
        elif isinstance(scheme, WeightOnly):
            # Nobody has timed 8-bit floats that are widened: the kernels are those of int8.
            read_share = fitted.int4_share if scheme.storage == "int4" else fitted.int8_share
            if rows <= rows_of_kernels(scheme, gpu):
                gemm_share = fitted.widened_share
            elif widens(scheme):  # in memory, before the product
                moved = product.weight_bytes + itemsize * product.size
                widening = moved / (gpu.bandwidth * fitted.weight_share)
        read = product.weight_bytes / (gpu.bandwidth * read_share)
        compute = 2 * rows * product.size / (flops * gemm_share)
        longer = max(read, compute)
        powers = [(seconds / longer) ** fitted.overlap for seconds in (read, compute)]
        both = longer * sum(powers) ** (1 / fitted.overlap)
        # What bounds it is the larger; a product at its ridge belongs half to either.
        share = powers[0] / sum(powers)
        return both * share + widening, both * (1 - share), rounding

    def _all_reduce(self, rows: int, width: int | None = None) -> float:
        """Of [rows, D] over the GPUs that share a layer."""
        layout = self._layout
        if layout.tp == 1 or rows == 0:
            return 0.0
        size = rows * (width or layout.spec.width) * layout.dtype.itemsize
        sent = 2 * size * (layout.tp - 1) / layout.tp  # a reduce-scatter and an all-gather
        return 1e-6 * self._fitted.all_reduce_us + sent / self._rate

    def _hand_over(self, num_tokens: int) -> float:
        """Of the hidden states from a stage to the next."""
        size = num_tokens * self._layout.spec.width * self._layout.dtype.itemsize
        return 1e-6 * self._fitted.all_reduce_us / 2 + size / self._rate

    @property
    def _rate(self) -> float:
        return self._gpu.link * self._fitted.link_share
