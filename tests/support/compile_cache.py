"""One compile cache for all tests: for every worker, for the processes that tests start, and for the next run.

It is JAX's own persistent cache, in the user's cache folder, with three differences:

- An entry appears whole or not at all. JAX writes into the file that others read, so a process that is killed leaves
  half an entry, for ever. Processes without `install` (see `sitecustomize.py`) therefore read and do not write.
- Scope names belong to the key, files and lines do not. By default none do, and a program would come with the scopes
  of an earlier source, which tests read. JAX keeps the number of devices and the XLA flags in the key by itself.
- What nobody used for two weeks goes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import sys
import tempfile
import time
import types
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

TOP = "RECJAX_TESTS_CACHE"  # where to, instead of the user's cache folder
_DAY = 24 * 3600.0
_KEEP = 14 * _DAY


def top() -> Path:
    """The folder that holds a folder for each machine and version."""
    if given := os.environ.get(TOP):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "recjax-tests"


def folder() -> Path:
    """Where the programs of this JAX for this processor are; XLA compiles for as many threads as NPROC says."""
    python = f"py{sys.version_info.major}.{sys.version_info.minor}"
    processor = hashlib.sha256(f"{_processor()} {os.environ.get('NPROC')}".encode()).hexdigest()[:12]
    return top() / f"jax{metadata.version('jax')}-jaxlib{metadata.version('jaxlib')}-{python}-{processor}"


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return f"{platform.machine()} {platform.processor()}"


def prepare() -> dict[str, str]:
    """Makes the folder, and returns the environment in which JAX reads from it and, without `install`, never writes."""
    path = folder()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        warnings.warn(f"the tests keep no compiled programs, and take longer: {error}", stacklevel=2)
        return {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    return {
        "JAX_COMPILATION_CACHE_DIR": str(path),
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1e9",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "JAX_COMPILATION_CACHE_INCLUDE_METADATA_IN_KEY": "true",
        "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",  # scope names without files and lines
    }


class Entries:
    """The files of the cache, as JAX calls it."""

    written = 0  # by this process

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def get(self, key: str) -> bytes | None:
        """The entry, or None; one that is used is kept for another two weeks."""
        path = self._path / key
        try:
            value = path.read_bytes()
            if time.time() - path.stat().st_mtime > _DAY:
                os.utime(path)
        except OSError:
            return None
        return value or None  # after a power failure

    def put(self, key: str, value: bytes) -> None:
        """Writes an entry. Where there is no space it is left out: that costs time, nothing else."""
        part = None
        try:
            with tempfile.NamedTemporaryFile(dir=self._path, prefix=".part-", delete=False) as file:
                part = file.name
                file.write(value)
            os.replace(part, self._path / key)
            Entries.written += 1
        except OSError:
            if part:
                with contextlib.suppress(OSError):
                    os.unlink(part)


def install(module: Any) -> None:
    """Lets this process write, too: given `jax._src.compilation_cache`, which has just been imported."""
    module.get_file_cache = lambda path: (Entries(path), path)
    module.config.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def let_all_write(module: Any) -> None:
    """Lets each of several processes keep its programs: given `jax._src.compiler`, which has just been imported.

    Their keys differ from process to process, and JAX writes those of the first one alone.
    """
    first = types.SimpleNamespace(global_state=types.SimpleNamespace(process_id=0))
    write = module._cache_write
    module._cache_write = types.FunctionType(write.__code__, {**vars(module), "distributed": first}, write.__name__)


def prune(path: Path, now: float) -> None:
    """Removes from all folders in `path` what nobody has used for two weeks, and what a killed process left."""
    for file in path.glob("*/*"):
        with contextlib.suppress(OSError):  # another run may have been quicker
            if now - file.stat().st_mtime > (_DAY if file.name.startswith(".part-") else _KEEP):
                file.unlink()
    for each in path.glob("*"):
        with contextlib.suppress(OSError):  # not empty
            each.rmdir()
