"""Pieces of tables: rows of one file that know where they stand in it, filtered, and cut into lists of equal size."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from recjax.data.arrow import chunk_columns, convert, row_filter, scan
from recjax.data.arrow.row_filter import Condition
from recjax.data.arrow.scan import TableFile
from recjax.data.arrow.wording import Wording
from recjax.errors import DataError
from recjax.settings import items


@dataclasses.dataclass(frozen=True)
class Piece:
    """Rows of one file, in their order.

    Attributes:
      file: the file.
      start: number of the first row in the file, from 0, if the rows are consecutive.
      batch: the rows, a record batch.
      numbers: number of each row in the file, from 0; None: they are consecutive.
    """

    file: TableFile
    start: int
    batch: Any
    numbers: np.ndarray | None = None

    @property
    def rows(self) -> int:
        """Number of rows."""
        return int(self.batch.num_rows)

    def where(self, row: int) -> str:
        """A row in words; rows are counted from 1, without the header."""
        number = self.start + row if self.numbers is None else int(self.numbers[row])
        return f"{self.file} row {number + 1:,}"

    def slice(self, start: int, stop: int) -> Piece:
        """The rows from `start` to below `stop`."""
        numbers = None if self.numbers is None else self.numbers[start:stop]
        return Piece(self.file, self.start + start, self.batch.slice(start, stop - start), numbers)

    def refuse_missing(self, name: str, consequence: str, wording: Wording) -> None:
        """Refuses a row without a value in a column (DataError); `consequence` says what follows from that."""
        values, at = convert.distinct(convert.plain(self.batch[name]))
        missing = np.append(convert.missing(values, "text"), True)[at]
        if missing.any():
            leave_out = wording.option("where", f"{items.quote(name)}!=")
            where = self.where(int(np.argmax(missing)))
            raise DataError(
                f"{where}: column {name!r} has no value, so {consequence}. Leave out such rows: {leave_out}."
            )


def read(
    files: Iterable[TableFile], names: Sequence[str], conditions: Sequence[Condition] = ()
) -> Iterator[tuple[Piece, int]]:
    """The rows of all files that keep to the conditions, with these columns; and how many rows were left out of each.

    Raises:
      DataError: what `scan.batches` raises, or a value that a condition cannot compare: with file, row and column.
    """
    needed = list(dict.fromkeys([*names, *(condition.column for condition in conditions)]))
    for file in files:
        start = 0
        for rows in scan.batches(file, needed):
            piece = Piece(file, start, rows)
            start += rows.num_rows
            if conditions and rows.num_rows:
                piece = _filtered(piece, names, conditions)
            if rows.num_rows:
                yield piece, rows.num_rows - piece.rows


def _filtered(piece: Piece, names: Sequence[str], conditions: Sequence[Condition]) -> Piece:
    import pyarrow as pa

    arrays = {condition.column: piece.batch[condition.column] for condition in conditions}
    keep, bad = row_filter.kept(conditions, arrays, piece.rows)
    if bad is not None:
        condition, wrong = bad
        row = int(np.argmax(wrong))
        value = convert.plain(arrays[condition.column])[row]
        hint = chunk_columns.encoding_hint(value, piece.file.form, Wording.COMMAND.option)
        earlier = Wording.COMMAND.option("where", f"{items.quote(condition.column)}!=VALUE,{condition.text}")
        raise DataError(
            f"{piece.where(row)}: column {condition.column!r} is {chunk_columns.shown(value)}, not {condition.asked} "
            f"that the condition {condition.text} could compare.{hint} Correct the value, or leave "
            f"such rows out by a condition before this one, such as {earlier}."
        )
    batch = piece.batch.select(list(names))
    if keep.all():
        return dataclasses.replace(piece, batch=batch)
    numbers = piece.start + np.flatnonzero(keep)
    return Piece(piece.file, piece.start, batch.filter(pa.array(keep)), numbers)


def regular(pieces: Iterable[Piece], size: int) -> Iterator[list[Piece]]:
    """The same rows in lists of pieces of `size` rows together; the last may have fewer."""
    held: list[Piece] = []
    count = 0
    for piece in pieces:
        while piece.rows:
            taken = min(size - count, piece.rows)
            held.append(piece.slice(0, taken))
            piece = piece.slice(taken, piece.rows)
            count += taken
            if count == size:
                yield held
                held, count = [], 0
    if held:
        yield held


def joined(pieces: Sequence[Piece]) -> dict[str, Any]:
    """The columns of all pieces, as one array each."""
    import pyarrow as pa

    names = pieces[0].batch.schema.names
    if len(pieces) == 1:
        return {name: pieces[0].batch[name] for name in names}
    found = {}
    for name in names:
        parts = [convert.plain(piece.batch[name]) for piece in pieces]
        kinds = {part.type for part in parts}
        found[name] = pa.concat_arrays(parts if len(kinds) == 1 else _alike(parts))
    return found


def _alike(parts: Sequence[Any]) -> list[Any]:
    """Arrays of several types, as files of one folder may have them, as arrays of the one that holds all."""
    import pyarrow as pa

    parts = [convert.decoded(part) for part in parts]
    schema = pa.unify_schemas([pa.schema([("x", part.type)]) for part in parts], promote_options="permissive")
    return [part.cast(schema.field("x").type) for part in parts]


def where(pieces: Sequence[Piece]) -> Callable[[int], str]:
    """Returns what says in words where a row of all pieces together is."""

    def found(row: int) -> str:
        for piece in pieces:
            if row < piece.rows:
                return piece.where(row)
            row -= piece.rows
        raise IndexError(row)

    return found
