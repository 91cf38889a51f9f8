"""Folder in which a command keeps the programs that it compiles, for the next one."""

from __future__ import annotations

import os
import time

from recjax.utils import log, program_cache
from recjax.utils.paths import located

CHOICE = "RECJAX_PROGRAMS"  # a folder, or "off"
_KEEP_S = 30 * program_cache.DAY
# Below it reading costs as much as compiling. JAX's own bound is a second: a small model's start, some sixteen programs
# of 0.1 to 1 s, would find one of them
_LEAST_COMPILE_S = 0.1


def keep_programs() -> None:
    """Has JAX take programs from the user's cache folder, and put there what took it a tenth of a second to compile.

    $RECJAX_PROGRAMS names another folder, or is "off". Where the user has configured JAX itself
    (JAX_COMPILATION_CACHE_DIR, JAX_ENABLE_COMPILATION_CACHE, JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS), that holds.
    In a folder that cannot be written nothing is kept, which costs time alone. A program belongs to a version of JAX, a
    processor and a number of cores; and to the source that it came from, since profiles are read by its scopes.
    """
    import jax
    from jax._src import compilation_cache  # there is no public way to have entries written whole

    from recjax.data.storage.remote import cache_folder

    choice = os.environ.get(CHOICE, "")
    configured = jax.config.values["jax_compilation_cache_dir"] or not jax.config.values["jax_enable_compilation_cache"]
    if choice == "off" or configured:
        return
    top = located(choice) if choice else cache_folder() / "programs"
    folder = top / program_cache.folder_name(str(os.cpu_count()), os.environ.get("NPROC", ""))
    program_cache.prune(top, time.time(), _KEEP_S)  # which removes empty folders, too
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        log.info(f"note: compiled programs are not kept: {top}: {error.strerror}")
        return
    program_cache.install(compilation_cache)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", _LEAST_COMPILE_S)
