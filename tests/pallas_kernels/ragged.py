"""Random ragged batches over a shuffled page pool, shared by the attention tests."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Ragged:
    """A step's attention inputs; sequences are (queries, total length), decodes first."""

    q_TNH: np.ndarray
    pages_P2KSH: np.ndarray
    page_table_BM: np.ndarray
    query_start_B1: np.ndarray
    kv_len_B: np.ndarray
    num_decodes: int
    num_seqs: int

    @property
    def layout(self) -> dict[str, jnp.ndarray]:
        return {
            "query_start_B1": jnp.asarray(self.query_start_B1),
            "kv_len_B": jnp.asarray(self.kv_len_B),
        }

    @property
    def counts(self) -> dict[str, jnp.ndarray]:
        return {"num_decodes": jnp.int32(self.num_decodes), "num_seqs": jnp.int32(self.num_seqs)}


def ragged_batch(
    sequences: list[tuple[int, int]],
    *,
    T: int,
    B: int,
    N: int = 4,
    K: int = 2,
    H: int = 16,
    S: int = 16,
    M: int = 24,
    dtype: str = "float32",
    seed: int = 0,
) -> Ragged:
    """Pages of a sequence are scattered over the pool; what no query may see is NaN."""
    rng = np.random.default_rng(seed)
    P = 1 + sum(-(-length // S) for _, length in sequences) + 3
    pages = rng.normal(size=(P, 2, K, S, H)).astype(np.float32)
    table = np.zeros((B, M), np.int32)
    free = list(rng.permutation(np.arange(1, P)))
    pages[0] = np.nan
    for b, (_, length) in enumerate(sequences):
        used = -(-length // S)
        table[b, :used] = [free.pop() for _ in range(used)]
        if length % S:
            pages[table[b, used - 1], :, :, length % S :] = np.nan
    queries = [count for count, _ in sequences]
    starts = np.full(B + 1, sum(queries), np.int32)
    starts[: len(queries)] = np.cumsum([0, *queries[:-1]])
    kv_len = np.zeros(B, np.int32)
    kv_len[: len(sequences)] = [length for _, length in sequences]
    return Ragged(
        jnp.asarray(rng.normal(size=(T, N, H)), dtype),
        jnp.asarray(pages, dtype),
        jnp.asarray(table),
        starts,
        kv_len,
        num_decodes=sum(count == 1 for count in queries),
        num_seqs=len(sequences),
    )
