"""Lookups of features in a bound plan: segments with their rows, and fetched rows that are pooled together."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from recjax.embedding.row_order import library
from recjax.embedding.spec import FeatureSpec

if TYPE_CHECKING:
    from recjax.embedding.bound_segment import BoundSegment


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
