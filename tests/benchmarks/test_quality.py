"""The arithmetic of the quality table."""

from __future__ import annotations

import math
from types import ModuleType

import numpy as np
import pytest
from scipy.special import log_softmax

from benchmarks import quality, self_agreement
from benchmarks.quality import compare, settings_of, stretches


def test_settings_and_stretches() -> None:
    assert settings_of("dtype=float32,kv_cache_dtype=fp8") == {
        "dtype": "float32", "kv_cache_dtype": "fp8",
    }  # fmt: skip
    assert stretches(range(10), 3, 2) == [[0, 1, 2], [3, 4, 5]]
    assert stretches(range(2), 3, 2) == []


def test_settings_have_the_kinds_of_the_engines_flags() -> None:
    assert settings_of("cpu_offload_gb=1,enable_prefix_caching=false,async_scheduling=true") == {
        "cpu_offload_gb": 1.0, "enable_prefix_caching": False, "async_scheduling": True,
    }  # fmt: skip


@pytest.mark.parametrize("module", [quality, self_agreement])
@pytest.mark.parametrize(
    ("scheme", "words"),
    [
        ("foo=bar", "'foo' is no setting"),
        ("kv-cache-dtype=int8", "'kv-cache-dtype' is no setting"),
        ("model=x", "'model' is no setting"),
        ("cpu_offload_gb=x", "invalid float value: 'x'"),
        ("cpu_offload_gb=-1", "cpu_offload_gb must be at least 0"),
        ("quantization=zzz", "invalid choice: 'zzz'"),
        ("quantize_lm_head=true", "quantize_lm_head must be left out unless"),
        ("dtype", "--dtype: invalid choice: ''"),
    ],
)
def test_a_scheme_that_cannot_be(
    module: ModuleType,
    scheme: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["x", "--schemes", "dtype=float32", scheme])
    with pytest.raises(SystemExit) as error:
        module.main()
    assert error.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("x: error: argument --schemes: ") and words in last


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
