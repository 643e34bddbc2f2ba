import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jaxpaged.config import GIB, EngineConfig
from jaxpaged.runtime.memory import (
    HOLE_BYTES,
    HOLES,
    PageNeeds,
    check_model_len,
    claim_memory,
    keep_holes,
    page_budget,
    report_outside_pool,
    scarcest_memory,
)


def test_windowed_groups_need_their_window_and_a_chunk_only() -> None:
    needs = PageNeeds(windows=(None, 512, 512), page_size=16, chunk=256)
    assert needs.pages(16) == 3
    assert needs.pages(100) == 3 * 7
    window_pages = (512 + 256 + 32) // 16
    assert needs.pages(8192) == 512 + 2 * window_pages


def test_longest_is_the_inverse_of_pages() -> None:
    needs = PageNeeds(windows=(None, 64), page_size=16, chunk=32)
    for num_pages in range(2, 60):
        longest = needs.longest(num_pages, limit=10_000)
        assert needs.pages(longest) <= num_pages < needs.pages(longest + 1)
    assert needs.longest(10_000, limit=77) == 77


def test_too_small_a_pool_names_the_length_that_fits() -> None:
    needs = PageNeeds(windows=(None,), page_size=16, chunk=2048)
    check_model_len(needs, num_pages=64, page_bytes=GIB, max_model_len=1024)
    with pytest.raises(ValueError) as error:
        check_model_len(needs, num_pages=64, page_bytes=GIB, max_model_len=2048)
    message = str(error.value)
    assert message.startswith("To serve at least one request with the model's max seq len (2048)")
    assert "128.00 GiB" in message and "64.00 GiB" in message
    assert "estimated maximum model length is 1024" in message
    assert "--max-model-len" in message


def budget(stats: dict[str, int] | None, **options: int | None) -> int:
    settings = {
        "kv_cache_memory_bytes": None, "resident_bytes": 0,
        "step_temporary_bytes": 0, "step_input_bytes": 0,
    }  # fmt: skip
    return page_budget(stats=stats, gpu_memory_utilization=0.9, **(settings | options))  # type: ignore[arg-type]


def test_budget_is_what_the_limit_leaves() -> None:
    stats = {"bytes_limit": 100 * GIB, "bytes_in_use": 40 * GIB}
    assert (
        budget(stats, step_temporary_bytes=5 * GIB, step_input_bytes=GIB) == 52 * GIB - HOLE_BYTES
    )
    assert budget(stats, resident_bytes=10 * GIB) == 49 * GIB - HOLE_BYTES
    assert budget(stats, kv_cache_memory_bytes=123) == 123
    assert budget(None) == GIB


def test_xla_may_take_what_offloaded_weights_need_of_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
    for name in ("XLA_PYTHON_CLIENT_MEM_FRACTION", limit):
        monkeypatch.setenv(name, "none")  # so that the test's own are forgotten
    claim_memory(EngineConfig())
    assert os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.920"
    assert os.environ[limit] == "none"
    claim_memory(EngineConfig(cpu_offload_gb=40, tensor_parallel_size=2))
    assert os.environ[limit] == "96"  # 1.1 x 80 and 8


@pytest.mark.parametrize(
    ("visible", "index", "card", "used"),
    [(None, 1, "1", 3), ("2, 0", 0, "2", 5), ("2, 0", 1, "0", 2), ("2,GPU-b", 1, "GPU-b", 3)],
)
def test_what_is_outside_the_pool_is_told_of_the_process_own_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    visible: str | None, index: int, card: str, used: int,
) -> None:  # fmt: skip
    tool = tmp_path / "nvidia-smi"  # GiB in use of each card
    cases = "0) echo 2048;; 1|GPU-b) echo 3072;; 2) echo 5120;; *) exit 6;;"
    tool.write_text(f'#!/bin/sh\nfor last; do :; done\ncase "$last" in {cases} esac\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    caplog.set_level("INFO")
    device: Any = SimpleNamespace(
        local_hardware_id=index, memory_stats=lambda: {"bytes_limit": GIB}
    )
    report_outside_pool(device)
    assert f"{used - 1:.2f} GiB of card {card} are in use outside XLA's pool of 1.00" in caplog.text


def test_no_room_names_the_utilization_that_would_do() -> None:
    with pytest.raises(ValueError, match=r"gpu_memory_utilization 0\.9\d is the smallest"):
        budget({"bytes_limit": 100 * GIB, "bytes_in_use": 99 * GIB}, step_temporary_bytes=2 * GIB)
    with pytest.raises(ValueError, match="does not fit this device"):
        budget({"bytes_limit": 100 * GIB, "bytes_in_use": 130 * GIB})


def test_the_fullest_device_counts() -> None:
    def device(in_use: int | None) -> Any:
        stats = None if in_use is None else {"bytes_limit": 9, "bytes_in_use": in_use}
        return SimpleNamespace(memory_stats=lambda: stats)

    fullest = scarcest_memory([device(2), device(5), device(3)])
    assert fullest is not None and fullest["bytes_in_use"] == 5
    assert scarcest_memory([device(None)]) is None


def test_holes_lie_between_arrays_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[jax.Array] = []

    def device_put(array: np.ndarray, device: Any) -> jax.Array:
        made.append(jax.numpy.asarray(array))
        return made[-1]

    monkeypatch.setattr(jax, "device_put", device_put)
    kept = keep_holes(SimpleNamespace(platform="gpu"))  # type: ignore[arg-type]
    holes, between = made[::2], made[1::2]  # in the order in which they take their places
    assert [id(array) for array in kept] == [id(array) for array in between]
    assert [array.nbytes for array in holes] == [array.nbytes for array in between]
    assert sum(array.nbytes for array in made) == HOLE_BYTES
    assert len(holes) == sum(count for count, _ in HOLES)
    assert keep_holes(jax.devices("cpu")[0]) == []
