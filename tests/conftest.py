"""Settings of the whole test run: JAX on the CPU, one compilation cache, the real-model option."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from live_server import Serving

# Before any test module imports jax; processes that tests start inherit it.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"  # no test may depend on the network
# Thousands of small programs that run once: what compiles them sooner wins.
SOONER = ["--xla_cpu_parallel_codegen_split_count=1"]
if metadata.version("jax").startswith("0.10."):  # the next one's XLA does not know it
    SOONER.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join([*SOONER, os.environ.get("XLA_FLAGS", "")])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--real-model",
        type=Path,
        metavar="MODEL",
        help="folder of a Hugging Face checkpoint, or GGUF file, for the tests marked real_model",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Share one cache folder, engines' default folder in it: later runs compile nothing."""
    if hasattr(config, "cache"):  # not under `-p no:cacheprovider`
        cache = config.cache.mkdir("home")
        os.environ["XDG_CACHE_HOME"] = str(cache)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(cache / "jaxpaged" / "executables")
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--real-model") is None:
        skip = pytest.mark.skip(reason="needs --real-model MODEL")
        for item in items:
            if "real_model" in item.keywords:
                item.add_marker(skip)


@pytest.fixture(scope="session")
def real_model(request: pytest.FixtureRequest) -> Path:
    """What was given with --real-model; for tests marked real_model."""
    return request.config.getoption("--real-model")


@pytest.fixture(scope="session")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """One server of the built-in model for all tests that leave it as it was."""
    serving = Serving(log=tmp_path_factory.mktemp("serve") / "log")
    yield serving
    serving.process.kill()
    serving.process.wait()
