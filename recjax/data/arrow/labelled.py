"""Rows of a table with labels, read by the columns and labels of data that were prepared before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from recjax.data import batch
from recjax.data.arrow import chunk_columns, convert, labels, pieces, roles, row_filter, scan
from recjax.data.arrow.label import Label
from recjax.data.arrow.pieces import Piece
from recjax.data.arrow.scan import TableFile
from recjax.data.arrow.wording import Wording
from recjax.data.prepare.chunk import Chunk
from recjax.data.storage.blocks import PreparedSource
from recjax.data.text.source_files import sha256
from recjax.errors import DataError

_CHUNK_ROWS = 2**16  # that are encoded together


class LabelledReader:
    """Hands labelled rows to an encoder, or to a preparation (a `recjax.data.prepare.chunk.Reader`), all as training.

    Attributes:
      specs: the columns, as the earlier data have them.
    """

    name = "table"
    splits = "all rows train"

    def __init__(self, files: Sequence[TableFile], trained: PreparedSource) -> None:
        """Checks that the files have the columns.

        Args:
          files: with the rows.
          trained: the data that were prepared before, or what a run kept of them.

        Raises:
          DataError: a column is missing.
        """
        described: Mapping[str, Any] = trained.about["table"]
        self._files, self._meanings = files, _labels(trained)
        self.specs = roles.from_json(described)
        self._conditions = row_filter.parse(described.get("where", {}).get("conditions", ()))
        self._needed = list(dict.fromkeys([*(n for spec in self.specs for n in spec.columns), *self._meanings.columns]))
        self.label: str = trained.about.get("label", "")
        self.labels: tuple[batch.Label, ...] = trained.schema.labels
        self.features = [spec.feature for spec in self.specs if spec.is_feature]
        self.dense = tuple(chunk_columns.each(self.specs))
        for file in files:
            names = scan.schema(file).names
            for name in [*self._needed, *(condition.column for condition in self._conditions)]:
                if name not in names:
                    raise DataError(
                        f"{file} has no column {name!r}. It has {', '.join(map(repr, names))[:300]}. These rows need "
                        "all columns that trained, and the label."
                    )

    def files(self) -> dict[str, str]:
        """File name -> sha256 of every file."""
        return {file.title or str(file.path): sha256(file.path) for file in self._files}

    def chunks(self, start: int) -> Iterator[Chunk]:
        """Chunk number `start` and all later ones.

        Raises:
          DataError: a value is at fault, or a label is missing: with file, row and column.
        """
        read = (piece for piece, _ in pieces.read(self._files, self._needed, self._conditions) if piece.rows)
        for number, together in enumerate(pieces.regular(read, _CHUNK_ROWS)):
            if number >= start:
                yield self._chunk(together)

    def _chunk(self, together: list[Piece]) -> Chunk:
        arrays, rows = pieces.joined(together), sum(piece.rows for piece in together)
        columns = chunk_columns.raw_columns(arrays, self.specs, rows)
        labels_nxT, weights_nxT, wrong = self._meanings.of(arrays)
        if first := chunk_columns.first([*columns.faults, *wrong], arrays):
            at, fault, what = first
            value = convert.plain(arrays[fault.column])[at]
            hint = chunk_columns.encoding_hint(value, together[0].file.form, Wording.CONFIG.option)
            raise DataError(f"{pieces.where(together)(at)}: {what}.{hint} Correct the value.")
        if columns.weights is not None:
            weights_nxT = weights_nxT * columns.weights[:, None]
        if not self.labels:
            labels_nxT, weights_nxT = labels_nxT[:, 0], weights_nxT[:, 0]
        return Chunk(labels_nxT, columns.dense, columns.columns, np.zeros(rows, np.uint8), weights_nxT)


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
