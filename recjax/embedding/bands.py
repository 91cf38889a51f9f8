"""Bands: some rows of one table, by storage position, counted from 0 without gaps; segments in buffers; lookups.

Segments of a plan select rows by id (`plan.py`). A `Band` is what such a selector means in the order in which rows are
stored: sorted positions, so that a segment's rows are split among owners, stored and found by arithmetic and one
search. The host makes it by bits, one for each row of the table, which takes 3 to 30 times less time than bisection.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from recjax.embedding.row_order import RowOrder, Split, library
from recjax.embedding.segment import HOT_PLACEMENTS, RowIds, Segment
from recjax.embedding.spec import FeatureSpec, TableSpec

FEW = 16  # positions, among which bisection is as quick as a bit far away in memory
MOST_ROWS = 2**28  # of a table with bits: 64 MiB


@dataclasses.dataclass(frozen=True)
class Band:
    """Some rows of one table, by storage position (row_order.py).

    They are numbered 0 to size - 1 in ascending order of position. `number` and `position` take NumPy and JAX integer
    arrays alike, elementwise, and return their dtype: int32 is enough.
    """

    rows: int  # V of the table
    chosen: tuple[int, ...] | None = None  # sorted distinct storage positions; None: all rows
    inverted: bool = False  # the band is all rows but `chosen`
    vacant: bool = False  # an inverted one in which `chosen` have numbers, too, that stay unused: others' do not move

    @property
    def size(self) -> int:
        """Numbers of its rows: how many there are, used or not."""
        return self.rows if self.vacant else self.members

    @property
    def members(self) -> int:
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
    def _bits(self) -> _Bits:
        """`chosen` once more."""
        return _Bits.of(self._chosen, self.rows)

    @functools.cached_property
    def _inside_before(self) -> np.ndarray:
        """Numbers of rows outside `chosen` before each of those, int32 [K]; ascending."""
        return self._chosen - np.arange(len(self._chosen), dtype=np.int32)

    def number(self, position: Any) -> tuple[Any, Any]:
        """(number within the band, whether it is inside) of each position, which must be in 0..V-1.

        Where a position is not inside, the number is that of the next row inside, or `size` if there is none (of a
        vacant one its own). With all rows, the second is None: everything is inside.
        """
        if self.chosen is None:
            return position, None
        if isinstance(position, np.ndarray) and len(self.chosen) >= FEW and self.rows <= MOST_ROWS:
            before, is_chosen = self._bits.find(position)
        else:  # on devices, too: a program should not hold an array as long as a table
            before = _search(self._chosen, position, "left")
            is_chosen = library(position).take(self._ended, before) == position
        if self.vacant:
            return position, ~is_chosen
        return (position - before, ~is_chosen) if self.inverted else (before, is_chosen)

    def position(self, number: Any) -> Any:
        """The position of each number, which must be in 0..size-1: the inverse of `number`."""
        if self.chosen is None or self.vacant:
            return number
        if self.inverted:
            return number + _search(self._inside_before, number, "right")
        return library(number).take(self._chosen, number)

    def runs(self, start: int, stop: int) -> np.ndarray:
        """The positions of the rows with numbers in [start, stop), in runs: each first, and the one after the last.

        int64 [K, 2], ascending.
        """
        if start >= stop:
            return np.zeros((0, 2), np.int64)
        if self.chosen is None:
            return np.array([[start, stop]], np.int64)
        if self.inverted:  # an unused number at the end makes an empty run, which is left out
            first, last = (int(position) for position in self.position(np.array([start, stop - 1])))
            side: Any = "right" if self.vacant else "left"
            gaps_M = self._chosen[np.searchsorted(self._chosen, first) : np.searchsorted(self._chosen, last, side)]
            edges = np.concatenate([[first], gaps_M + 1]), np.concatenate([gaps_M, [last + 1]])
            found_Kx2 = np.stack(edges, axis=1).astype(np.int64)
            return found_Kx2[found_Kx2[:, 0] < found_Kx2[:, 1]]
        positions = self._chosen[start:stop].astype(np.int64)
        breaks = np.flatnonzero(np.diff(positions) > 1)
        firsts, lasts = positions[np.append(0, breaks + 1)], positions[np.append(breaks, len(positions) - 1)]
        return np.stack([firsts, lasts + 1], axis=1)

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """Numbers of the band's rows with positions in [start, stop), 0 <= start <= stop <= V.

        They follow each other: from the first returned to below the second.
        """
        if self.chosen is None or self.vacant:
            return start, stop
        first, last = (int(n) for n in np.searchsorted(self._chosen, [start, stop]))
        return (start - first, stop - last) if self.inverted else (first, last)

    def used(self, start: int, stop: int) -> np.ndarray:
        """Positions of the rows with numbers in [start, stop), ascending, int64 [M]: of a vacant one those used."""
        numbers_M = np.arange(start, stop)
        if not self.vacant:
            return np.asarray(self.position(numbers_M))
        first, last = np.searchsorted(self._chosen, [start, stop])
        return np.delete(numbers_M, self._chosen[first:last] - start)


@dataclasses.dataclass(frozen=True)
class _Bits:
    """A set of positions, one bit for each that there may be, and as many bits again for how many come before.

    Attributes:
      words_W: uint32, 32 positions in each word, the first in the lowest bit.
      ranks_W: int32, positions of the set before those of each word.
    """

    words_W: np.ndarray
    ranks_W: np.ndarray

    @staticmethod
    def of(ascending_K: np.ndarray, rows: int) -> _Bits:
        """The set of some positions below `rows`."""
        words_W = np.zeros(-(-rows // 32), np.uint32)
        np.bitwise_or.at(words_W, ascending_K >> 5, np.uint32(1) << (ascending_K & 31).astype(np.uint32))
        ranks_W = np.cumsum(np.bitwise_count(words_W), dtype=np.int64) - np.bitwise_count(words_W)
        return _Bits(words_W, ranks_W.astype(np.int32))

    def find(self, position: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(positions of the set before, in its dtype; whether it is in the set) for each position."""
        word = position >> 5
        up_to = self.words_W[word] << (31 - (position & 31)).astype(np.uint32)  # with its own bit as the highest
        inside = up_to >= np.uint32(1 << 31)
        before = self.ranks_W[word] + np.bitwise_count(up_to) - inside
        return before.astype(position.dtype, copy=False), inside


def _search(ascending_K: np.ndarray, values: Any, side: str) -> Any:
    """Returns the place where each value would go in, in the dtype of the values."""
    return library(values).searchsorted(ascending_K, values, side=side).astype(values.dtype)


def bands(segments: Sequence[Segment], spec: TableSpec) -> tuple[Band, ...]:
    """The rows of each of a table's segments, which must have passed `check_plan`. Equal selectors give equal bands.

    Where all sets of rows are hot, the rest leaves their places vacant, so that other rows can become hot.
    """
    order = RowOrder(spec.rows)

    def positions(ids: set[int]) -> tuple[int, ...]:
        return tuple(np.sort(order.position(np.fromiter(ids, np.int64, len(ids)))).tolist())

    sets = {s.rows.ids for s in segments if isinstance(s.rows, RowIds)}
    chosen = {ids: Band(spec.rows, positions(set(ids))) for ids in sets}
    named = {id for ids in sets for id in ids}
    vacant = all(s.placement in HOT_PLACEMENTS for s in segments if isinstance(s.rows, RowIds))
    rest = Band(spec.rows, positions(named), inverted=True, vacant=vacant) if named else Band(spec.rows)
    alike = {"all": Band(spec.rows), "rest": rest}
    return tuple(alike[s.rows] if isinstance(s.rows, str) else chosen[s.rows.ids] for s in segments)


@dataclasses.dataclass(frozen=True)
class BoundSegment:
    """A segment's place in its group's buffer.

    Attributes:
      spec: the table that it is a part of.
      placement: as the plan has it.
      split: the rows of its band, by their numbers, over the parts of the buffer that differ in rows.
      offsets: where its range starts in each of those parts, in rows.
      band: the rows of the table that it holds.
      first: its first column.
      last: the one after its last column.
      number: of the segment in the table's plan.
    """

    spec: TableSpec
    placement: str
    split: Split
    offsets: tuple[int, ...]
    band: Band
    first: int
    last: int
    number: int = 0

    @functools.cached_property
    def order(self) -> RowOrder:
        """Maps rows to storage positions."""
        return RowOrder(self.spec.rows)

    @property
    def title(self) -> str:
        """The name of its table, with its range of columns unless these are all."""
        return self.spec.name if self.whole_rows else f"{self.spec.name}[{self.first}:{self.last}]"

    @property
    def whole_rows(self) -> bool:
        """True if it holds all columns of the table."""
        return self.last - self.first == self.spec.dim

    def locate(self, ids: Any) -> tuple[Any, Any, Any]:
        """Returns (owner, home in the owner's part of the buffer, whether it is here) of each row id, elementwise.

        The last is None if the segment holds all rows of its table. For NumPy and JAX.
        """
        number, here = self.band.number(self.order.position(ids))
        if here is not None:
            number = library(ids).minimum(number, self.band.size - 1)  # rows elsewhere may count as one after the last
        owner, within = self.split.owner_and_offset(number)
        return owner, within + library(ids).asarray(self.offsets, ids.dtype)[owner], here


@dataclasses.dataclass(frozen=True)
class Piece:
    """Share of a segment that one part of a group's buffer holds.

    Attributes:
      part: which part, 0 to `Group.parts` - 1.
      offset: its first row there; its first column there is 0.
      start, stop: the rows that it holds, by their numbers in the segment's band.
      first, last: the columns of the table that it holds, `last` excluded.
    """

    part: int
    offset: int
    start: int
    stop: int
    first: int
    last: int


@dataclasses.dataclass(frozen=True)
class Source:
    """The segments of one group that a feature looks its ids up in: bands of one table with the same columns.

    Attributes:
      name: unique in the bound plan; the feature's own where this is all that it looks up.
      feature: whose ids are sought.
      segments: which of them hold some of the rows.
    """

    name: str
    feature: FeatureSpec
    segments: tuple[BoundSegment, ...]

    def locate(self, ids: Any) -> tuple[Any, Any, Any]:
        """Like `BoundSegment.locate`, in whichever segment has the row."""
        owner, home, here = self.segments[0].locate(ids)
        where = library(ids).where
        for segment in self.segments[1:]:
            other_owner, other_home, there = segment.locate(ids)
            owner, home = where(there, other_owner, owner), where(there, other_home, home)
            here = here | there
        return owner, home, None if self.whole else here

    @property
    def whole(self) -> bool:
        """True if the segments have all rows of the table."""
        return sum(segment.band.members for segment in self.segments) == self.segments[0].spec.rows


@dataclasses.dataclass(frozen=True)
class Fetched:
    """Columns of the rows that a device fetched from one group, as `Pool.rows` names them.

    Attributes:
      group: its name.
      first: the first column of these, counted from that of the group's segments.
      last: the one after the last.
    """

    group: str
    first: int
    last: int

    @property
    def columns(self) -> int:
        """Number of these columns."""
        return self.last - self.first


@dataclasses.dataclass(frozen=True)
class Lookup:
    """Some columns of a feature, or all: what is pooled at once.

    Attributes:
      spec: the feature, with a name that is unique among lookups: the feature's own where this is all of it.
      feature: the feature's name.
      first: the first of these columns in the feature's table.
      sources: names of the `Source`s of its rows, beside `Pool.rows`.
      everywhere: True if there is one source alone, which has all rows.
      complete: True if the sources have all rows together; else owners pool the others.
    """

    spec: FeatureSpec
    feature: str
    first: int
    sources: tuple[str, ...]
    everywhere: bool = True
    complete: bool = True

    @property
    def name(self) -> str:
        """Its name in `Routing.features`."""
        return self.spec.name


@dataclasses.dataclass(frozen=True)
class Pool:
    """Lookups that take their rows from the same place.

    Attributes:
      rows: fetched rows, which lie one below the other: all have as many columns.
      lookups: what is pooled from them.
    """

    rows: tuple[Fetched, ...]
    lookups: tuple[Lookup, ...]

    @property
    def width(self) -> int:
        """Columns of these rows."""
        return self.rows[0].columns
