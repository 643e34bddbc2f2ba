"""Schemes that round say of a text in company what they say of it alone (the built-in model)."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.quality import TEXT, settings_of, stretches
from benchmarks.self_agreement import ForcedEngine, agreement, passes
from jaxpaged import model_files
from jaxpaged.config import EngineConfig
from jaxpaged.engine.tokenizer import Tokenizer
from jaxpaged.runtime.teacher_forcing import TeacherForced

NUM, LENGTH = 3, 80


@pytest.mark.parametrize(
    "scheme", ["quantization=fp8_per_channel,kv_cache_dtype=fp8_e4m3", "kv_cache_dtype=int8"]
)
def test_a_text_is_scored_alike_alone_and_beside_others(scheme: str) -> None:
    """In chunks, side by side, preempted, from the prefix cache; every token is given."""
    tokenizer = Tokenizer.load(model_files.resolve_model(None))
    texts = stretches(tokenizer.encode(TEXT.read_text()), LENGTH, NUM)
    config = EngineConfig(dtype="float32", **settings_of(scheme))
    engine = ForcedEngine.load(config, NUM, LENGTH)
    scored = {}
    for way, found in passes(engine, texts):
        kl_N, same_N = agreement(engine.alone, texts, found)
        scored[way] = kl_N.size
        # Nothing is rounded another way; where anything was, the worst would be 1e-4 or more.
        assert kl_N.max() < 1e-6 and same_N.all(), way
    assert list(scored.values()) == [NUM * (LENGTH - 1), NUM * LENGTH // 2]


def test_other_scores_are_told_from_these() -> None:
    """Each token's scores beside those of the token before."""
    tokenizer = Tokenizer.load(model_files.resolve_model(None))
    texts = stretches(tokenizer.encode(TEXT.read_text()), LENGTH, 2)
    alone = TeacherForced.load(EngineConfig(dtype="float32"), LENGTH)
    rows = [np.asarray(alone.run(text)[0]) for text in texts]
    right, wrong = (
        [{end: row[end - back] for end in (2, 50, LENGTH - 1)} for row in rows] for back in (1, 2)
    )
    kl_N, same_N = agreement(alone, texts, right)
    assert (kl_N == 0).all() and same_N.all()
    kl_N, same_N = agreement(alone, texts, wrong)
    assert kl_N.min() > 0.1 and same_N.mean() < 0.5
