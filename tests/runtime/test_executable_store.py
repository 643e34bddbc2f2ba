from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxpaged.runtime import executable_store
from jaxpaged.runtime.compilation import Executables, Program, cache_folder
from jaxpaged.runtime.executable_store import ExecutableStore
from tests.engine.harness import LLAMA, write_model

DEVICE = jax.local_devices()[0]
HERE = jax.sharding.SingleDeviceSharding(DEVICE)
WORDS = jax.ShapeDtypeStruct((8,), jnp.int32, sharding=HERE)


@dataclasses.dataclass(frozen=True)
class Adding:
    """Programs that add their key; counts how many were made."""

    name: str = "adding"
    pool: int = 8  # only key 2 knows it
    made: list[int] = dataclasses.field(default_factory=list, repr=False)

    def __call__(self, key: int) -> Program:
        self.made.append(key)
        y = jax.ShapeDtypeStruct((self.pool if key == 2 else 8,), jnp.int32, sharding=HERE)
        return Program(lambda x, y: (x + key, {"y": y}), (WORDS, y), (0,), (HERE, {"y": HERE}), {})


def store(folder: Path) -> ExecutableStore:
    return ExecutableStore(folder, [DEVICE])


def compiled(folder: Path, programs: Adding) -> Executables[int]:
    made = Executables(programs, store(folder))
    made.compile_all([1, 2])
    return made


def test_a_second_start_traces_nothing_and_computes_the_same(tmp_path: Path) -> None:
    compiled(tmp_path, Adding())
    programs = Adding()
    second = compiled(tmp_path, programs)
    assert programs.made == [] and second.trace_seconds == 0 and second.late_compilations == 0
    x, y = jnp.arange(8, dtype=jnp.int32), jnp.ones((8,), jnp.int32)
    address = x.unsafe_buffer_pointer()
    out, rest = second[2](x, y)
    assert out.tolist() == list(range(2, 10)) and rest["y"].tolist() == [1] * 8
    assert x.is_deleted() and out.unsafe_buffer_pointer() == address  # donated, in place
    assert out.sharding == HERE
    assert second.temporary_bytes(1) >= 0


def test_whatever_an_executable_depends_on_makes_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled(tmp_path, Adding())
    programs = Adding("other")
    compiled(tmp_path, programs)
    assert programs.made == [1, 2]
    assert len(list(tmp_path.iterdir())) == 4

    path = store(tmp_path).path("x")
    assert store(tmp_path).path("x") == path != store(tmp_path).path("y")
    source = tmp_path / "package"
    source.mkdir()
    (source / "new.py").write_text("changed")
    with monkeypatch.context() as patch:
        patch.setattr(executable_store, "pallas_kernels", SimpleNamespace(__path__=[str(source)]))
        assert store(tmp_path).path("x") != path
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert store(tmp_path).path("x") != path


@pytest.mark.parametrize(
    "harm", [lambda b: b"", lambda b: b[:-9], lambda b: b[:99] + b"?" + b[100:]]
)
def test_a_damaged_file_is_compiled_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, harm: Any
) -> None:
    compiled(tmp_path, Adding())
    for file in tmp_path.iterdir():
        file.write_bytes(harm(file.read_bytes()))
    programs = Adding()
    compiled(tmp_path, programs)
    assert programs.made == [1, 2] and "damaged" in caplog.text
    programs = Adding()
    compiled(tmp_path, programs)
    assert programs.made == []  # mended


def test_files_that_were_not_used_for_longest_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = store(tmp_path)
    other = tmp_path / "mine.txt"
    other.write_text("x" * 100)
    for age, name in enumerate("abcd"):
        made.path(name).write_bytes(b"x" * 10)
        os.utime(made.path(name), (1000 - age, 1000 - age))
    monkeypatch.setattr(executable_store, "MAX_BYTES", 25)
    store(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([made.path("a"), made.path("b"), other])


def test_a_folder_that_cannot_be_written_costs_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = Executables(Adding(), store(tmp_path / "gone"))
    (tmp_path / "gone").rmdir()
    made.compile_all([1])
    assert made.late_compilations == 0 and "the next start compiles again" in caplog.text


def test_what_jax_cached_is_not_stored_again(tmp_path: Path) -> None:
    """XLA loses code when it writes out what it had loaded: such files load, but do not run."""
    folder, enabled = jax.config.jax_compilation_cache_dir, jax.config.jax_enable_compilation_cache
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "jax"))
    try:
        compiled(tmp_path / "first", Adding())
        assert not (tmp_path / "jax").exists()
        assert jax.config.jax_enable_compilation_cache == enabled
    finally:
        jax.config.update("jax_compilation_cache_dir", folder)


def test_others_may_not_write_what_is_run(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(0o770)
    with pytest.raises(PermissionError, match="chmod 700"):
        cache_folder(str(folder))


def test_only_what_has_the_same_arguments_is_adopted() -> None:
    small, large = Executables(Adding()), Executables(Adding(pool=16))
    small.compile_all([1, 2])
    large.adopt(small)
    assert large[1] is small[1] and large.late_compilations == 0
    assert large[2] is not small[2] and large.late_compilations == 1


def test_late_compilations_are_counted(tmp_path: Path) -> None:
    made = compiled(tmp_path, Adding())
    made[3]
    made[3]
    assert made.late_compilations == 1


def test_nothing_is_compiled_after_a_failure(tmp_path: Path) -> None:
    loading: Future[None] = Future()
    loading.set_exception(OSError("no weights"))
    programs = Adding()
    with pytest.raises(OSError, match="no weights"):
        Executables(programs).compile_all([1, 2], after=loading)
    assert programs.made == []


def test_programs_are_traced_but_not_compiled_while_weights_are_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loading: Future[None] = Future()
    loaded = []

    @dataclasses.dataclass(frozen=True)
    class Loading(Adding):
        def __call__(self, key: int) -> Program:
            if key == 2:
                loading.set_result(None)
            return super().__call__(key)

    def compile(self: Any, key: int, *rest: Any) -> Any:
        loaded.append(loading.done())
        return real(self, key, *rest)

    real = Executables._compile
    monkeypatch.setattr(Executables, "_compile", compile)
    made = Executables(Loading())
    made.compile_all([1, 2, 3], after=loading)
    assert loaded == [True] * 3
    assert made[3](jnp.ones(8, jnp.int32), jnp.ones(8, jnp.int32))[0].tolist() == [4] * 8
    assert made.late_compilations == 0


def test_no_garbage_is_collected_while_programs_are_traced() -> None:
    seen = []

    def program(key: int) -> Program:
        def traced(x: jax.Array) -> jax.Array:
            seen.append(gc.isenabled())
            assert key != 2, "not this one"
            return x

        return Program(traced, (WORDS,), (), HERE, {})

    for keys in ([0, 1], [2]):
        with contextlib.suppress(AssertionError):
            Executables(program).compile_all(keys)
        assert gc.isenabled()
    assert seen == [False] * 3


START = """
import sys
from jaxpaged.config import EngineConfig
from jaxpaged.runtime.startup import start_runner
started = start_runner(
    EngineConfig(
        model=sys.argv[1], load_format="dummy", compile_cache_dir=sys.argv[2],
        max_num_batched_tokens=32, max_num_seqs=1, num_gpu_blocks_override=16,
    ),
    serving=True,
)
print(started.runner.late_compilations, started.seconds["trace"])
"""


def test_an_engine_finds_its_executables_in_another_process(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", LLAMA)
    traced = []
    for _ in range(2):
        command = [sys.executable, "-c", START, str(model), str(tmp_path / "cache")]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        late, trace = done.stdout.split()
        assert late == "0"
        traced.append(float(trace))
    assert traced[0] > 0 and traced[1] == 0
