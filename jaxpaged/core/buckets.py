"""The closed set of shapes for which a step is compiled."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

MAX_FORWARD_BUCKETS = 24
MAX_PROMPT_LOGPROB_ROWS = 256  # rows of one step that score prompt tokens
SMALLEST_MIXED = 32
STEADY = 64  # from so many rows on, XLA adds up those of a CPU's step in one order
THREE_QUARTERS_ABOVE = 64  # on a GPU decode sizes get a step between powers of two from here on


@dataclass(frozen=True)
class Bucket:
    """Padded sizes of a forward step."""

    num_tokens: int  # T
    num_seqs: int  # B
    decode_only: bool  # every sequence has one token, T == B

    def __str__(self) -> str:
        return f"{'decode' if self.decode_only else 'mixed'} {self.num_tokens}x{self.num_seqs}"


def _sizes(
    smallest: int, largest: int, factor: int = 2, three_quarters: bool = False
) -> tuple[int, ...]:
    """`smallest` times powers of `factor`, and `largest`."""
    sizes, size = [], min(smallest, largest)
    while size < largest:
        sizes.append(size)
        if three_quarters and size >= THREE_QUARTERS_ABOVE and size * 3 // 2 < largest:
            sizes.append(size * 3 // 2)
        size *= factor
    return (*sizes, largest)


class Buckets:
    """Shapes of `forward` and row counts of `sample` for an engine's limits.

    Attributes:
        forward: shapes of a forward step.
        rows: rows that `sample` draws tokens for.
        scoring_rows: rows of its variants that report log-probabilities, of the prompt as well.

    Args:
        platform: as JAX names it; a CPU gains from tiny buckets, a GPU does not.
        steady: a CPU's sums come out alike in steps of all sizes, which costs time in small ones:
            for models that round activations or pages, where the last bit decides which way.
    """

    def __init__(
        self, max_num_seqs: int, max_num_batched_tokens: int, platform: str, steady: bool = False
    ) -> None:
        on_cpu = platform == "cpu"
        most_decodes, most_tokens = (
            min(max_num_seqs, max_num_batched_tokens),
            max_num_batched_tokens,
        )
        least_decodes, least_tokens = 1 if on_cpu else 8, SMALLEST_MIXED
        if on_cpu and steady:
            least_decodes = least_tokens = STEADY
            most_decodes, most_tokens = max(most_decodes, STEADY), max(most_tokens, STEADY)
        decode_sizes = _sizes(least_decodes, most_decodes, three_quarters=not on_cpu)
        mixed_sizes = _sizes(least_tokens, most_tokens)
        excess = len(decode_sizes) + len(mixed_sizes) - MAX_FORWARD_BUCKETS
        mixed_sizes = mixed_sizes[max(0, excess) :]
        self._decode = tuple(Bucket(size, size, True) for size in decode_sizes)
        self._mixed = tuple(Bucket(size, min(size, max_num_seqs), False) for size in mixed_sizes)
        self.forward = self._decode + self._mixed
        # Sampling costs little beside a step, and every size is compiled for several variants.
        self.rows = _sizes(1 if on_cpu else 8, max_num_seqs, factor=4)
        self.scoring_rows = (*_sizes(8, max_num_seqs, 8), max_num_seqs + MAX_PROMPT_LOGPROB_ROWS)

    def fit(self, num_tokens: int, num_seqs: int, decode_only: bool) -> Bucket:
        """The smallest bucket with room for a step.

        Raises:
            ValueError: the step is larger than the limits that the buckets were made for.
        """
        for bucket in self._decode if decode_only else self._mixed:
            if num_tokens <= bucket.num_tokens and num_seqs <= bucket.num_seqs:
                return bucket
        raise ValueError(f"no bucket for {num_tokens} tokens of {num_seqs} sequences")

    def fit_rows(self, num_rows: int, scoring: bool) -> int:
        """The smallest row count of `sample` that is at least `num_rows`.

        Args:
            scoring: for a variant that reports log-probabilities.

        Raises:
            ValueError: no step samples so many rows.
        """
        sizes = self.scoring_rows if scoring else self.rows
        at = bisect_left(sizes, num_rows)
        if at == len(sizes):
            raise ValueError(f"no row bucket for {num_rows} rows")
        return sizes[at]
