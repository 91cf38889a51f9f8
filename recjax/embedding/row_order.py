"""The mesh-independent order in which a table's rows are stored, and how ranges of it go to owners.

Vocabularies are often ordered by frequency, so equal ranges of ids would put every hot row on one
device. `RowOrder` is a fixed bijection from row to storage position that spreads neighbouring ids:

  S = V up to 4096, else the one of 2048..4096 that leaves the smallest V mod S;  q = V div S
  row r < q*S  ->  position  pi(r mod S) * q + r div S,   pi(c) = c * A mod S   (S residue classes)
  row r >= q*S ->  position  r                            (V mod S rows, hardly ever more than ten)

A is coprime to S and close to S divided by the golden ratio, so that any run of consecutive ids
falls evenly over any number of equal ranges (a low-discrepancy sequence). No product exceeds
max(S^2, V), so int32 is enough on the device.

`split` then cuts the positions into contiguous ranges that differ by at most one row: 5 rows over 4
owners are 2, 1, 1, 1.
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
