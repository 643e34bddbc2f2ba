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

PROGRAMS = {256: (0, 528), 64: (0, 264, 528), 1: (528, 1056)}


def decode_settings(heads: bench.Heads, B: int) -> list[decode.TuningConfig]:
    """What may be good for B sequences."""
    keys = (32, 64) if heads.H == 256 else (32, 64, 128)
    warps = (2, 4) if B == 1 else (2, 4, 8)
    return [decode.TuningConfig(*s) for s in product(keys, warps, (2,), PROGRAMS[B])]


def prefill_settings() -> list[prefill.TuningConfig]:
    """What may be good for head dims up to 128."""
    return [
        prefill.TuningConfig(*s)
        for s in (
            *product((128,), (64, 128), (4, 8), (2, 3)),
            *product((128,), (32, 64), (8,), (4,)),
            *product((64,), (64, 128), (4,), (2, 3)),
            *product((256,), (32, 64), (8,), (2,)),
        )
    ]


def attempt(job: Any) -> Any:
    """The job's result; None for a setting that does not fit the card."""
    try:
        return job()
    except Exception as error:
        print("no:", job.args[-1], str(error)[:100])
        return None


def main() -> None:
    """Print the best settings of each kind of work."""
    prompts = bench.Heads(32, 8, 128)
    jobs = [
        (heads, B, config)
        for heads in (bench.Heads(28, 4, 128), prompts, bench.Heads(4, 1, 256))
        for B in (256, 64, 1)
        for config in decode_settings(heads, B)
    ]
    if "--short" in sys.argv:
        jobs = [j for j in jobs if j[0].K == 4]
    executables = bench.in_parallel(
        [partial(attempt, partial(bench.compile_decode, *job)) for job in jobs]
    )
    for heads in dict.fromkeys(job[0] for job in jobs):
        pool = bench.make_pool(heads)
        for work in bench.WORK:
            times = [
                (bench.time_decode(heads, pool, work, run), config)
                for (of, B, config), run in zip(jobs, executables, strict=True)
                if of == heads and work[0] == B and run is not None
            ]
            times.sort(key=lambda t: t[0]["us"])
            print(times[0][0]["heads"], times[0][0]["work"], "floor", times[0][0]["floor_us"])
            for figures, c in times[:12]:
                print(f"   {figures['us']:8} us {figures['share_of_floor']:.3f}", c, flush=True)
        del pool
    settings = prefill_settings()
    executables = bench.in_parallel(
        [partial(attempt, partial(bench.compile_prefill, prompts, 8192, c)) for c in settings]
    )
    pool = bench.make_pool(prompts)
    for c, run in zip(settings, executables, strict=True):
        if run is not None:
            print(bench.time_prefill(prompts, pool, 8192, run), c, flush=True)
    print(bench.time_cudnn(prompts, 8192))


if __name__ == "__main__":
    main()
