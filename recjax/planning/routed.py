"""Ids of a batch by the way in which the host routes them, each of which takes it a time of its own.

  (none)        the distinct rows of the ids are sought, and listed for their owners
  pooled        ids go on to an owner that pools, which has all rows of the table: nothing is sought but distinct rows
                are counted
  split_pooled  each of several owners that pool has some of the rows: ids are gone through for each of them

The names are variants of `host_route` and `host_pack` in a machine file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

from recjax.embedding.layout import BoundPlan
from recjax.embedding.spec import FeatureSpec

RoutedBy = Literal["", "pooled", "split_pooled"]


@dataclasses.dataclass(frozen=True)
class Routed:
    """Ids that go one way.

    Attributes:
      by: which way.
      ids: of a batch; those that go to the owners of several ranges of columns once for each range.
      features: that have them, counted likewise.
      owners: that share the rows of a table which is split, the mean over its ids; 0 elsewhere.
    """

    by: RoutedBy
    ids: float
    features: int
    owners: float = 0.0


def routed(bound: BoundPlan, ids: Callable[[FeatureSpec], float]) -> tuple[Routed, ...]:
    """The ids of a batch under a bound plan.

    Args:
      bound: the bound plan.
      ids: gives those that a batch has of a feature.
    """
    looking = [dataclasses.replace(lookup.spec, name=lookup.feature) for lookup in bound.lookups]
    found = [Routed("", ids(feature), 1) for feature in looking]
    for stream in (stream for exchange in bound.pooled for of_group in exchange.streams for stream in of_group):
        split = len(stream.owners) > 1 or not stream.source.whole
        count = ids(stream.feature)
        found.append(Routed("split_pooled", count, 1, len(stream.owners)) if split else Routed("pooled", count, 1))
    return together(found)


def together(parts: Sequence[Routed]) -> tuple[Routed, ...]:
    """Adds those that go the same way up, in the order in which the ways come first."""
    found = []
    for by in dict.fromkeys(part.by for part in parts):
        own = [part for part in parts if part.by == by]
        ids = sum(part.ids for part in own)
        owners = sum(part.ids * part.owners for part in own) / ids if ids else 0.0
        found.append(Routed(by, ids, sum(part.features for part in own), owners))
    return tuple(found)
