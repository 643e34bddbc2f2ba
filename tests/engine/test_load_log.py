from __future__ import annotations

from jaxpaged.engine.load_log import LoadLog
from jaxpaged.engine.messages import EngineStats
from jaxpaged.engine.metrics import Totals


def test_a_line_about_the_load():
    load = LoadLog(lambda: 8)
    assert load.line(EngineStats(), Totals(), 10.0) is None
    stats = EngineStats(
        num_waiting=3, kv_cache_usage=0.25, prefix_cache_queries=40, prefix_cache_hits=10
    )
    assert load.line(stats, Totals(prompt_tokens=10, generation_tokens=1), 10.0) == (
        "running 0, waiting 3, pages 2 of 8 used (25.0%), prefix cache hits 25.0%, preemptions 0, "
        "prompt 1.0 tokens/s, generation 0.1 tokens/s"
    )


def test_the_line_is_about_its_seconds_alone():
    load = LoadLog(lambda: 16)
    before = EngineStats(num_running=1, prefix_cache_queries=40, num_preemptions=2)
    load.line(before, Totals(prompt_tokens=7), 10.0)
    after = EngineStats(
        num_running=1, prefix_cache_queries=50, prefix_cache_hits=10, num_preemptions=3
    )
    line = load.line(after, Totals(prompt_tokens=7), 10.0)
    assert line is not None
    assert "of 16 used" in line and "hits 100.0%, preemptions 1, prompt 0.0" in line
    assert load.line(EngineStats(), Totals(prompt_tokens=7), 10.0) is None
