"""Compare what one GPU scores in bfloat16 with what two say that share every layer.

    python scripts/check_gpu_parallel.py [--model benchmarks/models/qwen3-0.6b.json]

check_gpu_models.py compares tokens in float32, where sums over devices are XLA's. Here they are the
devices' own stores, too: random weights of a config.json (the same on any number of devices), log
probabilities of given tokens in steps of a few rows. bfloat16 rounds a sum of two parts otherwise
than one sum, so what has to agree is how far both ways of adding up are from one device. Prints a
line an engine; returns 1 if stores are further away than XLA's sums.
"""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common import model_settings, write_results  # noqa: E402
from jaxpaged import LLM, SamplingParams  # noqa: E402

PROMPTS, LENGTH, OUTPUT = 6, 40, 16
TWO_DEVICES: dict[str, dict[str, Any]] = {
    "XLA's sums": {"tensor_parallel_size": 2, "disable_custom_all_reduce": True},
    "sums by stores": {"tensor_parallel_size": 2},
}


def scores(model: Path, settings: dict[str, Any]) -> np.ndarray:
    """Log probabilities of every prompt token after the first, and of the first tokens made."""
    draw = np.random.default_rng(0)
    params = SamplingParams(
        temperature=0, max_tokens=OUTPUT, ignore_eos=True, prompt_logprobs=0, logprobs=1
    )
    with (
        model_settings(model) as found,
        LLM(
            **found,
            **settings,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=128,
            max_num_seqs=PROMPTS,
            max_num_batched_tokens=128,
        ) as llm,
    ):
        prompts = draw.integers(0, llm.info.vocab_size, (PROMPTS, LENGTH)).tolist()
        outputs = llm.generate(prompts, params, use_tqdm=False)
    rows: list[float] = []
    for output, prompt in zip(outputs, prompts, strict=True):
        assert output.prompt_logprobs is not None
        given = zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
        rows += [at[token].logprob for at, token in given if at is not None]
        first = output.outputs[0]
        assert first.logprobs is not None
        rows.append(first.logprobs[0][first.token_ids[0]].logprob)
    gc.collect()
    return np.array(rows)


def main() -> int:
    """Compare; returns 1 if sums by stores are wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=ROOT / "benchmarks/models/qwen3-0.6b.json")
    args = parser.parse_args()
    one = scores(args.model, {})
    rows, means = [], []
    for name, settings in TWO_DEVICES.items():
        away = np.abs(scores(args.model, settings) - one)
        means.append(float(away.mean()))
        rows.append({"engine": name, "mean difference": means[-1], "largest": float(away.max())})
        print(rows[-1], flush=True)
    write_results("gpu_parallel", {"model": args.model.stem, "scores": len(one), "rows": rows})
    xla, stores = means
    good = 0 < stores <= 1.5 * xla
    print("ok" if good else "BAD")
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
