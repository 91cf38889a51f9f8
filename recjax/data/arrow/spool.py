"""Tables from Python as a file, by which they are read like any other: out of memory, twice, and with a checksum."""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from recjax.data.arrow import convert
from recjax.data.arrow.scan import TableFile
from recjax.errors import DataError, TrainingError
from recjax.utils.text import first_repeated

_ROWS = 2**16  # of a batch in the file
_INDEX = re.compile(r"__index_level_\d+__")  # a column that pandas makes of an index without a name


def is_table(data: Any) -> bool:
    """Returns whether data from Python are a table: whatever hands out Arrow batches, or a dict of arrays."""
    return hasattr(data, "__arrow_c_stream__") or isinstance(data, Mapping) or _is_hf(data)


def _is_hf(data: Any) -> bool:
    """Returns whether it is a dataset of Hugging Face's library, which hands out Arrow in a way of its own."""
    return all(hasattr(data, name) for name in ("with_format", "iter", "features"))


@contextlib.contextmanager
def folder_beside(out: Path) -> Iterator[Path]:
    """A folder for files of tables, on the disk of `out`, that is gone afterwards.

    Raises:
      TrainingError: it cannot be made.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        made = tempfile.TemporaryDirectory(prefix=f".{out.name}.table-", dir=out.parent)
    except OSError as error:
        raise TrainingError(f"cannot write to {out.parent}: {error.strerror}. Choose another place.") from error
    with made as name:
        yield Path(name)


def spool(data: Any, path: Path, title: str) -> TableFile:
    """Writes a table to a file.

    Args:
      data: whatever has `__arrow_c_stream__` (pandas, polars, DuckDB, tables and readers of pyarrow), HF datasets; or a
        dict from column names to arrays or lists, [n], or [n, width] for a vector.
      path: the file to write.
      title: what messages call the table.

    Raises:
      DataError: it is no table.
      TrainingError: the file cannot be written.
    """
    import pyarrow as pa

    reader = _reader(data, title)
    names = [name for name in reader.schema.names if not _INDEX.fullmatch(name)]
    if (twice := first_repeated(names)) is not None:
        raise DataError(f"{title} has two columns {twice!r}. Rename one of them.")
    empty = reader.schema.empty_table()
    schema = pa.schema([(name, convert.decoded(empty[name]).type) for name in names])
    try:
        with pa.ipc.new_file(path, schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as file:
            for batch in reader:
                for start in range(0, batch.num_rows, _ROWS):
                    part = batch.slice(start, _ROWS)
                    arrays = [convert.decoded(part[name]) for name in names]
                    file.write_batch(pa.record_batch(arrays, schema=schema))
    except OSError as error:
        raise TrainingError(
            f"{title} cannot be written to {path.parent} ({error.strerror or error}). Make space there, or choose "
            "another place for the prepared data."
        ) from error
    except pa.ArrowException as error:
        raise DataError(f"{title} cannot be read ({' '.join(str(error).split())[:200].rstrip('.')}).") from None
    return TableFile(path, "arrow", title=title)


def _reader(data: Any, title: str) -> Any:
    """A reader of record batches."""
    import pyarrow as pa

    try:
        if hasattr(data, "__arrow_c_stream__"):
            return pa.RecordBatchReader.from_stream(data)
        if _is_hf(data):
            batches = (batch for part in data.with_format("arrow").iter(_ROWS) for batch in part.to_batches())
            return pa.RecordBatchReader.from_batches(data.features.arrow_schema, batches)
        if isinstance(data, Mapping):
            if tables := [name for name, values in data.items() if is_table(values)]:
                raise DataError(
                    f"{title} is a dict of tables ({tables[0]!r} is one). Give the table that trains, and others as "
                    "validation= and test=."
                )
            return pa.table({str(name): _column(values) for name, values in data.items()}).to_reader()
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise DataError(
            f"{title} is no table that Arrow takes ({' '.join(str(error).split())[:200].rstrip('.')}). Give each "
            "column values of one type, and all columns equally many."
        ) from None
    raise DataError(
        f"{title} is of the type {type(data).__name__}, which hands out no Arrow batches. Give a frame of pandas 2.2 "
        "or later, polars, DuckDB, an HF dataset, a table of pyarrow, a dict of arrays, or the path of a file."
    )


def _column(values: Any) -> Any:
    import pyarrow as pa

    array = np.asarray(values) if hasattr(values, "__array__") else None
    if array is not None and array.ndim == 2:
        return pa.FixedSizeListArray.from_arrays(pa.array(array.ravel()), array.shape[1])
    if isinstance(values, np.ma.MaskedArray) or array is None:
        return pa.array(values)
    return pa.array(array, from_pandas=True)  # NaN and None are null
