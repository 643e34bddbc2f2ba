"""Ahead-of-time compilation of the closed set of executables."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Set
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

import jax
import platformdirs
from jax.experimental.compilation_cache import compilation_cache
from tqdm import tqdm

from jaxpaged.runtime.executable_store import ExecutableStore, check_folder

log = logging.getLogger(__name__)

TRITON_DIALECT = "jaxlib.mlir.dialects.tt"
CUBLAS_ALONE = {"xla_gpu_enable_triton_gemm": False}  # for products that XLA does


def cache_folder(setting: str | None) -> Path | None:
    """Where executables are kept; None = the user's cache folder, 'none' = nowhere.

    Raises:
        OSError: the folder that was asked for cannot be had, or others may write to it.
    """
    if setting == "none":
        return None
    path = Path(setting or Path(platformdirs.user_cache_dir("jaxpaged")) / "executables")
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_folder(path)
    except OSError as error:
        if setting is not None:
            raise
        log.warning("no compilation cache, every start compiles anew: %s", error)
        return None
    return path


@contextlib.contextmanager
def _without_jax_cache() -> Iterator[None]:
    """Compile for real: XLA cannot store again what it once loaded (on a CPU code gets lost)."""
    enabled = jax.config.values["jax_enable_compilation_cache"]
    try:
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()  # or JAX keeps to what it found at the first compilation
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()


# What XLA takes into graphs anyway, and collectives; options of the XLA of JAX 0.11.
NCCL_IN_GRAPHS = {
    "xla_gpu_experimental_use_collective_kernels": "",
    "xla_gpu_enable_command_buffer": (
        "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,CONDITIONAL,DYNAMIC_SLICE_FUSION,COLLECTIVES"
    ),
}


def compile_options(
    platform: str,
    tokens: int = 0,
    width: int = 0,
    rounds_rows: Set[bool] = frozenset(),
    devices: int = 1,
    copies: int = 0,
) -> dict[str, Any]:
    """XLA's options for an executable of an engine.

    Args:
        platform: as JAX names it.
        tokens: rows of its weight products; 0: it has none.
        width: of the model's hidden states.
        rounds_rows: of the schemes of its quantized weights, if it has any.
        devices: that share them.
        copies: from host memory that are to be under way at a time.
    """
    options: dict[str, Any] = {}
    if platform == "cpu":
        # The time goes to library products: less work on the rest compiles a quarter faster and
        # runs no slower (measured with 55M parameters, 12 layers).
        options["xla_backend_optimization_level"] = 1
        if rounds_rows:  # by default all layers' weights would be widened side by side
            options["xla_cpu_scheduler_type"] = "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"
        return options
    if platform == "gpu" and copies:
        # By default XLA schedules two, and lets the step wait for one before it starts the third.
        options["xla_gpu_enable_latency_hiding_scheduler"] = True
        options["xla_gpu_experimental_parallel_async_compute_limit"] = copies
    if platform == "gpu" and rounds_rows == {True}:
        options |= CUBLAS_ALONE
    if platform == "gpu" and 64 <= tokens <= 256 and width >= 2048 and not rounds_rows:
        # cuBLASLt alone. Its products are no faster than XLA's choice with Triton among the
        # candidates, but they add bias and residual themselves: fewer kernels. One run on an H200,
        # JAX 0.11.2, the weight products of 28 Qwen2.5-7B layers with residuals and SiLU, without
        # norms, attention and head: 4.29 -> 4.16 ms at 64 tokens, 4.55 -> 4.29 at 128, 5.95 -> 5.96
        # at 256; compiling 7 layers 2.0-2.7 -> 0.3-0.4 s. A whole step of Qwen3-0.6B, width 1024,
        # at 64 tokens takes 8 % longer so. Other sizes were not measured, nor weights that are
        # widened: cuBLASLt wants a bfloat16 copy of them, which Triton's products do without.
        options |= CUBLAS_ALONE
    if platform == "gpu" and devices > 1 and 0 < tokens <= 128:
        # What is left to XLA to add up, if anything. By default it takes a kernel that no graph
        # can hold. `scripts/check_gpu_peer_sum.py` on two H200s, JAX 0.11.2, 8 / 64 / 128 / 256
        # rows of 5120: 43 / 33 / 29 / 31 us a sum by default, 26 / 17 / 26 / 36 so.
        options |= NCCL_IN_GRAPHS if jax.__version_info__[:2] == (0, 11) else {}
    return options


@dataclass(frozen=True)
class Program:
    """A function to compile for given arguments (arrays or their abstract shapes)."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    donate: tuple[int, ...]
    out_shardings: Any  # pinned: an equal sharding spelled differently is another executable
    options: dict[str, Any]  # XLA's

    def lower(self) -> jax.stages.Lowered:
        """Trace the function."""
        # JAX asks for a Python module of Triton's dialect at every pointer of a kernel, searches
        # the file system in vain, and forgets it: a sixth of all tracing, unless it finds one.
        sys.modules.setdefault(TRITON_DIALECT, ModuleType(TRITON_DIALECT))
        return jax.jit(
            self.function, donate_argnums=self.donate, out_shardings=self.out_shardings
        ).lower(*self.args)


Key = TypeVar("Key", bound=Hashable)


class Executables(Generic[Key]):
    """Compiled programs by key.

    A key that was not compiled ahead is compiled when it is first asked for, and counted: after
    `compile_all` that count stays 0.

    Args:
        program: makes the program of a key. Its repr says all that programs depend on.
        store: where executables outlive the process; None: nowhere.
    """

    def __init__(
        self, program: Callable[[Key], Program], store: ExecutableStore | None = None
    ) -> None:
        self._program, self._store = program, store
        self._compiled: dict[Key, jax.stages.Compiled] = {}
        self._loaded: dict[Key, Path] = {}  # those that came from the store
        self.late_compilations = 0
        self.trace_seconds = 0.0
        self.compile_seconds = 0.0

    def __getitem__(self, key: Key) -> jax.stages.Compiled:
        compiled = self._compiled.get(key)
        if compiled is None:
            self.late_compilations += 1
            log.info("compiling %s on first use", key)
            if self._take({key: self._load(key)}):
                program = self._program(key)
                with _without_jax_cache():
                    self._compiled[key] = self._compile(key, program.lower(), program.options)
            compiled = self._compiled[key]
        return compiled

    def adopt(self, others: Executables[Key]) -> None:
        """Take over what others compiled for the very same arguments."""
        for key, compiled in others._compiled.items():
            if self._program(key).args == others._program(key).args:
                self._compiled[key] = compiled
                if key in others._loaded:
                    self._loaded[key] = others._loaded[key]
        self.trace_seconds += others.trace_seconds
        self.compile_seconds += others.compile_seconds

    def _path(self, store: ExecutableStore, key: Key) -> Path:
        return store.path(f"{self._program!r}\n{key!r}")

    def _load(self, key: Key) -> jax.stages.Compiled | None:
        """What the store holds; None if it has to be compiled."""
        if self._store is None:
            return None
        path = self._path(self._store, key)
        compiled = self._store.load(path)
        if compiled is not None:
            self._loaded[key] = path
        return compiled

    def _take(self, found: Mapping[Key, jax.stages.Compiled | None]) -> list[Key]:
        """Keep what was loaded; the keys that are left to compile.

        Hosts that share a mesh load all of it or compile all of it: on GPUs they exchange what
        compiling tries out.
        """
        loaded = {key: compiled for key, compiled in found.items() if compiled is not None}
        least = None if self._store is None else self._store.least_of_hosts
        if least is not None and least(len(loaded)) < len(found):
            self._loaded = {key: path for key, path in self._loaded.items() if key not in loaded}
            loaded = {}
        self._compiled.update(loaded)
        return [key for key in found if key not in loaded]

    def _compile(
        self, key: Key, lowered: jax.stages.Lowered, options: dict[str, Any]
    ) -> jax.stages.Compiled:
        compiled = lowered.compile(compiler_options=options)
        if self._store is not None:
            self._store.save(self._path(self._store, key), compiled)
        return compiled

    def forget_loaded(self) -> bool:
        """Drop what came from the store, here and there; whether anything did."""
        loaded, self._loaded = self._loaded, {}
        for key, path in loaded.items():
            self._compiled.pop(key, None)
            path.unlink(missing_ok=True)
        return bool(loaded)

    def compile_all(self, keys: Iterable[Key], after: Future[Any] | None = None) -> None:
        """Have these keys compiled, as `compile_together` does."""
        compile_together({self: keys}, after)

    def temporary_bytes(self, key: Key) -> int:
        """Scratch memory that running this executable takes besides its arguments and results."""
        analysis = self[key].memory_analysis()
        return 0 if analysis is None else analysis.temp_size_in_bytes


def compile_together(
    wanted: Mapping[Executables[Key], Iterable[Key]], after: Future[Any] | None = None
) -> None:
    """Load what is stored; trace the rest here (it holds the GIL), compile it in threads.

    Args:
        wanted: the keys of each engine's or stage's executables. All their first keys come first.
        after: what must be done before anything is compiled, while it may be traced; its error
            ends this.
    """
    start, traced = time.perf_counter(), sum(own.trace_seconds for own in wanted)
    lists = [
        [(own, key) for key in dict.fromkeys(keys) if key not in own._compiled]
        for own, keys in wanted.items()
    ]
    todo = [each for row in zip_longest(*lists) for each in row if each is not None]
    progress = tqdm(total=len(todo), desc="Compiling", unit="step", disable=not todo)
    with ThreadPoolExecutor(os.cpu_count()) as pool, progress:
        stored = dict(zip(todo, pool.map(lambda each: each[0]._load(each[1]), todo), strict=True))
        left = {
            own: own._take({key: found for (whose, key), found in stored.items() if whose is own})
            for own in wanted
        }
        missing = [(own, key) for own, key in todo if key in left[own]]
        progress.update(len(todo) - len(missing))
        if missing:
            start += _compile_in(pool, missing, progress, after)
    seconds = time.perf_counter() - start - (sum(own.trace_seconds for own in wanted) - traced)
    for own in wanted:
        own.compile_seconds += seconds / len(wanted)


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Tracing makes millions of objects, most of which stay.

    Looking for garbage among all of them, again and again, takes a quarter of its time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _compile_in(
    pool: Executor,
    work: list[tuple[Executables[Key], Key]],
    progress: Any,
    after: Future[Any] | None,
) -> float:
    """The seconds that nothing but `after` took."""

    def traced() -> Iterator[tuple[Executables[Key], Key, jax.stages.Lowered, dict[str, Any]]]:
        for own, key in work:
            start = time.perf_counter()
            program = own._program(key)
            lowered = program.lower()
            own.trace_seconds += time.perf_counter() - start
            yield own, key, lowered, program.options

    pending: dict[Future[jax.stages.Compiled], tuple[Executables[Key], Key]] = {}
    waited = 0.0
    try:
        with contextlib.ExitStack() as compiling:
            with _without_collections():
                programs, early = traced(), []
                if after is not None:
                    while not after.done() and (program := next(programs, None)):
                        early.append(program)
                    start = time.perf_counter()
                    after.result()
                    waited = time.perf_counter() - start
                compiling.enter_context(_without_jax_cache())
                for own, key, lowered, options in chain(early, programs):
                    future = pool.submit(own._compile, key, lowered, options)
                    future.add_done_callback(lambda f: progress.update(not f.cancelled()))
                    pending[future] = own, key
            for future in as_completed(pending):
                own, key = pending[future]
                own._compiled[key] = future.result()
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    return waited
