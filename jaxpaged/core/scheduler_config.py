"""Limits of the scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from jaxpaged.core.buckets import MAX_PROMPT_LOGPROB_ROWS
from jaxpaged.core.page_allocator import peak_pages


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits of the scheduler.

    Raises:
        ValueError: under these limits a single long request could never run.
    """

    page_size: int
    num_pages: int  # page 0, the null page, included
    windows: tuple[int | None, ...]  # one a KV group; None: all tokens are attended to
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    long_prefill_token_threshold: int = 0  # most tokens of one sequence a step; 0: no limit
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    policy: str = "fcfs"  # or "priority"
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    num_stages: int = 1  # of the pipeline that computes a step: so many steps overlap
    max_prompt_logprob_rows: int = MAX_PROMPT_LOGPROB_ROWS  # in one step, over all sequences

    def __post_init__(self) -> None:
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                "without chunked prefill max_num_batched_tokens must be at least max_model_len "
                f"({self.max_model_len}), got {self.max_num_batched_tokens}"
            )
        needed = sum(
            peak_pages(self.max_model_len, self.max_chunk, window, self.page_size)
            for window in self.windows
        )
        if needed > self.num_pages - 1:
            raise ValueError(
                f"a sequence of max_model_len {self.max_model_len} needs {needed} pages, "
                f"the pool has {self.num_pages - 1}"
            )

    @property
    def max_chunk(self) -> int:
        """Most tokens of one sequence in a step."""
        chunk = min(self.max_num_batched_tokens, self.max_model_len)
        if self.enable_chunked_prefill and self.long_prefill_token_threshold:
            chunk = min(chunk, self.long_prefill_token_threshold)
        return chunk
