"""Rows with labels that a run has not seen, encoded as those that trained, in place of its test split."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from recjax.data.arrow import chunk_columns, convert, labels, pieces, roles, scan
from recjax.data.arrow.label import Label
from recjax.data.arrow.pieces import Piece
from recjax.data.arrow.scan import TableFile
from recjax.data.arrow.spool import is_table, spool
from recjax.data.arrow.wording import Wording
from recjax.data.batch import Batch
from recjax.data.prepare.chunk import Chunk
from recjax.data.prepare.encoder import Encoder, open_encoder
from recjax.data.source import BLOCK_ROWS, between
from recjax.data.storage import run_snapshot
from recjax.data.storage.blocks import PreparedSource, open_prepared, write_prepared
from recjax.errors import ConfigError, DataError
from recjax.serving import table_rows
from recjax.settings.from_python import short

_ROWS = 2**16  # that are encoded together
_SPLIT = "test"


class WithRows(PreparedSource):
    """Data that a run kept, with other rows as the test split."""

    def __init__(self, kept: PreparedSource, rows: PreparedSource) -> None:
        """`rows` has the test split."""
        super().__init__(kept.path, kept.manifest)
        self._rows = rows

    def row_counts(self, split: str) -> np.ndarray:
        """See `PreparedSource`."""
        return self._rows.row_counts(split) if split == _SPLIT else super().row_counts(split)

    def read(self, split: str, index: int) -> Batch:
        """See `PreparedSource`."""
        return self._rows.read(split, index) if split == _SPLIT else super().read(split, index)


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
        encoder = open_encoder(source.path)
        blocks = (block for file in files for block in _blocks(file, source, encoder))
        made = write_prepared(folder / "rows", source.name, source.schema, {_SPLIT: blocks}, {})
        if not made.row_counts(_SPLIT).sum():
            raise DataError(f"{files[0]} has no rows to evaluate. Give a table with rows.")
        yield WithRows(source, open_prepared(made.path))


def _blocks(file: TableFile, source: PreparedSource, encoder: Encoder) -> Iterator[Batch]:
    """The rows of a file, encoded."""
    described: Mapping[str, Any] = source.about["table"]
    specs, meanings = roles.from_json(described), _labels(source)
    conditions, names = table_rows.conditions_of(described), scan.schema(file).names
    needed = list(dict.fromkeys([*(n for spec in specs for n in spec.columns), *meanings.columns]))
    for name in [*needed, *(condition.column for condition in conditions)]:
        if name not in names:
            raise DataError(
                f"{file} has no column {name!r}. It has {', '.join(map(repr, names))[:300]}. Rows to evaluate need all "
                "columns that trained, and the label."
            )
    read = (piece for piece, _ in pieces.read([file], needed, conditions) if piece.rows)
    for held in pieces.regular(read, _ROWS):
        whole = _encoded(held, specs, meanings, encoder)
        for start in range(0, whole.size, BLOCK_ROWS):
            yield between(whole, start, min(start + BLOCK_ROWS, whole.size))


def _encoded(held: list[Piece], specs: list[roles.ColumnSpec], meanings: labels.Labels, encoder: Encoder) -> Batch:
    arrays, rows = pieces.joined(held), sum(piece.rows for piece in held)
    found = chunk_columns.raw_columns(arrays, specs, rows)
    labels_nxT, weights_nxT, wrong = meanings.of(arrays)
    if first := chunk_columns.first([*found.faults, *wrong], arrays):
        at, fault, what = first
        value = convert.plain(arrays[fault.column])[at]
        hint = chunk_columns.encoding_hint(value, held[0].file.form, Wording.CONFIG.option)
        raise DataError(f"{pieces.where(held)(at)}: {what}.{hint} Correct the value.")
    if found.weights is not None:
        weights_nxT = weights_nxT * found.weights[:, None]
    if not encoder.schema.labels:
        labels_nxT, weights_nxT = labels_nxT[:, 0], weights_nxT[:, 0]
    return encoder.encode(Chunk(labels_nxT, found.dense, found.columns, np.zeros(rows, np.uint8), weights_nxT))


def _labels(source: PreparedSource) -> labels.Labels:
    """The labels as the data were prepared with them."""
    described = source.about["table"].get("labels")
    if described is None:
        options = source.about["options"]
        return labels.Labels((labels.Column(Label(options["label"], options["threshold"], options["positive"])),))
    each = [
        dict(one) | {"meaning": Label(**one["meaning"]), "classes": tuple(one.get("classes", ()))} for one in described
    ]
    return labels.Labels(tuple(labels.Column(**one) for one in each))
