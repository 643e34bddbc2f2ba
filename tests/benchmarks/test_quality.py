"""The arithmetic of the quality table."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.special import log_softmax

from benchmarks.quality import compare, settings_of, stretches


def test_settings_and_stretches() -> None:
    assert settings_of("dtype=float32,kv_cache_dtype=fp8") == {
        "dtype": "float32", "kv_cache_dtype": "fp8",
    }  # fmt: skip
    assert stretches(range(10), 3, 2) == [[0, 1, 2], [3, 4, 5]]
    assert stretches(range(2), 3, 2) == []


def test_a_scheme_beside_the_truth() -> None:
    true = log_softmax([[0.0, 1.0, 2.0, -np.inf], [3.0, 0.0, 0.0, -np.inf]], axis=-1)
    same = compare([[0, 2]], iter([true]), [true])
    assert same["mean KL, nats"] == 0 and same["same top-1"] == 1
    assert same["perplexity"] == pytest.approx(math.exp(-true[0, 2]))
    other = true.copy()
    other[1] = log_softmax([0.0, 3.0, 0.0, -np.inf])
    found = compare([[0, 2]], iter([other]), [true])
    p = np.exp(true[1, :3])
    expected = (p * (true[1, :3] - other[1, :3])).sum()
    assert found["same top-1"] == 0.5
    assert found["worst KL, nats"] == pytest.approx(expected)
    assert found["mean KL, nats"] == pytest.approx(expected / 2)
