"""Rows with labels that a run has not seen, encoded as those that trained, in place of its test split."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from recjax.data.arrow import scan
from recjax.data.arrow.reader import LabelledReader
from recjax.data.arrow.spool import is_table, spool
from recjax.data.batch import Batch, Rows
from recjax.data.prepare.chunk import Chunk, Coded
from recjax.data.prepare.encoder import Encoder, open_encoder
from recjax.data.source import BLOCK_ROWS, between
from recjax.data.storage import run_snapshot
from recjax.data.storage.blocks import PreparedSource, open_prepared, write_prepared
from recjax.errors import ConfigError, DataError
from recjax.serving import table_rows
from recjax.settings.from_python import short

_SPLIT = "test"


class WithRows(PreparedSource):
    """Data that a run kept, with other rows as the test split.

    Attributes:
      missing: column -> share of the rows that lack its value; of jagged ones, of their entries.
    """

    def __init__(self, trained: PreparedSource, rows: PreparedSource, missing: Mapping[str, float]) -> None:
        """`rows` has the test split."""
        super().__init__(trained.path, trained.manifest)
        self._rows, self.missing = rows, missing

    def row_counts(self, split: str) -> np.ndarray:
        """See `PreparedSource`."""
        return self._rows.row_counts(split) if split == _SPLIT else super().row_counts(split)

    def read(self, split: str, index: int) -> Batch:
        """See `PreparedSource`."""
        return self._rows.read(split, index) if split == _SPLIT else super().read(split, index)

    def rows(self, split: str, pack: bool = False) -> Rows | None:
        """See `PreparedSource`; the test split is read but once, and not packed for that."""
        return None if split == _SPLIT else super().rows(split, pack)


@contextlib.contextmanager
def with_rows(kept: Path, given: Any, encoding: str = "") -> Iterator[WithRows]:
    """The data of a run with rows of a table as the test split.

    Args:
      kept: what the run kept of its data.
      given: a table in Python as `recjax.prepare` takes it, or the path of a Parquet, ORC, CSV or Arrow file.
      encoding: of CSV; "": that of the files that trained.

    Raises:
      ConfigError: the run was not trained on a table of one's own, or `given` is no table.
      DataError: the rows are at fault, or lack a label: with file, row and column.
    """
    source = run_snapshot.open_snapshot(kept)
    if source is None or "table" not in source.about:
        name = "its data" if source is None else source.name
        raise ConfigError(
            f"rows to evaluate are read for runs on a table of one's own, and this one was trained on {name}. Prepare "
            "them as its data were, and give the folder as data.path."
        )
    with tempfile.TemporaryDirectory(prefix="recjax-evaluate-") as name:
        folder = Path(name)
        if isinstance(given, (str, os.PathLike)):
            encoding = table_rows.encoding_of(source.about, encoding)
            files = [dataclasses.replace(file, encoding=encoding) for file in scan.find(given)]
        elif is_table(given):
            files = [spool(given, folder / "rows.arrow", "the table")]
        else:
            raise ConfigError(f"evaluate needs a table or the path of a file as input, not {short(given)}.")
        lacking, reader = _Missing(), LabelledReader(files, source)
        blocks = _blocks(reader, open_encoder(source.path), lacking)
        made = write_prepared(folder / "rows", source.name, source.schema, {_SPLIT: blocks}, {})
        if not made.row_counts(_SPLIT).sum():
            raise DataError(f"{files[0]} has no rows to evaluate. Give a table with rows.")
        yield WithRows(source, open_prepared(made.path), lacking.shares())


class _Missing:
    """Counts missing values."""

    def __init__(self) -> None:
        """None yet."""
        self._counts: collections.Counter[str] = collections.Counter()
        self._totals: collections.Counter[str] = collections.Counter()

    def add(self, chunk: Chunk, dense: Sequence[str]) -> None:
        """Takes in rows whose dense columns have these names."""
        marks = {name: np.isnan(chunk.dense[:, number]) for number, name in enumerate(dense)}
        for name, column in chunk.columns.items():
            if isinstance(column, Coded):
                marks[name] = column.codes == len(column.values)
            else:
                marks[name] = np.zeros(len(column.keys), bool) if column.missing is None else column.missing
        for name, of_column in marks.items():
            self._counts[name] += int(of_column.sum())
            self._totals[name] += len(of_column)

    def shares(self) -> dict[str, float]:
        """Column -> share of its values that are missing."""
        return {name: self._counts[name] / total for name, total in self._totals.items() if total}


def _blocks(reader: LabelledReader, encoder: Encoder, missing: _Missing) -> Iterator[Batch]:
    """The rows of files, encoded; `missing` counts values that they lack."""
    for chunk in reader.chunks(0):
        missing.add(chunk, reader.dense)
        whole = encoder.encode(chunk)
        for start in range(0, whole.size, BLOCK_ROWS):
            yield between(whole, start, min(start + BLOCK_ROWS, whole.size))
