"""A server under load: latencies and goodput at several request rates, over HTTP.

    python -m benchmarks.serving --model benchmarks/models/qwen3-0.6b.json --request-rate 8 32 inf

Starts `jaxpaged serve` (arguments unknown here are handed on to it) or takes a running server.
Requests arrive as a Poisson process, text in, streamed text out, every one with its full output
(ignore_eos). A model that is only a config.json gets a synthetic tokenizer of its size.

TTFT: from sending a request to its first text. ITL: between two pieces of its text. TPOT: the mean
ITL of a request. E2E: to the end of its text. Goodput: requests a second whose TTFT and TPOT keep
the limits.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from tokenizers import Tokenizer

from benchmarks.common import markdown, model_settings, percentiles, write_results
from benchmarks.http_client import Answer, complete
from benchmarks.startup import serve_arguments
from jaxpaged.model_files import DEMO_MODEL
from jaxpaged.planning.lengths import MAX_TOTAL, Lengths, fixed, poisson_arrivals, sharegpt

WORDS = 4096  # different tokens that prompts are made of
WARM_UP = 4  # requests


class TextMaker:
    """Makes texts of a given number of tokens.

    They are made of tokens that are a space and a word: those stay apart when a text is read again.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._rng = np.random.default_rng(seed)
        ids = self._rng.permutation(tokenizer.get_vocab_size())
        self._words: list[str] = []
        for token_id in ids.tolist():
            text = tokenizer.decode([token_id])
            word = text[:1] == " " and text[1:].isalpha() and text.isascii()
            if word and tokenizer.encode(text, add_special_tokens=False).ids == [token_id]:
                self._words.append(text)
            if len(self._words) == WORDS:
                break

    def text(self, num_tokens: int) -> str:
        """A random text."""
        places = self._rng.integers(0, len(self._words), num_tokens)
        return "".join(self._words[place] for place in places.tolist())


@contextlib.contextmanager
def running_server(arguments: Sequence[str]) -> Iterator[str]:
    """Start `jaxpaged serve` on a free port; its address, once it is ready."""
    with subprocess.Popen(
        [sys.executable, "-m", "jaxpaged", "serve", "--port", "0", *arguments],
        stdout=subprocess.PIPE,
        stderr=None,
        text=True,
    ) as server:
        assert server.stdout is not None
        try:
            for line in server.stdout:
                if " serves " in line:
                    print(line, end="", flush=True)
                    yield line.partition(" at ")[2].split(": ")[0]
                    break
            else:
                sys.exit("the server did not start")
        finally:
            server.terminate()
            server.stdout.read()


async def run_rate(
    base_url: str, texts: Sequence[str], lengths: Sequence[Lengths], rate: float, seed: int
) -> tuple[list[Answer], float]:
    """Send the requests at `rate` a second; their answers and the seconds that all took."""
    arrivals = poisson_arrivals(len(texts), rate, seed)
    start = time.perf_counter()

    async def one(text: str, item: Lengths, arrival: float) -> Answer:
        await asyncio.sleep(start + arrival - time.perf_counter())
        body = {"prompt": text, "add_special_tokens": False, "max_tokens": item.output}
        return await complete(base_url, {**body, "ignore_eos": True, "temperature": 0})

    answers = await asyncio.gather(
        *(one(*each) for each in zip(texts, lengths, arrivals, strict=True))
    )
    return answers, time.perf_counter() - start


def summary(
    answers: Sequence[Answer], seconds: float, slo_ttft_ms: float, slo_itl_ms: float
) -> dict[str, float]:
    """Throughput, goodput and percentiles (ms) of the answers that came."""
    good = [answer for answer in answers if answer.error is None]
    ttft = [1e3 * (answer.times[0] - answer.sent) for answer in good]
    itl = [[1e3 * (b - a) for a, b in pairwise(answer.times)] for answer in good]
    # By tokens, not by pieces: a piece of text may be that of two tokens.
    tpot = [
        1e3 * (answer.times[-1] - answer.times[0]) / max(answer.num_tokens - 1, 1)
        for answer in good
    ]
    e2e = [1e3 * (answer.times[-1] - answer.sent) for answer in good]
    kept = sum(
        first <= slo_ttft_ms and later <= slo_itl_ms
        for first, later in zip(ttft, tpot, strict=True)
    )
    return {
        "failed": len(answers) - len(good),
        "output tok/s": sum(answer.num_tokens for answer in good) / seconds,
        "requests/s": len(good) / seconds,
        "goodput/s": kept / seconds,
        **percentiles("TTFT", ttft),
        **percentiles("ITL", [gap for gaps in itl for gap in gaps] or [0.0]),
        **percentiles("TPOT", tpot),
        **percentiles("E2E", e2e),
    }


async def measure(base_url: str, args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """A row for each rate; prompts are new each time, so that the prefix cache finds none."""
    maker = TextMaker(folder, args.seed)
    warm_up = fixed(WARM_UP, args.input_len, min(args.output_len, 16))
    await run_rate(base_url, [maker.text(args.input_len) for _ in warm_up], warm_up, math.inf, 0)
    rows = []
    for place, rate in enumerate(args.request_rate):
        if args.lengths == "fixed":
            lengths = fixed(args.requests, args.input_len, args.output_len)
        else:
            lengths = sharegpt(args.requests, args.seed + place)
        texts = [maker.text(item.prompt) for item in lengths]
        cpu = time.process_time()
        answers, seconds = await run_rate(base_url, texts, lengths, rate, args.seed + place)
        client_share = (time.process_time() - cpu) / seconds
        for error in {answer.error for answer in answers if answer.error is not None}:
            print("failed:", error, file=sys.stderr)
        if all(answer.error is not None for answer in answers):
            sys.exit("no request succeeded")
        rows.append(
            {
                "rate": str(rate),
                "requests": len(answers),
                **summary(answers, seconds, args.slo_ttft_ms, args.slo_itl_ms),
                "client's core": client_share,
            }
        )
        print(markdown(rows[-1:]), flush=True)
    return rows


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", type=Path, help="a config.json (random weights) or a folder (default: built-in)"
    )
    parser.add_argument("--base-url", help="a running server that serves --model, with no /v1")
    parser.add_argument("--requests", type=int, default=256, help="at each rate")
    parser.add_argument("--request-rate", type=float, nargs="+", default=[math.inf])
    parser.add_argument("--lengths", choices=("fixed", "sharegpt"), default="fixed")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--slo-ttft-ms", type=float, default=500)
    parser.add_argument("--slo-itl-ms", type=float, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", help="of the file in benchmarks/results")
    args, more = parser.parse_known_args()
    longest = args.input_len + args.output_len if args.lengths == "fixed" else MAX_TOTAL
    with contextlib.ExitStack() as stack:
        settings = stack.enter_context(model_settings(args.model))
        folder = Path(settings.get("model", DEMO_MODEL))
        arguments = serve_arguments(args.model, settings)
        base_url = args.base_url
        if base_url is None:
            arguments += ["--max-model-len", str(longest), *more]
            base_url = stack.enter_context(running_server(arguments))
        rows = uvloop.run(measure(base_url, args, folder))
    model = "demo" if args.model is None else args.model.stem
    path = write_results(
        args.name or f"serving_{model}_{args.lengths}",
        {
            "model": model,
            "lengths": args.lengths
            if args.lengths == "sharegpt"
            else f"{args.input_len}/{args.output_len}",
            "slo_ms": {"ttft": args.slo_ttft_ms, "itl": args.slo_itl_ms},
            "rows": rows,
            "chart": {"x": "rate", "y": ["TTFT p50", "TTFT p99"], "label": "ms"},
        },
    )
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
