"""Time settings of the attention kernels on a GPU; what is best goes in their tables."""

from __future__ import annotations

import sys
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import kernels as bench
from pallas_kernels import paged_attention_decode as decode
from pallas_kernels import paged_attention_prefill as prefill

PROGRAMS = {256: (0, 528, 1056), 64: (264, 528), 8: (132, 264), 1: (132, 264)}
FORMS = (  # keys at once, warps, stages
    (32, 2, 2),
    (64, 2, 3),
    (64, 4, 5),
    (64, 4, 7),
    (64, 8, 7),
    (128, 2, 3),
    (128, 4, 5),
)


def decode_settings(B: int) -> list[decode.TuningConfig]:
    """What may be good for B sequences."""
    return [decode.TuningConfig(*form, programs) for form, programs in product(FORMS, PROGRAMS[B])]


def prefill_settings(heads: bench.Heads) -> list[prefill.TuningConfig]:
    """What may be good for prompts."""
    sizes = ((64, 32), (64, 64), (128, 32), (128, 64)) if heads.H == 256 else ((128, 64),)
    return [prefill.TuningConfig(*size, *s) for size in sizes for s in product((4, 8), (2,))]


def attempt(job: Any) -> Any:
    """The job's result; None for a setting that does not fit the card."""
    try:
        return job()
    except Exception as error:
        print("no:", job.args[-1], str(error)[:100])
        return None


def main() -> None:
    """Print the best settings of each kind of work."""
    models = (bench.Heads(28, 4, 128), bench.Heads(32, 8, 128), bench.Heads(4, 1, 256))
    jobs = [
        (heads, B, config) for heads in models for B in PROGRAMS for config in decode_settings(B)
    ]
    prompts = [(heads, 8192, config) for heads in models for config in prefill_settings(heads)]
    executables = bench.in_parallel(
        [partial(attempt, partial(bench.compile_decode, *job)) for job in jobs]
    )
    prompt_executables = bench.in_parallel(
        [
            partial(
                attempt,
                partial(
                    bench.compile_prefill,
                    heads,
                    T,
                    partial(prefill.paged_attention_prefill, config=config),
                ),
            )
            for heads, T, config in prompts
        ]
    )
    for heads in models:
        pool = bench.make_pool(heads)
        for work in bench.WORK:
            times = [
                (bench.time_decode(heads, pool, work, run), config)
                for (of, B, config), run in zip(jobs, executables, strict=True)
                if of == heads and work[0] == B and run is not None
            ]
            times.sort(key=lambda t: t[0]["us"])
            print(times[0][0]["heads"], times[0][0]["work"], "floor", times[0][0]["floor_us"])
            for figures, c in times[:7]:
                print(f"   {figures['us']:8} us {figures['share_of_floor']:.3f}", c, flush=True)
        for (of, T, config), run in zip(prompts, prompt_executables, strict=True):
            if of == heads and run is not None:
                print(bench.time_prefill(heads, pool, T, "triton", run), config, flush=True)
        del pool


if __name__ == "__main__":
    main()
