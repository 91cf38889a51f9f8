"""Bands: some rows of one table, by storage position, counted from 0 without gaps.

Segments of a plan select rows by id (`plan.py`). A `Band` is what such a selector means in the order in which rows are
stored: sorted positions, so that a segment's rows are split among owners, stored and found by arithmetic and one binary
search.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from recjax.embedding.plan import RowIds, Segment
from recjax.embedding.row_order import RowOrder, library
from recjax.embedding.spec import TableSpec


@dataclasses.dataclass(frozen=True)
class Band:
    """Some rows of one table, by storage position (row_order.py).

    They are numbered 0 to size - 1 in ascending order of position. `number` and `position` take NumPy and JAX integer
    arrays alike, elementwise, and return their dtype: int32 is enough.
    """

    rows: int  # V of the table
    chosen: tuple[int, ...] | None = None  # sorted distinct storage positions; None: all rows
    inverted: bool = False  # the band is all rows but `chosen`

    @property
    def size(self) -> int:
        """Number of its rows."""
        if self.chosen is None:
            return self.rows
        return self.rows - len(self.chosen) if self.inverted else len(self.chosen)

    @functools.cached_property
    def _chosen(self) -> np.ndarray:
        """`chosen`, int32 [K]."""
        return np.array(self.chosen, np.int32)

    @functools.cached_property
    def _ended(self) -> np.ndarray:
        """`chosen` and a last element that is no position, int32 [K+1]: a search may end after the last one."""
        return np.append(self._chosen, np.int32(-1))

    @functools.cached_property
    def _inside_before(self) -> np.ndarray:
        """Numbers of rows outside `chosen` before each of those, int32 [K]; ascending."""
        return self._chosen - np.arange(len(self._chosen), dtype=np.int32)

    def number(self, position: Any) -> tuple[Any, Any]:
        """(number within the band, whether it is inside) of each position, which must be in 0..V-1.

        Where a position is not inside, the number is that of the next row inside, or `size` if there is none. With all
        rows, the second is None: everything is inside.
        """
        if self.chosen is None:
            return position, None
        before = _search(self._chosen, position, "left")
        is_chosen = library(position).take(self._ended, before) == position
        return (position - before, ~is_chosen) if self.inverted else (before, is_chosen)

    def position(self, number: Any) -> Any:
        """The position of each number, which must be in 0..size-1: the inverse of `number`."""
        if self.chosen is None:
            return number
        if self.inverted:
            return number + _search(self._inside_before, number, "right")
        return library(number).take(self._chosen, number)

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """Numbers of the band's rows with positions in [start, stop), 0 <= start <= stop <= V.

        They follow each other: from the first returned to below the second.
        """
        if self.chosen is None:
            return start, stop
        first, last = (int(n) for n in np.searchsorted(self._chosen, [start, stop]))
        return (start - first, stop - last) if self.inverted else (first, last)


def _search(ascending_K: np.ndarray, values: Any, side: str) -> Any:
    """Returns the place where each value would go in, in the dtype of the values."""
    return library(values).searchsorted(ascending_K, values, side=side).astype(values.dtype)


def bands(segments: Sequence[Segment], spec: TableSpec) -> tuple[Band, ...]:
    """The rows of each of a table's segments, which must have passed `check_plan`. Equal selectors give equal bands."""
    order = RowOrder(spec.rows)

    def positions(ids: set[int]) -> tuple[int, ...]:
        return tuple(np.sort(order.position(np.fromiter(ids, np.int64, len(ids)))).tolist())

    sets = {s.rows.ids for s in segments if isinstance(s.rows, RowIds)}
    chosen = {ids: Band(spec.rows, positions(set(ids))) for ids in sets}
    named = {id for ids in sets for id in ids}
    rest = Band(spec.rows, positions(named), inverted=True) if named else Band(spec.rows)
    alike = {"all": Band(spec.rows), "rest": rest}
    return tuple(alike[s.rows] if isinstance(s.rows, str) else chosen[s.rows.ids] for s in segments)
