"""Embeddings of prompts out of the hidden states of a step.

The last token's hidden state is among the rows that a step leaves for sampling anyway. A mean
needs every token's: an engine that makes means keeps a sum for each slot, which grows chunk by
chunk and starts over where a sequence does.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxpaged.arrays.step_batch import StepBatch
from jaxpaged.layers.linear import matmul_precision

SMALLEST_NORM = 1e-12


def pool_means(
    hidden_TD: jax.Array, batch: StepBatch, slot_B: jax.Array, sum_SD: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Add a step's hidden states to the sums of their sequences.

    Args:
        hidden_TD: after the final norm.
        slot_B: the slots of the sequences; the last slot is padding's.
        sum_SD: float32 sums of the tokens before this step, by slot.

    Returns:
        The sums by slot, and for each of `batch.row_R` the mean [R, D] of its sequence up to and
        with this step, which is the prompt's where the row samples the first token.
    """
    at_T = jnp.arange(hidden_TD.shape[0])
    start_B, end_B = batch.query_start_B1[:-1], batch.query_start_B1[1:]
    # A product sums in one order whatever the device; adding at indices would not on a GPU.
    owner_BT = (at_T >= start_B[:, None]) & (at_T < end_B[:, None])
    fresh_BD = jax.lax.dot(
        owner_BT.astype(hidden_TD.dtype),
        hidden_TD,
        precision=matmul_precision(hidden_TD.dtype),
        preferred_element_type=jnp.float32,
    )
    begins_B = batch.position_T[jnp.minimum(start_B, at_T.size - 1)] == 0
    total_BD = jnp.where(begins_B[:, None], 0, sum_SD[slot_B]) + fresh_BD
    length_R = batch.position_T[batch.row_R] + 1
    mean_RD = total_BD[batch.seq_T[batch.row_R]] / length_R[:, None]
    return sum_SD.at[slot_B].set(total_BD), mean_RD


def embeddings(num_rows: int, pooled_RD: jax.Array) -> jax.Array:
    """The first rows in float32, each of length 1."""
    rows_RD = pooled_RD[:num_rows].astype(jnp.float32)
    norm_R1 = jnp.linalg.norm(rows_RD, axis=-1, keepdims=True)
    return rows_RD / jnp.maximum(norm_R1, SMALLEST_NORM)
