"""What quantization costs in quality: scores of every token of a text beside float32's.

Teacher-forced: each scheme is given the same tokens, in stretches that know nothing of each other,
and its scores of every next token are compared with those of the same weights in float32.
"""

from __future__ import annotations

import argparse
import gc
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np

from benchmarks.common import markdown, write_results
from jaxpaged import flags, model_files
from jaxpaged.config import EngineConfig
from jaxpaged.engine.tokenizer import Tokenizer
from jaxpaged.runtime.teacher_forcing import TeacherForced

TEXT = Path(__file__).parent / "quality_text.txt"
REFERENCE = "dtype=float32"
SCHEMES = (
    "kv_cache_dtype=fp8_e4m3",
    "kv_cache_dtype=fp8_e5m2",
    "kv_cache_dtype=int8",
)


class _SchemeParser(argparse.ArgumentParser):
    """The engine's flags, of which a wrong one is the fault of a flag of ours."""

    def error(self, message: str) -> NoReturn:
        raise argparse.ArgumentTypeError(message)


def settings_of(scheme: str) -> dict[str, Any]:
    """ "a=1,b=x" as settings of the engine; a switch is true or false.

    Raises:
        argparse.ArgumentTypeError: a setting that there is none of, or a value that it cannot have.
    """
    pairs = dict(pair.partition("=")[::2] for pair in scheme.split(",") if pair)
    for name in pairs:
        if name not in EngineConfig.__dataclass_fields__ or name == "model":  # has its own flag
            raise argparse.ArgumentTypeError(
                f"{name!r} is no setting of the engine that a scheme has"
            )
    parser = _SchemeParser(add_help=False)
    flags.add_flags(parser, EngineConfig)
    words = [_as_flag(name.replace("_", "-"), value) for name, value in pairs.items()]
    found = flags.collect(EngineConfig, parser.parse_args(words))
    try:
        EngineConfig(**found)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return {name: found[name] for name in pairs}


def _as_flag(name: str, value: str) -> str:
    switches = {"true": f"--{name}", "false": f"--no-{name}"}
    return switches.get(value, f"--{name}={value}")


def known_scheme(text: str) -> str:
    """The text itself, which is a scheme.

    Raises:
        argparse.ArgumentTypeError: see `settings_of`.
    """
    settings_of(text)
    return text


def stretches(token_ids: Sequence[int], length: int, count: int) -> list[list[int]]:
    """At most `count` whole stretches of `length` tokens."""
    starts = range(0, len(token_ids) - length + 1, length)
    return [list(token_ids[at : at + length]) for at in starts][:count]


def log_probabilities(
    model: str | None, scheme: str, texts: Sequence[Sequence[int]]
) -> Iterator[np.ndarray]:
    """Float32 [T, V] of each text: the log-probabilities of the token after each of its tokens."""
    settings = {"dtype": "float32", **settings_of(scheme)}
    forced = TeacherForced.load(EngineConfig(model=model, **settings), len(texts[0]))
    for text in texts:
        yield np.asarray(jax.nn.log_softmax(forced.logits(text)))


def divergence(found_TV: np.ndarray, true_TV: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """KL divergence [T] of log-probabilities from the true ones, and whether the best token is the
    same.
    """
    with np.errstate(invalid="ignore"):  # padding of a vocabulary is -inf on both sides
        gap_TV = np.where(np.isneginf(true_TV), 0, true_TV - found_TV)
    kl_T = (np.exp(true_TV) * gap_TV).sum(axis=-1)
    return kl_T, found_TV.argmax(axis=-1) == true_TV.argmax(axis=-1)


def compare(
    texts: Sequence[Sequence[int]], ours: Iterator[np.ndarray], theirs: Sequence[np.ndarray]
) -> dict[str, float]:
    """Means over all positions; the last of a text has no next token, and counts in all but
    perplexity.
    """
    kl, same, loss = [], [], []
    for text, found_TV, true_TV in zip(texts, ours, theirs, strict=True):
        kl_T, same_T = divergence(found_TV, true_TV)
        kl.append(kl_T)
        same.append(same_T)
        loss.append(-found_TV[np.arange(len(text) - 1), text[1:]])
    return {
        "mean KL, nats": float(np.mean(kl)),
        "worst KL, nats": float(np.max(kl)),
        "same top-1": float(np.mean(same)),
        "perplexity": math.exp(float(np.mean(loss))),
    }


def add_flags(parser: argparse.ArgumentParser, schemes: Sequence[str], name: str) -> None:
    """Which model in which schemes, and where the results go; the defaults of the latter two."""
    parser.add_argument("--model", help="folder or hub id (default: the built-in model)")
    parser.add_argument(
        "--schemes",
        nargs="+",
        type=known_scheme,
        default=schemes,
        metavar="SETTING=VALUE[,...]",
        help="settings of the engine; without a dtype, activations are float32",
    )
    parser.add_argument("--name", default=name, help="of the file in results/")


def main() -> None:
    """Compare schemes and write results/NAME.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, default=TEXT, help="UTF-8 file to read")
    parser.add_argument("--stretch", type=int, default=512, help="tokens that see each other")
    parser.add_argument("--stretches", type=int, default=8, help="stretches at most")
    add_flags(parser, SCHEMES, "quality")
    args = parser.parse_args()
    folder = model_files.resolve_model(args.model)
    token_ids = Tokenizer.load(folder).encode(args.text.read_text())
    texts = stretches(token_ids, args.stretch, args.stretches)
    if not texts:
        parser.error(f"{args.text} has {len(token_ids)} tokens, fewer than --stretch")
    true = list(log_probabilities(args.model, REFERENCE, texts))
    rows = []
    for scheme in (REFERENCE, *args.schemes):
        gc.collect()  # the engine before
        figures = compare(texts, log_probabilities(args.model, scheme, texts), true)
        rows.append({"scheme": scheme, **figures})
        print(rows[-1], flush=True)
    text = {"file": args.text.name, "tokens": sum(map(len, texts)), "stretch": args.stretch}
    named = folder.name if args.model else "built-in"
    path = write_results(args.name, {"model": named, "text": text, "schemes": rows})
    print(markdown(rows))
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
