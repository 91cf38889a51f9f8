"""The place of one segment of a plan in its group's buffer, and what of it each part of the buffer holds."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from recjax.embedding.bands import Band
from recjax.embedding.row_order import RowOrder, Split, library
from recjax.embedding.spec import TableSpec


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
