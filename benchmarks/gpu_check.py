"""The figures that `scripts/gpu_check.sh` measured, in one file and beside their targets.

    python -m benchmarks.gpu_check

Reads the results that the stages wrote, merges them into results/gpu_check.json and prints a table.
The targets are for one H200; vLLM's figures were measured on such a card with vLLM 0.26.0,
FlashAttention 3 and CUDA graphs, 2026-11-29.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.common import RESULTS, markdown, write_results

Results = dict[str, dict[str, Any]]
FILES = (
    "kernels",
    "sampling",
    "gpu_models",
    "decode_latency_qwen2.5-7b",
    "decode_latency_llama-3.1-8b",
    "decode_latency_qwen3-0.6b",
    "offline_throughput_qwen2.5-7b_fixed",
    "offline_throughput_qwen3-0.6b_fixed",
    "profile_step_qwen3-0.6b",
    "compare_hf_gpu_qwen2.5-7b",
    "engines_qwen2.5-7b_floats",
    "engines_qwen2.5-7b_integers",
    "engines_llama-3.1-8b_floats",
    "engines_llama-3.1-8b_integers",
    "engines_qwen2.5-72b",
    "engines_qwen2.5-32b_offload",
    "engines_qwen2.5-32b_two",
    "serving_qwen2.5-7b_dp1",
    "serving_qwen2.5-7b_dp2_two_servers",
)
HEADS = ("28/4/128", "32/8/128", "16/8/128")
ALONE, RATE = "bfloat16", "256 x 512/128, tok/s"  # of `benchmarks.engines`: an engine, a column
DECODE_SHARES = {
    "B 256, context 1024": 0.95,
    "B 64, context 4096": 0.95,
    "B 64, context 1024": 0.88,
    "ragged, B 256, context 1024": 0.93,
    "ragged, B 64, context 4096": 0.92,
    "ragged, B 64, context 1024": 0.80,
    "B 1, context 32768": 0.75,
}


@dataclass(frozen=True)
class Target:
    """One figure and what it should be."""

    what: str
    file: str
    read: Callable[[dict[str, Any]], float | None]
    bound: float
    at_least: bool = False
    vllm: str = ""


def find(rows: list[dict[str, Any]], value: str, /, **where: Any) -> float | None:
    """A field of the row in which the others are as given; None if there is none."""
    for row in rows:
        if all(row.get(key) == wanted for key, wanted in where.items()):
            return row.get(value)
    return None


def targets() -> Iterator[Target]:
    """Everything that is measured, in the order of the table."""
    for model, steps in {
        "qwen2.5-7b": {1: (4.1, "4.69"), 8: (4.4, "4.97"), 64: (5.4, "6.13"), 256: (10.6, "12.0")},
        "llama-3.1-8b": {1: (4.5, ""), 64: (7.0, ""), 256: (15.8, "")},
        "qwen3-0.6b": {1: (1.1, "2.04"), 64: (2.8, "3.76"), 256: (9.0, "10.4")},
    }.items():
        for batch, (bound, vllm) in steps.items():
            yield Target(
                f"{model} decode step, context 1024, batch {batch}, ms",
                f"decode_latency_{model}",
                lambda r, batch=batch: find(r["rows"], "step ms", batch=batch),  # type: ignore[misc]
                bound,
                vllm=vllm,
            )
    for model, bound, vllm in (
        ("qwen2.5-7b", 8800, "7,800-8,000"),
        ("qwen3-0.6b", 33000, "22-26,000"),
    ):
        yield Target(
            f"{model}, 256 x 512/128, output tok/s",
            f"offline_throughput_{model}_fixed",
            lambda r: r["rows"][0]["output tok/s"],
            bound,
            at_least=True,
            vllm=vllm,
        )
    for start, file, bound, vllm in (
        ("first", "decode_latency_qwen2.5-7b", 60, "90"),
        ("second", "offline_throughput_qwen2.5-7b_fixed", 20, ""),
    ):
        yield Target(
            f"qwen2.5-7b, {start} start until ready, s",
            file,
            lambda r: r["ready_seconds"],
            bound,
            vllm=vllm,
        )
    for work, bound in DECODE_SHARES.items():
        for heads in HEADS:
            yield Target(
                f"decode attention {heads}, {work}, share of the floor",
                "kernels",
                lambda r, work=work, heads=heads: find(  # type: ignore[misc]
                    r["decode"], "share_of_floor", work=work, heads=heads
                ),
                bound,
                at_least=True,
            )
    for heads in HEADS:
        yield Target(
            f"prefill attention {heads}, 8k, share of cuDNN's rate",
            "kernels",
            lambda r, heads=heads: prefill_share(r["prefill"], heads),  # type: ignore[misc]
            0.75,
            at_least=True,
        )
    yield Target(
        "top-k/top-p sampling, batch 256, vocabulary 152k, ms",
        "sampling",
        lambda r: r["microseconds"]["256"]["peaked"]["top_k 50, top_p 0.95"] / 1e3,
        0.5,
    )
    yield Target(
        "256 requests of real lengths, times transformers' best batch",
        "compare_hf_gpu_qwen2.5-7b",
        lambda r: r["speedup_over_best_batch"],
        8,
        at_least=True,
    )
    yield Target(
        "greedy float32 tokens equal to transformers', share",
        "gpu_models",
        lambda r: sum(row["equal"] for row in r["rows"]) / sum(row["tokens"] for row in r["rows"]),
        1.0,
        at_least=True,
    )
    yield from targets_of_quantized()
    for batch, bound in ((1, 1.65), (64, 1.75)):
        yield Target(
            f"qwen2.5-32b, -tp 2, decode step, batch {batch}, times one GPU",
            "engines_qwen2.5-32b_two",
            lambda r, batch=batch: engine_ratio(  # type: ignore[misc]
                r, ALONE, "-tp 2", f"B {batch}, ms"
            ),
            bound,
            at_least=True,
        )


def targets_of_quantized() -> Iterator[Target]:
    """Of Qwen2.5-7B; the head stays in bfloat16 unless a line says otherwise."""
    floats, integers = "engines_qwen2.5-7b_floats", "engines_qwen2.5-7b_integers"
    fp8 = "fp8_per_channel"
    for file, flags, batch, bound in (
        (floats, f"-q {fp8}", 1, 2.6),
        (floats, f"-q {fp8} --quantize-lm-head", 1, 2.4),
        (floats, f"-q {fp8}", 64, 3.9),
        (integers, "-q int4_per_group_weight_only", 1, 1.9),
    ):
        yield Target(
            f"qwen2.5-7b {flags}, decode step, context 1024, batch {batch}, ms",
            file,
            lambda r, flags=flags, batch=batch: find(  # type: ignore[misc]
                r["rows"], f"B {batch}, ms", engine=flags
            ),
            bound,
        )
    for flags, bound in ((f"-q {fp8}", 1.7), (f"-q {fp8} --kv-cache-dtype fp8", 1.8)):
        yield Target(
            f"qwen2.5-7b {flags}, 256 x 512/128, times bfloat16",
            floats,
            lambda r, flags=flags: engine_ratio(r, flags, ALONE, RATE),  # type: ignore[misc]
            bound,
            at_least=True,
        )


def engine_ratio(result: dict[str, Any], one: str, other: str, column: str) -> float | None:
    """A figure of one engine by that of another of the same run."""
    over, under = (find(result["rows"], column, engine=flags) for flags in (one, other))
    return over / under if over and under else None


def prefill_share(rows: list[dict[str, Any]], heads: str) -> float | None:
    """The paged kernel's rate as a share of cuDNN's on dense keys, from the same run."""
    ours, cudnn = (
        find(rows, "tflops", heads=heads, work="prompt of 8192", kernel=kernel)
        for kernel in ("mosaic", "cuDNN, dense")
    )
    return ours / cudnn if ours and cudnn else None


def main() -> None:
    """Merge, print, write."""
    paths = {name: RESULTS / f"{name}.json" for name in FILES}
    results: Results = {
        name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()
    }
    rows = []
    for target in targets():
        measured = target.read(results[target.file]) if target.file in results else None
        if measured is None:
            verdict = "not measured"
        elif measured >= target.bound if target.at_least else measured <= target.bound:
            verdict = "met"
        else:
            verdict = f"missed by {abs(measured / target.bound - 1):.0%}"
        rows.append(
            {
                "figure": target.what,
                "target": f"{'>=' if target.at_least else '<='} {target.bound:g}",
                "measured": measured,
                "": verdict,
                "vLLM": target.vllm,
            }
        )
    print(markdown(rows))
    print(f"wrote {write_results('gpu_check', {'rows': rows, 'results': results})}")


if __name__ == "__main__":
    main()
