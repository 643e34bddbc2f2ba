"""The benchmark of the host's work keeps up with the engine that it times."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.host_step import FILTERED, GREEDY, MODEL, make_core, measure, measure_call
from benchmarks.make_tokenizer import make_tokenizer
from jaxpaged.engine.tokenizer import Tokenizer


def test_every_part_of_a_step_is_timed(tmp_path: Path):
    make_tokenizer(json.loads(MODEL.read_text()), tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    core = make_core(MODEL, batch=3)
    args = argparse.Namespace(context=40, steps=5)
    for params in (GREEDY, FILTERED):
        figures = measure(core, tokenizer, params, 3, args)
        assert min(figures.values()) > 0
        parts = [figures[f"{name} us"] for name in ("schedule", "build", "update")]
        assert sum(parts) < figures["all us"]
        assert not core.has_work
    assert core.stats().num_running == 0


def test_a_call_has_the_arrays_of_a_step():
    call = measure_call(MODEL, calls=2)
    weights, state = 28 * 7 + 3, 28 + 5
    assert call["arrays"] == weights + state
    assert call["us"] > 0


def test_the_core_is_that_of_a_gpu():
    info = make_core(MODEL, batch=256).info
    assert info.buckets[0] == "decode 8x8" and "decode 256x256" in info.buckets
    assert info.num_pages == 256 * 2048 // 16
