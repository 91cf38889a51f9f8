"""The mesh-independent order in which a table's rows are stored, some rows of it, and how ranges of these go to owners.

Vocabularies are often ordered by frequency, so equal ranges of ids would put every hot row on one
device. `RowOrder` is a fixed bijection from row to storage position that spreads neighbouring ids:

  S = V up to 4096, else the one of 2048..4096 that leaves the smallest V mod S;  q = V div S
  row r < q*S  ->  position  pi(r mod S) * q + r div S,   pi(c) = c * A mod S   (S residue classes)
  row r >= q*S ->  position  r                            (V mod S rows, hardly ever more than ten)

A is coprime to S and close to S divided by the golden ratio, so that any run of consecutive ids
falls evenly over any number of equal ranges (a low-discrepancy sequence). No product exceeds
max(S^2, V), so int32 is enough on the device.

A `Band` is some rows of a table in this order: sorted positions, counted from 0 without gaps, so that they are split
among owners, stored and found by arithmetic and one search. The host makes it by bits, one for each row of the table,
which takes 3 to 30 times less time than bisection.

`Split` then cuts the numbers of a band, or all positions, into contiguous ranges that differ by at most one row: 5 rows
over 4 owners are 2, 1, 1, 1.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

MAX_CLASSES = 4096
NAME = "golden-stride/1"  # goes into checkpoints; a changed bijection needs a new name
FEW = 16  # positions, among which bisection is as quick as a bit far away in memory
MOST_ROWS = 2**28  # of a table with bits: 64 MiB


@dataclasses.dataclass(frozen=True)
class RowOrder:
    """The bijection for a table of `rows` rows. Works on NumPy and JAX integer arrays alike."""

    rows: int

    @functools.cached_property
    def classes(self) -> int:
        """S, the number of residue classes."""
        if self.rows <= MAX_CLASSES:
            return self.rows
        # Rows beyond q*S stay together at the end, on one owner: with a fixed S, thousands of the newest ids would.
        return min(range(MAX_CLASSES, MAX_CLASSES // 2 - 1, -1), key=lambda classes: self.rows % classes)

    @functools.cached_property
    def quotient(self) -> int:
        """q, rows per residue class."""
        return self.rows // self.classes

    @functools.cached_property
    def stride(self) -> int:
        """A, the multiplier that scatters the classes; 1 <= A <= S, coprime to S."""
        golden = round(self.classes * (math.sqrt(5) - 1) / 2)
        return next(
            a
            for distance in range(self.classes + 1)
            for a in (golden + distance, golden - distance)
            if a >= 1 and math.gcd(a, self.classes) == 1
        )

    def position(self, row: Any) -> Any:
        """Storage position of each row, elementwise; rows must be in 0..V-1."""
        q, S = self.quotient, self.classes
        nth = row // S
        spread = library(row).take(self._first, row - nth * S) + nth
        return library(row).where(row < q * S, spread, row)

    @functools.cached_property
    def _first(self) -> np.ndarray:
        """pi(c) * q of every class, int32 [S]: a look-up costs less than two divisions."""
        c = np.arange(self.classes, dtype=np.int64)
        return (c * self.stride % self.classes * self.quotient).astype(np.int32)

    @functools.cached_property
    def inverse(self) -> int:
        """The multiplier that undoes `stride`: stride * inverse = 1 modulo S."""
        return pow(self.stride, -1, self.classes) if self.classes > 1 else 0

    def row(self, position: Any) -> Any:
        """The row stored at each position: the inverse of `position`."""
        return row_at(position, self.quotient, self.classes, self.inverse)


def row_at(position: Any, q: Any, S: Any, inverse: Any) -> Any:
    """`RowOrder.row` for tables whose constants come as arrays, so that one loop can fill many tables."""
    spread = position % q * S + (position // q) % S * inverse % S
    return library(position).where(position < q * S, spread, position)


@dataclasses.dataclass(frozen=True)
class Split:
    """`rows` positions cut into `owners` contiguous ranges, the first ones longer by one if need be.

    They go to the owners `first` to `first + owners - 1`, or to those that `named` lists, in its order; all others hold
    nothing.
    """

    rows: int
    owners: int
    first: int = 0
    named: tuple[int, ...] = ()

    @property
    def longest(self) -> int:
        """Rows of the longest range: ceil(rows / owners)."""
        return -(-self.rows // self.owners)

    def start(self, nth: Any) -> Any:
        """Returns the first position of the range of owner `nth`; of named ones, of the `nth` of them, from 0."""
        base, extra = divmod(self.rows, self.owners)
        xp = library(nth)
        nth = xp.minimum(xp.maximum(nth - self.first, 0), self.owners)
        return nth * base + xp.minimum(nth, extra)

    def bounds(self, owner: Any) -> tuple[Any, Any]:
        """Returns the range of an owner: its first position, and the one after its last."""
        nth = self.nth(owner) + self.first
        return self.start(nth), self.start(nth + 1)  # those without a range start and stop after the last

    def nth(self, owner: Any) -> Any:
        """Returns the number of an owner's range, from 0; `owners` where it has none and owners are named."""
        if not self.named:
            return owner - self.first
        xp = library(owner)
        numbers = np.full(max(self.named) + 2, self.owners, np.int32)
        numbers[list(self.named)] = np.arange(self.owners, dtype=np.int32)
        return xp.asarray(numbers)[xp.minimum(owner, max(self.named) + 1)]

    def owner_and_offset(self, position: Any) -> tuple[Any, Any]:
        """(owner, offset within the owner's range) of each position, elementwise."""
        if self.named:
            nth, offset = Split(self.rows, self.owners).owner_and_offset(position)
            return library(position).asarray(self.named, position.dtype)[nth], offset
        if self.owners == 1:
            return library(position).full_like(position, self.first), position
        where = library(position).where
        base, extra = divmod(self.rows, self.owners)
        long = extra * self.longest  # positions that belong to the longer ranges
        # longest is base where no range is longer: base + 1 may exceed int32. base is 0 only where all are in_long.
        in_long, past = position < long, position - long
        owner = where(in_long, position // self.longest, past // max(base, 1) + extra) + self.first
        return owner, where(in_long, position % self.longest, past % max(base, 1))


@dataclasses.dataclass(frozen=True)
class Cut(Split):
    """The rows of a segment that starts somewhere in a buffer which is cut into equal parts.

    Attributes:
      offset: its first row in the buffer.
      each: rows of a part.
    """

    offset: int = 0
    each: int = 0

    def bounds(self, owner: Any) -> tuple[Any, Any]:
        """Like `Split.bounds`."""
        first, xp = owner * self.each - self.offset, library(owner)
        start, stop = (xp.minimum(xp.maximum(first + more, 0), self.rows) for more in (0, self.each))
        return start, stop


def library(x: Any) -> Any:
    """The module whose functions fit an array: jax.numpy or numpy."""
    return jnp if isinstance(x, jax.Array) else np


@dataclasses.dataclass(frozen=True)
class Band:
    """Some rows of one table, by storage position.

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
