"""The two jitted functions of a step, and the state that they hand on.

`forward(weights, state) -> state` computes a bucket of tokens; `sample` turns the hidden
rows that it left behind into tokens, which stay on the device as the next step's input. The
state is donated, so pages, tables and tokens are updated in place. What the host says of a step
goes up in one transfer and is copied into the state: a GPU replays a step as one recorded graph,
and would have to record it again if any of its arrays lay elsewhere than the last time.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxpaged.arrays.kv_pages import KVPages
from jaxpaged.arrays.step_batch import StepBatch
from jaxpaged.core.buckets import Bucket, Buckets
from jaxpaged.models.decoder import Decoder, Params
from jaxpaged.runtime import sampler
from jaxpaged.runtime.packing import Packing
from jaxpaged.runtime.pooling import pool_means

NO_ENTRY = int(np.iinfo(np.int32).max)  # in place of a page-table index: beyond every table
# From a decode step to the next: what grows by one a sequence, and what says that no page is new.
GROWING = ("position_T", "kv_len_B")
NO_NEWS = {"table_index_X": NO_ENTRY, "table_page_X": 0}


class EngineState(struct.PyTreeNode):
    """Everything that outlives a step on the device, one donated pytree."""

    kv_pages: tuple[KVPages, ...]
    page_tables: jax.Array  # i32[groups, max_num_seqs + 1, M] by slot; the last slot is padding's
    last_token: jax.Array  # i32[max_num_seqs + 1] the token sampled last in each slot
    # [R, D] rows of the last forward, after the final norm; in a stage that is not the last [T, D],
    # all its tokens
    hidden_RD: jax.Array
    position_R: jax.Array  # i32 position of the token that such a row leads to
    input_X: jax.Array  # i32 what the host says of the step: see `StepShapes.forward_offset`
    # Only where embeddings are means: sums by slot, and the mean that belongs to each hidden row.
    pool_sum_SD: jax.Array | None = None  # f32[max_num_seqs + 1, D]
    pooled_RD: jax.Array | None = None  # f32[R, D]
    x_TD: jax.Array | None = None  # [T, D] from the stage before; None: this is the first
    peer_addresses_N2: jax.Array | None = None  # see StepBatch


@dataclass(frozen=True)
class StepShapes:
    """What the shapes of a step depend on besides its bucket."""

    num_groups: int
    max_num_seqs: int
    pages_per_seq: int  # M
    page_size: int  # S
    max_rows: int  # R
    vocab: int  # V

    @property
    def null_slot(self) -> int:
        return self.max_num_seqs

    def table_index(self, group: int, slot: int, column: int) -> int:
        """Where an entry lies in the flattened page tables."""
        return (group * (self.max_num_seqs + 1) + slot) * self.pages_per_seq + column

    def rows(self, bucket: Bucket) -> int:
        """Rows that a forward step of this bucket may leave for sampling."""
        return min(bucket.num_tokens, self.max_rows)

    def max_table_updates(self, bucket: Bucket) -> int:
        """New page-table entries that travel with a step; more go up beforehand."""
        per_group = bucket.num_seqs
        if not bucket.decode_only:
            per_group += bucket.num_seqs + bucket.num_tokens // self.page_size
        return self.num_groups * per_group

    def forward_packing(self, bucket: Bucket) -> Packing:
        tokens, seqs = (bucket.num_tokens,), (bucket.num_seqs,)
        updates = (self.max_table_updates(bucket),)
        return Packing(
            (
                ("token_T", tokens, "int32"),
                ("position_T", tokens, "int32"),
                ("seq_T", tokens, "int32"),
                ("query_start_B1", (bucket.num_seqs + 1,), "int32"),
                ("kv_len_B", seqs, "int32"),
                ("slot_B", seqs, "int32"),
                ("num_decodes", (), "int32"),
                ("num_seqs", (), "int32"),
                ("row_R", (self.rows(bucket),), "int32"),
                ("table_index_X", updates, "int32"),
                ("table_page_X", updates, "int32"),
            )
        )

    @property
    def forward_offset(self) -> int:
        """Where the words of `forward` start in the state's input; those of `sample` precede."""
        rows = {"logprobs": self.max_rows}
        return max(
            self.sample_packing(rows.get(variant, self.max_num_seqs), variant).size
            for variant in sampler.VARIANTS
            if rides_along(variant)
        )

    def input_sizes(self, buckets: Buckets) -> tuple[int, ...]:
        """Words that may go up with a step: few sizes, each the end of some steps' inputs."""
        small = max(self.forward_packing(b).size for b in buckets.forward if b.decode_only)
        large = max(self.forward_packing(b).size for b in buckets.forward)
        return tuple(self.forward_offset + size for size in sorted({small, large}))

    def next_input(self, bucket: Bucket, input_X: jax.Array) -> jax.Array:
        """Input of the step after a decode step if all goes on as it is: the same sequences, each
        a token further, and no page new. The device makes it for itself.
        """
        start, packing = self.forward_offset, self.forward_packing(bucket)
        words = input_X[start : start + packing.size]
        at = jnp.arange(packing.size)
        num_seqs = words[packing.bounds("num_seqs")[0]]
        for name in GROWING:
            first, _ = packing.bounds(name)
            words += ((at >= first) & (at < first + num_seqs)).astype(jnp.int32)
        for name, nothing in NO_NEWS.items():
            first, end = packing.bounds(name)
            words = jnp.where((at >= first) & (at < end), nothing, words)
        return jax.lax.dynamic_update_slice(input_X, words, (start,))

    @staticmethod
    def count_on(views: dict[str, np.ndarray]) -> None:
        """The same in place on the host, which so knows what the device has."""
        num_seqs = int(views["num_seqs"])
        for name in GROWING:
            views[name][:num_seqs] += 1
        for name, nothing in NO_NEWS.items():
            views[name][:] = nothing

    def sample_packing(self, num_rows: int, variant: str) -> Packing:
        rows = (num_rows,)
        return Packing(
            tuple(
                (name, rows + tail, dtype)
                for name, tail, dtype in sampler.input_fields(variant, self.vocab)
            )
        )


def rides_along(variant: str) -> bool:
    """Whether the settings of `sample` go up with those of `forward`.

    The full variant's do not: they hold masks, which are large and may be known only later.
    """
    return variant != "full"


def update_page_tables(page_tables: jax.Array, index_X: jax.Array, page_X: jax.Array) -> jax.Array:
    """Write entries of the flattened tables; an index beyond the end is padding."""
    flat = page_tables.reshape(-1).at[index_X].set(page_X, mode="drop")
    return flat.reshape(page_tables.shape)


def forward(
    model: Decoder,
    shapes: StepShapes,
    bucket: Bucket,
    structure: jax.tree_util.PyTreeDef,
    weights: tuple[jax.Array, ...],
    state: EngineState,
) -> EngineState:
    """Compute one bucket of tokens: write their pages, leave the sampled rows in `hidden_RD`.

    Args:
        structure: of the parameters, whose leaves are `weights`. Given as a tree, hundreds of names
            would be sorted at every call, which takes the host as long as the rest of the call.
    """
    arrays = shapes.forward_packing(bucket).unpack(state.input_X, shapes.forward_offset)
    slot_B = arrays.pop("slot_B")
    page_tables = update_page_tables(
        state.page_tables, arrays.pop("table_index_X"), arrays.pop("table_page_X")
    )
    batch = StepBatch(
        page_tables=tuple(page_tables[g, slot_B] for g in range(shapes.num_groups)),
        decode_only=bucket.decode_only,
        peer_addresses_N2=state.peer_addresses_N2,
        **arrays,
    )
    x_TD = None if state.x_TD is None else state.x_TD[: bucket.num_tokens]
    params = jax.tree.unflatten(structure, weights)
    inputs = {"params": params}, batch, state.last_token, state.kv_pages, x_TD
    if state.pool_sum_SD is None or state.pooled_RD is None:
        hidden_RD, kv_pages = model.apply(*inputs, method="forward")
    else:
        hidden_TD, kv_pages = model.apply(*inputs, method="forward_all")
        hidden_RD = hidden_TD[batch.row_R]
        sum_SD, mean_RD = pool_means(hidden_TD, batch, slot_B, state.pool_sum_SD)
        state = state.replace(
            pool_sum_SD=sum_SD,
            pooled_RD=jax.lax.dynamic_update_slice(state.pooled_RD, mean_RD, (0, 0)),
        )
    return state.replace(
        kv_pages=kv_pages,
        page_tables=page_tables,
        hidden_RD=jax.lax.dynamic_update_slice(state.hidden_RD, hidden_RD, (0, 0)),
        position_R=jax.lax.dynamic_update_slice(
            state.position_R, batch.position_T[batch.row_R] + 1, (0,)
        ),
        input_X=shapes.next_input(bucket, state.input_X) if bucket.decode_only else state.input_X,
    )


def sample(
    model: Decoder,
    shapes: StepShapes,
    num_rows: int,
    variant: str,
    max_logprobs: int,
    head_params: Params,
    hidden_RD: jax.Array,
    position_R: jax.Array,
    last_token: jax.Array,
    penalties: sampler.PenaltyState | None,
    input_X: jax.Array,
) -> tuple[sampler.SampleOutput, jax.Array, sampler.PenaltyState | None]:
    """Tokens (and log-probabilities) of the first `num_rows` hidden rows; updates `last_token`.

    `input_X` is the state's, or an array of its own where the settings do not ride along.
    """
    settings = shapes.sample_packing(num_rows, variant).unpack(input_X)
    batch = sampler.SamplingBatch.from_arrays({"position_R": position_R[:num_rows], **settings})
    logits_RV = model.apply({"params": head_params}, hidden_RD[:num_rows], method="logits")
    out, penalties = sampler.sample(
        logits_RV,
        batch,
        variant,
        penalties,
        max_logprobs=max_logprobs,
        mesh=model.mesh,
    )
    # Rows that sample nothing carry the null slot.
    return out, last_token.at[batch.slot_R].set(out.token_R), penalties


def take(place: jax.Array, front: jax.Array) -> jax.Array:
    """Copy what the host or another stage sent to where the step reads it."""
    return jax.lax.dynamic_update_slice(place, front, (0,) * place.ndim)


def zero_state(
    model: Decoder,
    shapes: StepShapes,
    buckets: Buckets,
    kv_pages: tuple[KVPages, ...],
    *,
    with_means: bool = False,
) -> EngineState:
    """The state of a stage that has computed nothing; `with_means`: its embeddings are means."""
    width, dtype = model.spec.width, model.dtype
    sums = (shapes.max_num_seqs + 1, width)
    all_tokens = max(bucket.num_tokens for bucket in buckets.forward)
    hidden_rows = shapes.max_rows if model.is_last else all_tokens
    with_means = with_means and model.is_last
    return EngineState(
        kv_pages=kv_pages,
        page_tables=jnp.zeros(
            (shapes.num_groups, shapes.max_num_seqs + 1, shapes.pages_per_seq), jnp.int32
        ),
        last_token=jnp.zeros((shapes.max_num_seqs + 1,), jnp.int32),
        hidden_RD=jnp.zeros((hidden_rows, width), dtype),
        position_R=jnp.zeros((shapes.max_rows,), jnp.int32),
        input_X=jnp.zeros((shapes.input_sizes(buckets)[-1],), jnp.int32),
        pool_sum_SD=jnp.zeros(sums, jnp.float32) if with_means else None,
        pooled_RD=jnp.zeros((shapes.max_rows, width), jnp.float32) if with_means else None,
        x_TD=None if model.is_first else jnp.zeros((all_tokens, width), dtype),
        peer_addresses_N2=(
            jnp.zeros((model.mesh.size, 2), jnp.int32)
            if model.mesh is not None and model.stores_to_peers
            else None
        ),
    )
