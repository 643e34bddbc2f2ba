"""The two jitted functions of a step, and the state that they hand on.

`forward(params, state, packed) -> state` computes a bucket of tokens; `sample` turns the hidden
rows that it left behind into tokens, which stay on the device as the next step's input. The
state is donated, so pages, tables and tokens are updated in place.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import struct

from jaxpaged.arrays.step_batch import StepBatch
from jaxpaged.core.buckets import Bucket
from jaxpaged.models.decoder import Decoder, Params
from jaxpaged.runtime import sampler
from jaxpaged.runtime.packing import Packing


class EngineState(struct.PyTreeNode):
    """Everything that outlives a step on the device, one donated pytree."""

    kv_pages: tuple[jax.Array, ...]  # [P, 2, K, S, H] each
    page_tables: jax.Array  # i32[groups, max_num_seqs + 1, M] by slot; the last slot is padding's
    last_token: jax.Array  # i32[max_num_seqs + 1] the token sampled last in each slot
    hidden_RD: jax.Array  # [R, D] rows of the last forward, after the final norm


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

    def sample_packing(self, num_rows: int, variant: str) -> Packing:
        rows = (num_rows,)
        return Packing(
            tuple(
                (name, rows + tail, dtype)
                for name, tail, dtype in sampler.input_fields(variant, self.vocab)
            )
        )


def update_page_tables(page_tables: jax.Array, index_X: jax.Array, page_X: jax.Array) -> jax.Array:
    """Write entries of the flattened tables; an index beyond the end is padding."""
    flat = page_tables.reshape(-1).at[index_X].set(page_X, mode="drop")
    return flat.reshape(page_tables.shape)


def forward(
    model: Decoder,
    shapes: StepShapes,
    bucket: Bucket,
    params: Params,
    state: EngineState,
    packed: jax.Array,
) -> EngineState:
    """Compute one bucket of tokens: write their pages, leave the sampled rows in `hidden_RD`."""
    arrays = shapes.forward_packing(bucket).unpack(packed)
    slot_B = arrays.pop("slot_B")
    page_tables = update_page_tables(
        state.page_tables, arrays.pop("table_index_X"), arrays.pop("table_page_X")
    )
    batch = StepBatch(
        page_tables=tuple(page_tables[g, slot_B] for g in range(shapes.num_groups)),
        decode_only=bucket.decode_only,
        **arrays,
    )
    hidden_RD, kv_pages = model.apply(
        {"params": params}, batch, state.last_token, state.kv_pages, method="forward"
    )
    return EngineState(
        kv_pages=kv_pages,
        page_tables=page_tables,
        last_token=state.last_token,
        hidden_RD=jax.lax.dynamic_update_slice(state.hidden_RD, hidden_RD, (0, 0)),
    )


def sample(
    model: Decoder,
    shapes: StepShapes,
    num_rows: int,
    variant: str,
    max_logprobs: int,
    head_params: Params,
    hidden_RD: jax.Array,
    last_token: jax.Array,
    penalties: sampler.PenaltyState | None,
    packed: jax.Array,
) -> tuple[sampler.SampleOutput, jax.Array, sampler.PenaltyState | None]:
    """Tokens (and log-probabilities) of the first `num_rows` hidden rows; updates `last_token`."""
    batch = sampler.SamplingBatch.from_arrays(
        shapes.sample_packing(num_rows, variant).unpack(packed)
    )
    logits_RV = model.apply({"params": head_params}, hidden_RD[:num_rows], method="logits")
    out, penalties = sampler.sample(logits_RV, batch, variant, penalties, max_logprobs=max_logprobs)
    # Rows that sample nothing carry the null slot.
    return out, last_token.at[batch.slot_R].set(out.token_R), penalties


def zero_state(
    shapes: StepShapes, kv_pages: tuple[jax.Array, ...], width: int, dtype: jnp.dtype
) -> EngineState:
    """The state of an engine that has computed nothing."""
    return EngineState(
        kv_pages=kv_pages,
        page_tables=jnp.zeros(
            (shapes.num_groups, shapes.max_num_seqs + 1, shapes.pages_per_seq), jnp.int32
        ),
        last_token=jnp.zeros((shapes.max_num_seqs + 1,), jnp.int32),
        hidden_RD=jnp.zeros((shapes.max_rows, width), dtype),
    )
