"""Whether a scheme says of a text in company what it says of the text alone.

    python -m benchmarks.self_agreement

Teacher-forced: the engine's scheduler and steps are given every token of a few texts, one half as
prompts, the other as if they had been sampled. The texts come in chunks, go on side by side,
preempt each other and are found in the prefix cache. The scores of every token are compared with
those that the same weights and pages give a text that is computed whole and alone.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.common import markdown, write_results
from benchmarks.quality import TEXT, add_flags, divergence, settings_of, stretches
from jaxpaged import model_files
from jaxpaged.config import EngineConfig
from jaxpaged.core.request import Request
from jaxpaged.core.scheduler import Scheduler
from jaxpaged.engine.tokenizer import Tokenizer
from jaxpaged.runtime.model_runner import ModelRunner
from jaxpaged.runtime.startup import start_runner
from jaxpaged.runtime.teacher_forcing import TeacherForced
from jaxpaged.sampling_params import SamplingParams

CHUNK = 64  # tokens a step, at most
SCHEMES = (
    "dtype=float32",
    "quantization=int8_per_channel_weight_only",
    "quantization=int4_per_group_weight_only",
    "quantization=fp8_per_channel",
    "quantization=fp8_per_tensor",
    "kv_cache_dtype=fp8_e4m3",
    "kv_cache_dtype=fp8_e5m2",
    "kv_cache_dtype=int8",
    "quantization=fp8_per_channel,kv_cache_dtype=fp8_e4m3",
    "quantization=fp8_per_channel,kv_cache_dtype=int8",
    "quantization=fp8_per_tensor,kv_cache_dtype=fp8_e5m2",
)
Rows = Mapping[int, np.ndarray]  # hidden states [D] by the position of the token they lead to


@dataclass(frozen=True)
class ForcedEngine:
    """The scheduler and the steps of an engine that is told what it samples."""

    runner: ModelRunner
    scheduler: Scheduler

    @classmethod
    def load(cls, config: EngineConfig, num_texts: int, length: int) -> ForcedEngine:
        """For texts of `length` tokens; there are pages for little more than half of them.

        Raises:
            ValueError, OSError: see `start_runner`.
        """
        config = replace(
            config,
            max_model_len=length,
            max_num_seqs=num_texts,
            max_num_batched_tokens=CHUNK,
            enforce_eager=True,
            compile_cache_dir="none",
        )
        runner = start_runner(config, serving=False).runner
        pages = runner.plan.needs(config).pages(length)
        limits = replace(
            runner.plan.scheduler_config(config), num_pages=1 + pages * (num_texts // 2 + 1)
        )
        return cls(runner, Scheduler(limits))

    @property
    def alone(self) -> TeacherForced:
        """What computes a text whole, with the same weights."""
        (stage,) = self.runner.stages
        return TeacherForced(stage.model, stage.params, self.runner.plan.max_model_len)

    def run(self, texts: Sequence[Sequence[int]], params: SamplingParams) -> list[dict[int, Any]]:
        """`Rows` of each text, of whose prompt only where `params` ask for it."""
        for index, text in enumerate(texts):
            self.scheduler.add(
                Request(
                    request_id=str(index),
                    prompt_token_ids=tuple(text[: len(text) // 2]),
                    params=params,
                    seed=0,
                )
            )
        found: list[dict[int, Any]] = [{} for _ in texts]
        (stage,) = self.runner.stages
        while self.scheduler.has_unfinished:
            scheduled = self.scheduler.schedule()
            sampling = self.runner.forward(scheduled).sampling
            if sampling is not None:
                ends = [(item.sequence, item.start + item.num_tokens) for item in sampling.sampled]
                ends += [(row.sequence, row.position) for row in sampling.prompt_rows]
                hidden_RD = np.asarray(stage.state.hidden_RD)
                for hidden_D, (sequence, end) in zip(hidden_RD, ends, strict=False):
                    found[int(sequence.request.request_id)][end] = hidden_D
            tokens = [
                texts[int(item.sequence.request.request_id)][item.start + item.num_tokens]
                for item in scheduled.sequences
                if item.samples
            ]
            self.scheduler.update(scheduled, tokens)
        return found


def passes(engine: ForcedEngine, texts: Sequence[Sequence[int]]) -> Iterator[tuple[str, list[Any]]]:
    """The ways in which the texts are computed, and their `Rows`.

    Raises:
        RuntimeError: texts that are too few or too short for what this is about.
    """
    rest = len(texts[0]) - len(texts[0]) // 2
    scored = SamplingParams(max_tokens=rest, ignore_eos=True, prompt_logprobs=0)
    yield "chunks, side by side, preempted", engine.run(texts, scored)
    if not engine.scheduler.num_preemptions:
        raise RuntimeError("no text was preempted")
    yield "cached prefixes", engine.run(texts[::-1], replace(scored, prompt_logprobs=None))[::-1]
    if not engine.scheduler.prefix_cache_hits:
        raise RuntimeError("no prefix was found")


def agreement(
    alone: TeacherForced, texts: Sequence[Sequence[int]], found: Sequence[Rows]
) -> tuple[np.ndarray, np.ndarray]:
    """KL divergence from each text's scores alone, and whether the best token is the same: of all
    tokens that were scored.
    """
    kl, same = [], []
    for text, rows in zip(texts, found, strict=True):
        true_TD, _ = alone.run(text)
        ends = np.array(sorted(rows))
        scores = (
            alone.scores(np.stack([rows[end] for end in ends])),
            alone.scores(true_TD)[ends - 1],
        )
        kl_T, same_T = divergence(*(np.asarray(jax.nn.log_softmax(x)) for x in scores))
        kl.append(kl_T)
        same.append(same_T)
    return np.concatenate(kl), np.concatenate(same)


def main() -> None:
    """Compare each scheme with itself and write results/NAME.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=256, help="tokens of a text")
    parser.add_argument("--texts", type=int, default=6, help="texts side by side")
    add_flags(parser, SCHEMES, "self_agreement")
    args = parser.parse_args()
    folder = model_files.resolve_model(args.model)
    texts = stretches(Tokenizer.load(folder).encode(TEXT.read_text()), args.length, args.texts)
    rows = []
    for scheme in args.schemes:
        gc.collect()  # the engine before
        settings = {"dtype": "float32", **settings_of(scheme)}
        engine = ForcedEngine.load(
            EngineConfig(model=args.model, **settings), len(texts), args.length
        )
        for way, found in passes(engine, texts):
            kl_N, same_N = agreement(engine.alone, texts, found)
            rows.append(
                {
                    "scheme": scheme,
                    "computed in": way,
                    "tokens": kl_N.size,
                    "mean KL, nats": float(kl_N.mean()),
                    "worst KL, nats": float(kl_N.max()),
                    "same top-1": float(same_N.mean()),
                }
            )
            print(rows[-1], flush=True)
    named = folder.name if args.model else "built-in"
    text = {"file": Path(TEXT).name, "length": args.length, "texts": len(texts)}
    path = write_results(args.name, {"model": named, "text": text, "schemes": rows})
    print(markdown(rows))
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
