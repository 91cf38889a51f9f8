"""Embedding tables of a checkpoint by the ids of the raw data, read from its files when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from recjax.data.original_ids import OriginalIds
from recjax.embedding.row_order import RowOrder
from recjax.errors import ConfigError, NoSuchName, TrainingError
from recjax.settings.values import either
from recjax.train.checkpoint.manifest import CorruptCheckpointError
from recjax.train.table_specs import nearest_names
from recjax.utils import html
from recjax.utils.lazy_arrays import LazyArray

Measure = Literal["cosine", "dot"]
_MEASURES = ("cosine", "dot")
_WIDENED = 2**16  # rows of a block in float64 at a time


class Neighbour(NamedTuple):
    """A row near another.

    Attributes:
      id: of the raw data.
      similarity: by the measure that was asked for.
    """

    id: Any
    similarity: float


class Table:
    """One embedding table. Nothing of it stays in memory: every call reads what it needs.

    A checkpoint keeps a table in blocks of at most 64 MiB, and a block is read as a whole: a few rows cost a block
    each at most, in time; and no call holds more of a table than a block or two beside its result.

    Attributes:
      name: of the table.
      num_rows: V, with the rows of unknown and missing values.
      dim: D.
    """

    def __init__(self, name: str, array: LazyArray, ids: OriginalIds, where: str) -> None:
        """A table whose rows `array` has in storage order; `where` names the checkpoint in messages."""
        self.name, self.num_rows, self.dim = name, *array.shape
        self._array, self._ids, self._where, self._order = array, ids, where, RowOrder(array.shape[0])

    @property
    def ids(self) -> np.ndarray:
        """The ids that have a row to themselves, [n], the most frequent first where the data were counted.

        Integers, or text (dtype U). Where the data do not say what ids were, their numbers. Those of a column in
        buckets are texts such as "[0.5, 2.0)"; `rows` takes these and plain numbers.

        Raises:
          ConfigError: ids were hashed or reduced, so that several share a row.
        """
        return self._ids.values()

    def rows(self, ids: Iterable[Any]) -> np.ndarray:
        """The rows of ids, [n, D], in the order of `ids`, with the table's dtype; float32 for bfloat16.

        Args:
          ids: a list, NumPy array, series or Arrow array of the data's ids. None stands for a missing value, where
            the table has a row for these.

        Raises:
          ConfigError: an id of another type, or one that the data do not have (`NoSuchName`, which is a KeyError too).
          TrainingError: the checkpoint has gone or is damaged.
        """
        return self._at(self._order.position(self._ids.rows_of(ids)))

    def norms(self) -> np.ndarray:
        """Euclidean lengths of rows, float64 [n]: of those of `ids`, or of all V where ids share rows."""
        found = np.empty(self.num_rows)
        for rows, values in self._parts():
            found[rows] = np.sqrt(np.einsum("md,md->m", values, values))
        return found if self._ids.shared else found[self._ids.first : self._ids.first + self._ids.count]

    def nearest(self, id: Any, k: int = 10, measure: Measure = "cosine") -> list[Neighbour]:
        """The k ids whose rows are nearest to that of `id`, without itself, the nearest first. Exact, in float64.

        Args:
          id: of the data.
          k: how many; fewer if there are fewer ids.
          measure: "cosine", which is 0 where a row is 0, or "dot". Of equal ones the more frequent id comes first.

        Raises:
          ConfigError: ids share rows, another measure, or no such id.
        """
        if measure not in _MEASURES:
            raise ConfigError(f"measure={measure!r}: expected {either(_MEASURES)}.")
        if isinstance(k, bool) or not isinstance(k, (int, np.integer)) or k < 1:
            raise ConfigError(f"k={k!r}: expected the number of neighbours, 1 or more.")
        ids = self._ids.values()
        (row,) = self._ids.rows_of([id]).tolist()
        query = self._at(self._order.position(np.array([row])))[0].astype(np.float64)
        best, scores = np.zeros(0, np.int64), np.zeros(0)
        for rows, values in self._parts():
            found = values @ query
            if measure == "cosine":
                scale = np.sqrt(np.einsum("md,md->m", values, values)) * np.sqrt(query @ query)
                found = np.divide(found, scale, out=np.zeros_like(found), where=scale > 0)
            own = (rows >= self._ids.first) & (rows < self._ids.first + self._ids.count) & (rows != row)
            best, scores = _best(np.concatenate([best, rows[own]]), np.concatenate([scores, found[own]]), int(k))
        at = best - self._ids.first
        return [Neighbour(id, score) for id, score in zip(ids[at].tolist(), scores.tolist(), strict=True)]

    def _parts(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Every row once: the numbers of some rows, int64 [m], and these rows, float64 [m, D]."""
        for part in self._array.parts():
            rows = self._order.row(np.arange(part[0].start, part[0].stop, dtype=np.int64))
            assert (part[1].start, part[1].stop) == (0, self.dim), "blocks are whole rows"
            values = self._read(part)
            for start in range(0, len(rows), _WIDENED):
                some = slice(start, start + _WIDENED)
                yield rows[some], values[some].astype(np.float64)
            del values  # before the next block takes memory

    def _at(self, positions: np.ndarray) -> np.ndarray:
        """The rows at storage positions, [n, D]; reads each block that has one of them once."""
        out = np.empty((len(positions), self.dim), _dtype(self._array))
        blocks = positions // self._array.block[0]
        for block in np.unique(blocks).tolist():
            here = np.flatnonzero(blocks == block)
            start, stop = int(positions[here].min()), int(positions[here].max()) + 1
            out[here] = self._read((slice(start, stop), slice(0, self.dim)))[positions[here] - start]
        return out

    def _read(self, index: tuple[slice, ...]) -> np.ndarray:
        try:
            return self._array.read(index)
        except CorruptCheckpointError as error:
            raise TrainingError(
                f"table {self.name!r} cannot be read from {self._where}: {error}. If the run is still training, it may "
                "have removed this checkpoint: open the run again."
            ) from error

    def __repr__(self) -> str:
        """The name and the shape."""
        return f"Table({self.name!r}, {self.num_rows:,} rows of {self.dim}, {_dtype(self._array).name})"


class Tables(Mapping[str, Table]):
    """The tables of a checkpoint, by name."""

    def __init__(self, arrays: Mapping[str, LazyArray], ids: Callable[[str, int], OriginalIds], where: str) -> None:
        """Tables with these arrays; `ids` gives those of a table by its name and V."""
        self._arrays, self._ids, self._where = arrays, ids, where

    def __getitem__(self, name: str) -> Table:
        """One of them; NoSuchName, a ConfigError and KeyError, if there is none of that name."""
        if name not in self._arrays:
            raise NoSuchName(f"there is no table {name!r}. {nearest_names(str(name), list(self._arrays))}")
        array = self._arrays[name]
        return Table(name, array, self._ids(name, array.shape[0]), self._where)

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __repr__(self) -> str:
        """The name and the shape of each."""
        return f"Tables({', '.join(f'{name} {a.shape[0]:,}x{a.shape[1]}' for name, a in self._arrays.items())})"

    def _repr_html_(self) -> str:
        rows = [(name, f"{a.shape[0]:,}", a.shape[1], _dtype(a).name) for name, a in self._arrays.items()]
        return html.table(self._where, ("table", "rows", "dim", "dtype"), rows)


def _dtype(array: LazyArray) -> np.dtype[Any]:
    """Dtype of the rows given out: NumPy has no bfloat16 of its own."""
    return np.dtype(np.float32) if array.dtype.name == "bfloat16" else array.dtype


def _best(rows: np.ndarray, scores: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k rows of the highest scores, descending, equal ones by row; and their scores."""
    if len(scores) > k:
        least = np.partition(scores, len(scores) - k)[len(scores) - k]
        rows, scores = rows[scores >= least], scores[scores >= least]
    order = np.lexsort((rows, -scores))[:k]
    return rows[order], scores[order]
