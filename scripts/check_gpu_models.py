"""Compare greedy float32 tokens of every family on this machine's GPU with transformers'.

    python scripts/check_gpu_models.py [--real-model DIR] [-tp N] [-pp N]

The tiny models' tokens stand in tests/fixtures/references.safetensors, the real model's in
gemma3_270m_golden.json; the engine runs with its own choice of attention, in batches, chunks and
with overlap, on as many devices as -tp and -pp say. Prints a line a model and writes
benchmarks/results/gpu_models.json, or gpu_models_tp2_pp1.json and so on.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
from safetensors.numpy import load_file

ROOT = Path(__file__).parent.parent
FIXTURES = ROOT / "tests" / "fixtures"
sys.path[:0] = [str(ROOT), str(FIXTURES)]

import tiny_models  # noqa: E402

from benchmarks.common import write_results  # noqa: E402
from benchmarks.engine_flags import add_engine_flags, engine_settings  # noqa: E402
from jaxpaged import LLM, SamplingParams  # noqa: E402
from jaxpaged.models import load_spec  # noqa: E402
from jaxpaged.models.spread import spread_spec  # noqa: E402

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "max_num_seqs": 8,
    "generation_config": "none",
}


def compare(
    name: str, folder: Path, prompts: list[list[int]], want: list[list[int]], **settings: Any
) -> dict[str, Any]:
    """Run the prompts in one batch; how many tokens agree up to each one's first difference."""
    params = [SamplingParams(temperature=0, max_tokens=len(t), ignore_eos=True) for t in want]
    with LLM(str(folder), **(SETTINGS | settings)) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        backend = llm.info.attention_backend
    equal = 0
    for output, tokens in zip(outputs, want, strict=True):
        got = output.outputs[0].token_ids
        pairs = zip(got, tokens, strict=True)
        equal += next((i for i, (a, b) in enumerate(pairs) if a != b), len(tokens))
    row = {"model": name, "attention": backend, "equal": equal, "tokens": sum(map(len, want))}
    print("ok  " if equal == row["tokens"] else "BAD ", row, flush=True)
    return row


def main() -> int:
    """Compare all models; returns 1 if any token differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--real-model", type=Path, help="folder of Gemma 3 270M")
    parser.add_argument("--names", nargs="*", default=list(tiny_models.CONFIGS))
    add_engine_flags(parser)
    args = parser.parse_args()
    settings = engine_settings(args)
    tp, pp = settings["tensor_parallel_size"], settings["pipeline_parallel_size"]
    references = load_file(FIXTURES / "references.safetensors")
    rows = []
    for name in args.names:
        try:
            spread_spec(load_spec(tiny_models.CONFIGS[name]), tp)
        except ValueError as error:
            print("none", {"model": name}, error, flush=True)
            continue
        with tempfile.TemporaryDirectory() as folder:
            path = tiny_models.write_model(Path(folder), tiny_models.CONFIGS[name])
            want = references[f"{name}/tokens"].tolist()
            # Less than the prompts: they are cut into chunks, and steps are mixed.
            limits = settings | {"max_num_batched_tokens": 32}
            rows.append(compare(name, path, tiny_models.prompts(), want, **limits))
    if args.real_model is not None:
        cases = json.loads((FIXTURES / "gemma3_270m_golden.json").read_text())["cases"]
        prompts, want = ([case[key] for case in cases] for key in ("prompt_ids", "output_ids"))
        limits = settings | {"max_model_len": 2048}
        rows.append(compare("gemma-3-270m", args.real_model, prompts, want, **limits))
    write_results(
        "gpu_models" if tp * pp == 1 else f"gpu_models_tp{tp}_pp{pp}",
        {"platform": jax.default_backend(), **settings, "rows": rows},
    )
    return int(any(row["equal"] != row["tokens"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
