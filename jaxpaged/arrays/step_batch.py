"""What one forward step computes: a pytree of int32 arrays in the shapes of one bucket."""

from __future__ import annotations

import jax
from flax import struct

from pallas_kernels.peer_sum import Peers


@struct.dataclass
class StepBatch:
    """Flat tokens of many sequences; every array is int32.

    Sequences with one new token (decodes) come first, longer ones (prefill chunks) after, and
    padding last: padded tokens have `seq_T` = B - 1 and lie at or after `query_start_B1[B]`,
    padded sequences have `kv_len_B` = 0. Padding writes to page 0, the null page.
    """

    token_T: jax.Array  # a token id, or -1 - slot: the token sampled last in that slot
    position_T: jax.Array  # absolute position in the sequence
    seq_T: jax.Array  # row of B that owns the token
    query_start_B1: jax.Array  # [B + 1] first token of each sequence, then the tokens in use
    kv_len_B: jax.Array  # length of the sequence after this step's tokens; 0 = padding
    num_decodes: jax.Array  # [] leading sequences that have exactly one token
    num_seqs: jax.Array  # [] sequences in use
    page_tables: tuple[jax.Array, ...]  # one [B, M] a KV group; 0 where there is no page
    row_R: jax.Array  # token of each sampled row, an index into T
    # [N, 2] where devices that store into each other's memory do so (pallas_kernels/peer_sum.py)
    peer_addresses_N2: jax.Array | None = None
    decode_only: bool = struct.field(pytree_node=False, default=False)  # T == B, one token each

    def peers(self, box: int) -> Peers | None:
        """For a sum over devices that takes this box; None: they do not reach each other."""
        return None if self.peer_addresses_N2 is None else Peers(self.peer_addresses_N2, box)
