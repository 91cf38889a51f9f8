"""One compile cache for all tests: for every worker, for the processes that tests start, and for the next run.

It is JAX's own persistent cache, in the user's cache folder, with these differences:

- Its files are those of `recjax.utils.program_cache`. Processes without `install` (see `sitecustomize.py`) read and do
  not write.
- Scope names belong to the key, files and lines do not. By default none do, and a program would come with the scopes
  of an earlier source, which tests read. JAX keeps the number of devices and the XLA flags in the key by itself.
- A program is compiled once for all devices, and once for processes that train together.
- What nobody used for two weeks goes.
"""

from __future__ import annotations

import os
import sys
import time
import types
import warnings
from pathlib import Path
from typing import Any

from recjax.utils import program_cache

TOP = "RECJAX_TESTS_CACHE"  # where to, instead of the user's cache folder
ASKED = "TESTS_LIGHT_COMPILE"  # says how programs are compiled: see `support.light_compile`
_KEEP = 14 * program_cache.DAY
WAIT_S = 30.0  # for the process that compiles a program of several


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


def share(module: Any) -> None:
    """Lets processes that train together compile each program once: given `jax._src.compiler`, just imported.

    A process that a test with light programs starts compiles lightly, too.

    Each keeps the programs of its own devices; by JAX only the first process writes any. A program of all of them is
    compiled by the first one, for which the others wait. The key is made of the program: a process that has another one
    does not find it, and compiles its own when it has waited for long enough.
    """
    first = types.SimpleNamespace(global_state=types.SimpleNamespace(process_id=0))
    write, read = module._cache_write, module._cache_read
    module._cache_write = types.FunctionType(write.__code__, {**vars(module), "distributed": first}, write.__name__)

    def wait_and_read(name: str, key: str, options: Any, backend: Any, devices: Any, *others: Any) -> Any:
        found = read(name, key, options, backend, devices, *others)
        processes = {device.process_index for device in devices if device.platform == "cpu"}
        if len(processes) > 1 and backend.process_index() != min(processes):
            end = time.monotonic() + WAIT_S
            while found[0] is None and time.monotonic() < end:
                time.sleep(0.01)
                found = read(name, key, options, backend, devices, *others)
        return found

    module._cache_read = wait_and_read
    asked = os.environ.get(ASKED)  # as the test that starts this process compiles
    if asked and "support.light_compile" not in sys.modules:  # who imports it says how
        from support import light_compile  # which imports `module`

        light_compile.stay_as(asked)


def leave_out_devices(module: Any) -> None:
    """Gives a program one key on all CPU devices and in all processes: given `jax._src.cache_key`, just imported.

    JAX puts the devices and a process's own topology in it. An entry is loaded onto the devices that ask for it.
    """
    plain_options, plain_devices = module._hash_serialized_compile_options, module._hash_accelerator_config

    def hash_options(hash_obj: Any, options: Any, strip_device_assignment: bool = False) -> None:
        plain_options(hash_obj, options, strip_device_assignment=True)

    def hash_devices(hash_obj: Any, devices: Any) -> None:
        if devices.flat[0].platform != "cpu":
            plain_devices(hash_obj, devices)
            return
        kinds = [(device.process_index, device.device_kind) for device in devices.flat]
        first = min(process for process, _ in kinds)
        hash_obj.update(repr([(process - first, kind) for process, kind in kinds]).encode())

    module._hash_serialized_compile_options = hash_options
    module._hash_accelerator_config = hash_devices


def prune(path: Path, now: float) -> None:
    """Removes what nobody has used for two weeks."""
    program_cache.prune(path, now, _KEEP)
