"""Compiled executables in files: a later start loads them, and neither traces nor compiles."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import pickle
import tempfile
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

import jax
from jax.experimental import serialize_executable

import jaxpaged
import pallas_kernels

log = logging.getLogger(__name__)

DIGEST_BYTES = 32
SUFFIX = ".executable"
MAX_BYTES = 2 << 30  # of all files; an engine's take about 50 MB


def check_folder(folder: Path) -> None:
    """Whoever writes to this folder runs code in the engine: that must be its user alone.

    Raises:
        PermissionError: someone else may; one line.
    """
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(
            f"others may write to the compilation cache {folder}: it must be yours (chmod 700)"
        )


class ExecutableStore:
    """A file for each executable, named by a hash of everything that it was made from.

    That is what the caller says of it, and: the source of jaxpaged and pallas_kernels, the
    versions of JAX and CUDA, and the devices. A file that is damaged counts as missing; those
    that were not used for longest give way to new ones.

    Args:
        folder: made if it is missing; see `check_folder`.
        devices: where the executables run, of all hosts.
        least_of_hosts: gives the least of a number that each host has; None: there is one host.
    """

    def __init__(
        self,
        folder: Path,
        devices: Sequence[jax.Device],
        least_of_hosts: Callable[[int], int] | None = None,
    ) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder, self._devices = folder, tuple(devices)
        self.least_of_hosts = least_of_hosts
        self._environment = _environment(self._devices)
        self._trim()

    def path(self, description: str) -> Path:
        """The file of the executable that `description` tells from all others of this code."""
        digest = hashlib.sha256(f"{self._environment}\n{description}".encode())
        return self._folder / f"{digest.hexdigest()}{SUFFIX}"

    def load(self, path: Path) -> jax.stages.Compiled | None:
        """The executable, ready to run; None if it is not there."""
        try:
            content = path.read_bytes()
            digest, content = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
            if hashlib.sha256(content).digest() != digest:
                raise ValueError("the file is damaged")
            with contextlib.suppress(OSError):
                os.utime(path)  # used: see `_trim`
            serialized, arguments, results = pickle.loads(content)
            return serialize_executable.deserialize_and_load(
                serialized,
                arguments,
                results,
                backend=self._devices[0].client,
                execution_devices=self._devices,
            )
        except FileNotFoundError:
            return None
        except Exception as error:  # whatever a file of another origin makes pickle or XLA raise
            log.warning("compiling anew what %s should hold: %s", path, error)
            return None

    def save(self, path: Path, compiled: jax.stages.Compiled) -> None:
        """Keep an executable; where that fails, the next start compiles it again."""
        try:
            content = pickle.dumps(serialize_executable.serialize(compiled))
            with tempfile.NamedTemporaryFile(dir=self._folder, suffix=SUFFIX, delete=False) as file:
                file.write(hashlib.sha256(content).digest() + content)
            os.replace(file.name, path)  # at once: another start may be reading
        except Exception as error:  # a full disk, or a program that XLA cannot write out
            log.warning("the next start compiles again what %s should hold: %s", path, error)

    def _trim(self) -> None:
        """Leave the files that were used last, MAX_BYTES in all."""
        with contextlib.suppress(OSError):  # another start may be doing the same
            files = [(path.stat(), path) for path in self._folder.glob(f"*{SUFFIX}")]
            total = 0
            for found, path in sorted(files, key=lambda file: -file[0].st_mtime):
                total += found.st_size
                if total > MAX_BYTES:
                    path.unlink()


def code_version() -> str:
    """What tells this code, and the packages that it compiles with, from any other."""
    versions = sorted(
        f"{dist.name}=={dist.version}"
        for dist in metadata.distributions()
        if dist.name.startswith(("jax", "flax", "nvidia"))
    )
    source = hashlib.sha256()
    for package in (jaxpaged, pallas_kernels):
        for path in sorted(Path(package.__path__[0]).rglob("*.py")):
            source.update(path.read_bytes())
    return repr((versions, source.hexdigest()))


def _environment(devices: Sequence[jax.Device]) -> str:
    """What executables depend on besides an engine's own settings."""
    kinds = [(device.id, device.device_kind) for device in devices]
    client = devices[0].client
    parts = [client.platform_version, client.process_index(), kinds, code_version()]
    if client.platform == "cpu":
        parts.append(_cpu())
    # It steers XLA past every setting of ours.
    parts.append(os.environ.get("XLA_FLAGS"))  # noqa: TID251
    return repr(parts)


def _cpu() -> str:
    """What the processor is and can, and its cores in use: the code is made for them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    kinds = {line for line in lines if line.startswith(("model name", "flags", "Features"))}
    return repr((sorted(kinds), len(os.sched_getaffinity(0))))
