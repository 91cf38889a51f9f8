"""Nested dicts of arrays on the disk, written and read a part at a time. The only module that knows Orbax.

Defects and limits of Orbax 0.12.8 that this module deals with:

- It flattens nested keys with ".", so that {"a.b": x} and {"a": {"b": y}} overwrite each other without
  a word. Keys are percent-encoded, the dot too.
- It takes and gives whole arrays, and copies them on the way. `_Parts` writes what Orbax would write (its metadata, and
  each array as zarr chunks in one OCDBT database), but reads two parts of all arrays at a time; TensorStore, on which
  Orbax stands, reads single parts back. (`python benchmarks/checkpoint_cost.py` measures it.)
- It cuts arrays into chunks whose rows divide the array's, which makes chunks of single rows where the number of rows
  is a prime. Here the last chunk may be shorter.
- It compresses, which costs twice the processor time for 8% less of float32 weights.
- It refuses arrays without elements: they are rebuilt from their description.
- Its barriers wait for all processes. Here one process writes alone, and each may read alone.
- It writes a traceback to the log for each error that it also raises.
- It globs its folder, and where a name in the path has brackets or a backslash it finds nothing there and drops all
  arrays without a word; TensorStore refuses paths with "..", or that are no UTF-8. Both get the folder as `Plain`.
  As something else may be lost without a word, `compare` reads back some rows of each array.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jax
import ml_dtypes  # noqa: F401 (makes NumPy know "bfloat16")
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from recjax.train.checkpoint.manifest import CorruptCheckpointError
from recjax.utils import lazy_arrays
from recjax.utils.lazy_arrays import Index, LazyArray, Runs, Spread, as_lazy, joined
from recjax.utils.paths import Plain

# NumPy has no name for a nested dict of arrays, and mypy none for a recursive one that is read back from JSON.
Arrays = dict[str, Any]
Description = dict[str, Any]
Samples = dict[str, list[tuple[Index, np.ndarray]]]  # Orbax's name of an array -> where, and some of its values there

_DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64"),
)


def describe(arrays: Arrays) -> Description:
    """Returns the same nested dict with a string such as "float32[1000,16]" for each array.

    Raises:
      TypeError: a key that is no string or is empty, or a leaf that is no array of a supported type.
    """
    described: Description = {}
    for key, value in arrays.items():
        if not isinstance(key, str) or not key:
            raise TypeError(f"a checkpoint's keys must be non-empty strings, not {key!r}")
        if isinstance(value, dict):
            described[key] = describe(value)
        elif not isinstance(value, (np.ndarray, LazyArray, Spread)):
            raise TypeError(f"{key!r} is a {type(value).__name__}, not a NumPy array: copy it to the host first")
        elif value.dtype.name not in _DTYPES or not value.dtype.isnative:
            raise TypeError(f"{key!r} has dtype {value.dtype.str}; checkpoints hold {', '.join(_DTYPES)}")
        else:
            described[key] = f"{value.dtype.name}[{','.join(map(str, value.shape))}]"
    return described


def size_bytes(arrays: Arrays) -> int:
    """Sums the bytes of all arrays."""
    return sum(size_bytes(value) if isinstance(value, dict) else int(value.nbytes) for value in arrays.values())


def parted(arrays: Arrays) -> tuple[Arrays, Arrays]:
    """Separates the arrays that this process holds whole from its pieces of the others (`lazy_arrays.Spread`).

    Returns:
      Two nested dicts, without empty ones: whole arrays under their keys, and pieces under "0", "1", ... below the key
      of their array, those of scattered rows with their `Runs.rows_Kx2` under "0 rows" and so on.
    """
    whole: Arrays = {}
    pieces: Arrays = {}
    for key, value in arrays.items():
        if isinstance(value, Spread):
            mine: Arrays = {}
            for number, (at, piece) in enumerate(value.pieces):
                mine |= {str(number): piece} | ({_rows(number): at.rows_Kx2} if isinstance(at, Runs) else {})
            pieces |= {key: mine} if mine else {}
        elif isinstance(value, dict):
            below = parted(value)
            for found, part in zip((whole, pieces), below, strict=True):
                found |= {key: part} if part else {}
        else:
            whole[key] = value
    return whole, pieces


def _rows(number: int) -> str:
    """The key of the runs of rows of a piece."""
    return f"{number} rows"


def corners(arrays: Arrays) -> Description:
    """Returns the least index and the shape of every piece that this process holds, nested as by `parted`.

    Of a piece of scattered rows that is without the first axis, and the number of its runs of rows comes third.
    """
    found: Description = {}
    for key, value in arrays.items():
        if isinstance(value, dict):
            found |= {key: below} if (below := corners(value)) else {}
        elif isinstance(value, Spread) and value.pieces:
            found[key] = [
                [list(at.corner), list(piece.shape), len(at.rows_Kx2)]
                if isinstance(at, Runs)
                else [list(at), list(piece.shape)]
                for at, piece in value.pieces
            ]
    return found


def write(folder: Path, arrays: Arrays) -> Samples:
    """Writes NumPy or lazy arrays into the new folder `folder`. They must not change until this returns.

    Returns:
      Some rows of each array, for `compare`.

    Raises:
      OSError: the disk is full or refuses.
    """
    samples: Samples = {}
    try:
        with Plain(folder.parent) as parent, _orbax(samples) as orbax:
            orbax.save(parent.path / folder.name, args=ocp.args.PyTreeSave(_encoded(arrays)))
    except OSError:
        raise
    except Exception as error:
        # TensorStore raises ValueError with the system's error number in the text.
        if number := re.search(r"os_error_code='(\d+)'", str(error)):
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
        raise
    return samples


def compare(folder: Path, arrays: Arrays, samples: Samples) -> None:
    """Reads back each array's type and shape, its first row and its last, and compares them with what was written.

    Args:
      folder: as for `write`.
      arrays: as for `write`; their values are not looked at, and may have changed meanwhile.
      samples: what `write` returned.

    Raises:
      CorruptCheckpointError: an array is not there, or holds something else.
    """
    try:
        found = _flat(read(folder, describe(arrays)))
    except (OSError, ValueError) as error:
        raise CorruptCheckpointError(str(error)) from error
    for name, array in found.items():
        if array.nbytes and name not in samples:
            raise CorruptCheckpointError(f"array {name!r} was not written")
        for index, values in samples.get(name, ()):
            if array.read(index).tobytes() != values.tobytes():
                row = f"row {index[0].start} of " if index else ""
                raise CorruptCheckpointError(f"{row}array {name!r} reads back as something else than was written")


def _flat(arrays: Arrays, path: tuple[str, ...] = ()) -> dict[str, LazyArray]:
    """Returns lazy arrays by Orbax's names for them."""
    found: dict[str, LazyArray] = {}
    for key, value in arrays.items():
        inner = (*path, _encode(key))
        found |= _flat(value, inner) if isinstance(value, dict) else {".".join(inner): value}
    return found


def read(folder: Path, described: Description, parts: Sequence[tuple[Path, Description]] = ()) -> Arrays:
    """Opens the arrays of `write` as lazy arrays: the folders must not change before they are read.

    Args:
      folder: the folder.
      described: the result of `describe` for the arrays.
      parts: folders beside it with pieces of arrays, each with the result of `corners` for them. Arrays that lie there
        in pieces are not in `folder`.

    Raises:
      OSError: there is no such folder.
      ValueError: a folder holds something else.
    """
    context = ts.Context()  # one for all arrays, and without a cache: nothing is read twice
    parent = Plain(folder.parent)  # open as long as a lazy array needs it
    opened = [
        (_opened(_Store(parent, path.name, context), (), _of_pieces(described, found)), found) for path, found in parts
    ]
    return _joined(_Store(parent, folder.name, context), (), described, opened)


def _of_pieces(described: Description, found: Description) -> Description:
    """Describes the pieces of a folder, as `describe` does arrays."""
    made: Description = {}
    for key, value in found.items():
        if isinstance(value, dict):
            made[key] = _of_pieces(described[key], value)
        else:
            dtype = described[key].partition("[")[0]
            made[key] = {str(n): f"{dtype}[{','.join(map(str, shape))}]" for n, (_, shape, *_) in enumerate(value)}
            made[key] |= {_rows(n): f"int64[{runs[0]},2]" for n, (_, _, *runs) in enumerate(value) if runs}
    return made


@dataclasses.dataclass(frozen=True)
class _Store:
    """A folder that Orbax wrote, with the open folder around it and TensorStore's context."""

    parent: Plain
    name: str
    context: ts.Context


def _joined(
    store: _Store, path: tuple[str, ...], described: Description, opened: Sequence[tuple[Arrays, Description]]
) -> Arrays:
    arrays: Arrays = {}
    for key, text in described.items():
        parts = [(held[key], found[key]) for held, found in opened if key in found]
        if isinstance(text, dict):
            arrays[key] = _joined(store, (*path, _encode(key)), text, parts)
        elif parts:
            dtype, shape = _parsed(text)
            pieces = [
                (Runs(held[_rows(n)].load(), tuple(corner)) if runs else tuple(corner), held[str(n)])
                for held, found in parts
                for n, (corner, _, *runs) in enumerate(found)
            ]
            arrays[key] = joined(shape, dtype, pieces)
        else:
            arrays |= _opened(store, path, {key: text})
    return arrays


def _parsed(text: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Returns the dtype and shape of an array from the text of `describe`."""
    name, _, rest = text.partition("[")
    return np.dtype(name), tuple(int(size) for size in rest.rstrip("]").split(",") if size)


class _Parts(ocp.type_handlers.NumpyHandler):
    """Writes lazy arrays as Orbax writes NumPy arrays, but holds two parts in memory at a time instead of all.

    Keeps some rows of each array in `samples`, by the array's name.
    """

    def __init__(self, samples: Samples) -> None:
        super().__init__()
        self._samples = samples

    async def serialize(
        self,
        values: Sequence[LazyArray],
        infos: Sequence[ocp.type_handlers.ParamInfo],
        args: Sequence[ocp.SaveArgs] | None = None,
    ) -> list[ocp.future.Future]:
        """Writes the arrays. All is written when it returns, so that no thread writes on after an error."""
        opening = []
        for array, info in zip(values, infos, strict=True):
            await info.await_path_creation()
            spec = ocp.type_handlers.get_json_tspec_write(
                info, info.is_ocdbt_checkpoint, array.shape, array.shape, array.dtype, jax.process_index()
            )
            spec["metadata"]["chunks"] = array.block
            opening.append(ts.open(ts.Spec(spec), create=True, open=True, context=info.ts_context))
        _finish(opening)
        before: list[ts.WriteFutures] = []
        writing: list[ts.WriteFutures] = []
        size = 0
        try:
            for array, info, store in zip(values, infos, opening, strict=True):
                for part in array.parts():
                    # It writes by itself from here on, and the next part is read meanwhile.
                    piece = array.read(part)
                    _note(self._samples.setdefault(info.name, []), part, piece)
                    writing.append(store.result()[part].write(piece, can_reference_source_data_indefinitely=True))
                    size += piece.nbytes
                    if size >= lazy_arrays.PART_BYTES:
                        _finish(before)
                        before, writing, size = writing, [], 0
        finally:
            _finish(before + writing)
        return []


def _note(samples: list[tuple[Index, np.ndarray]], part: Index, piece: np.ndarray) -> None:
    """Keeps copies of the first row of an array's first part and of the last row of its last one so far."""
    if not part:  # a single number
        samples.append((part, piece.copy()))
        return
    if not samples:
        samples.append(((_row(part[0].start), *part[1:]), piece[:1].copy()))
    samples[1:] = [((_row(part[0].stop - 1), *part[1:]), piece[-1:].copy())]


def _row(row: int) -> slice:
    return slice(row, row + 1)


def _finish(futures: Sequence[ts.Future[Any] | ts.WriteFutures]) -> None:
    """Waits for all futures, then raises the first error."""
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise errors[0]


@contextlib.contextmanager
def _orbax(samples: Samples) -> Iterator[ocp.Checkpointer]:
    me = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"recjax{me}"
    )
    handlers = ocp.type_handlers.create_type_handler_registry(
        (LazyArray, _Parts(samples)),
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


def _not_from_orbax(record: logging.LogRecord) -> bool:
    return f"{os.sep}orbax{os.sep}" not in record.pathname


def _encode(key: str) -> str:
    return quote(key, safe="").replace(".", "%2E")


def _encoded(arrays: Arrays) -> Arrays:
    return {
        _encode(key): _encoded(value) if isinstance(value, dict) else as_lazy(value)
        for key, value in arrays.items()
        if isinstance(value, dict) or value.nbytes
    }


def _opened(store: _Store, path: tuple[str, ...], described: Description) -> Arrays:
    arrays: Arrays = {}
    for key, text in described.items():
        inner = (*path, _encode(key))
        if isinstance(text, dict):
            arrays[key] = _opened(store, inner, text)
            continue
        dtype, shape = _parsed(text)
        arrays[key] = as_lazy(np.zeros(shape, dtype)) if 0 in shape else _open(store, ".".join(inner))
        if arrays[key].dtype != dtype or arrays[key].shape != shape:
            raise ValueError(f"array {key!r} should be {text}")
    return arrays


def _open(at: _Store, name: str) -> LazyArray:
    """Opens one array of an Orbax checkpoint; `name` is its keys with dots between them."""
    base = {"driver": "file", "path": f"{at.parent.path}/{at.name}/"}
    database = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
    spec = {"driver": "zarr", "kvstore": database, "recheck_cached_data": False, "fill_missing_data_reads": False}
    try:
        store = ts.open(ts.Spec(spec), open=True, read=True, context=at.context).result()
    except ValueError as error:
        raise ValueError(f"array {name!r} of {at.name}: {_short(error)}") from error

    def part(index: Index) -> np.ndarray:
        assert at.parent  # whose name is good as long as somebody can read
        try:
            return np.asarray(store[index].read().result())
        except (OSError, ValueError) as error:
            raise CorruptCheckpointError(f"array {name!r} cannot be read: {_short(error)}") from error

    block = tuple(int(length or 1) for length in store.chunk_layout.read_chunk.shape or ())  # a scalar has none
    return LazyArray(store.shape, store.dtype.numpy_dtype, part, block)


def _short(error: Exception) -> str:
    """Shortens an error of TensorStore: leaves out its specification and the temporary name of a folder."""
    text = re.sub(r"\s*\[\w+=.*", "", str(error), flags=re.DOTALL)
    return re.sub(r"/proc/self/fd/\d+/", "", text)
