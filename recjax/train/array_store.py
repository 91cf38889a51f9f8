"""Nested dicts of NumPy arrays on the disk. The only module that knows Orbax.

What was found with Orbax 0.12.8, and is dealt with here:

- It flattens nested keys with ".", so that {"a.b": x} and {"a": {"b": y}} overwrite each other without
  a word. Keys are percent-encoded, the dot too.
- It copies every array before it writes (here the caller promises not to touch them), and it compresses (8% less
  of float32 weights): with that a save of 1 GiB takes 2 GiB more memory and twice the processor time.
- One chunk per array makes a restore hold a second copy of the largest: chunks are cut to 64 MiB.
  (`python tests/benchmarks/checkpoint_cost.py` measures both.)
- It refuses arrays without elements: they are rebuilt from their description.
- Its barriers wait for all processes. Here one process writes alone, and each may read alone.
- It writes a traceback to the log for each error that it also raises.
- After a save that failed, the other arrays' failures are told as well, some to an event loop that is closed by then:
  more tracebacks on standard error.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jax
import ml_dtypes  # noqa: F401 (makes NumPy know "bfloat16")
import numpy as np
import orbax.checkpoint as ocp

# NumPy has no name for a nested dict of arrays, and mypy none for a recursive one that is read back from JSON.
Arrays = dict[str, Any]
Description = dict[str, Any]

_CHUNK_BYTES = 64 * 2**20
_DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64"),
)


def describe(arrays: Arrays) -> Description:
    """The same nested dict with a string such as "float32[1000,16]" for each array.

    Raises:
      TypeError: a key that is no string or is empty, or a leaf that is no array of a supported type.
    """
    described: Description = {}
    for key, value in arrays.items():
        if not isinstance(key, str) or not key:
            raise TypeError(f"a checkpoint's keys must be non-empty strings, not {key!r}")
        if isinstance(value, dict):
            described[key] = describe(value)
        elif not isinstance(value, np.ndarray):
            raise TypeError(f"{key!r} is a {type(value).__name__}, not a NumPy array: copy it to the host first")
        elif value.dtype.name not in _DTYPES or not value.dtype.isnative:
            raise TypeError(f"{key!r} has dtype {value.dtype.str}; checkpoints hold {', '.join(_DTYPES)}")
        else:
            described[key] = f"{value.dtype.name}[{','.join(map(str, value.shape))}]"
    return described


def size_bytes(arrays: Arrays) -> int:
    """Bytes of all arrays together."""
    return sum(size_bytes(value) if isinstance(value, dict) else int(value.nbytes) for value in arrays.values())


def write(folder: Path, arrays: Arrays) -> None:
    """Writes `arrays` into the new folder `folder`; nobody may change them until this returns.

    Raises:
      OSError: the disk is full or refuses.
    """
    _ignore_late_results()
    encoded = _encoded(arrays)
    save_args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES), encoded)
    try:
        with _orbax() as orbax:
            orbax.save(folder.absolute(), args=ocp.args.PyTreeSave(encoded, save_args=save_args))
    except OSError:
        raise
    except Exception as error:
        # TensorStore raises ValueError with the system's error number in the text.
        if number := re.search(r"os_error_code='(\d+)'", str(error)):
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
        raise


def read(folder: Path, described: Description) -> Arrays:
    """Reads what `write` wrote.

    Args:
      folder: the folder.
      described: what `describe` said of the arrays.

    Raises:
      ValueError: the folder holds something else.
    """
    with _orbax() as orbax:
        return _decoded(orbax.restore(folder.absolute()), described)


@contextlib.contextmanager
def _orbax() -> Iterator[ocp.Checkpointer]:
    me = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"recjax{me}"
    )
    handlers = ocp.type_handlers.create_type_handler_registry(
        (np.ndarray, ocp.type_handlers.NumpyHandler(deepcopy_host_arrays=False)),
        (jax.Array, ocp.type_handlers.ArrayHandler()),  # unused; without it Orbax logs a warning
    )
    handler = ocp.PyTreeCheckpointHandler(
        use_compression=False, type_handler_registry=handlers, multiprocessing_options=alone
    )
    log = logging.getLogger("absl")
    log.addFilter(_not_from_orbax)
    try:
        with ocp.Checkpointer(handler, multiprocessing_options=alone) as checkpointer:
            yield checkpointer
    finally:
        log.removeFilter(_not_from_orbax)


@functools.cache  # once in a process: they may come after `write` has returned
def _ignore_late_results() -> None:
    before = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            before(unraisable)

    sys.unraisablehook = hook
    logging.getLogger("asyncio").addFilter(lambda record: " in OCDBT database at " not in record.getMessage())


def _not_from_orbax(record: logging.LogRecord) -> bool:
    return f"{os.sep}orbax{os.sep}" not in record.pathname


def _encode(key: str) -> str:
    return quote(key, safe="").replace(".", "%2E")


def _encoded(arrays: Arrays) -> Arrays:
    return {
        _encode(key): _encoded(value) if isinstance(value, dict) else value
        for key, value in arrays.items()
        if isinstance(value, dict) or value.size
    }


def _decoded(stored: Arrays, described: Description) -> Arrays:
    arrays: Arrays = {}
    for key, text in described.items():
        if isinstance(text, dict):
            arrays[key] = _decoded(stored.get(_encode(key)) or {}, text)
            continue
        dtype, _, rest = text.partition("[")
        shape = tuple(int(size) for size in rest.rstrip("]").split(",") if size)
        array = np.zeros(shape, dtype) if 0 in shape else stored.get(_encode(key))
        if not isinstance(array, np.ndarray) or array.dtype != np.dtype(dtype) or array.shape != shape:
            raise ValueError(f"array {key!r} should be {text}")
        arrays[key] = array
    return arrays
