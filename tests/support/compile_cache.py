"""One compile cache for all tests: for every worker, for the processes that tests start, and for the next run.

It is JAX's own persistent cache, in the user's cache folder, with three differences:

- Its files are those of `recjax.utils.program_cache`. Processes without `install` (see `sitecustomize.py`) read and do
  not write.
- Scope names belong to the key, files and lines do not. By default none do, and a program would come with the scopes
  of an earlier source, which tests read. JAX keeps the number of devices and the XLA flags in the key by itself.
- What nobody used for two weeks goes.
"""

from __future__ import annotations

import os
import types
import warnings
from pathlib import Path
from typing import Any

from recjax.utils import program_cache

TOP = "RECJAX_TESTS_CACHE"  # where to, instead of the user's cache folder
_KEEP = 14 * program_cache.DAY


def top() -> Path:
    """The folder that holds a folder for each machine and version."""
    if given := os.environ.get(TOP):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "recjax-tests"


def folder() -> Path:
    """Where the programs of this JAX for this processor are; XLA compiles for as many threads as NPROC says."""
    return top() / program_cache.folder_name(str(os.environ.get("NPROC")))


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


def install(module: Any) -> None:
    """Lets this process write, too: given `jax._src.compilation_cache`, which has just been imported."""
    program_cache.install(module)
    module.config.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def let_all_write(module: Any) -> None:
    """Lets each of several processes keep its programs: given `jax._src.compiler`, which has just been imported.

    Their keys differ from process to process, and JAX writes those of the first one alone.
    """
    first = types.SimpleNamespace(global_state=types.SimpleNamespace(process_id=0))
    write = module._cache_write
    module._cache_write = types.FunctionType(write.__code__, {**vars(module), "distributed": first}, write.__name__)


def prune(path: Path, now: float) -> None:
    """Removes what nobody has used for two weeks."""
    program_cache.prune(path, now, _KEEP)
