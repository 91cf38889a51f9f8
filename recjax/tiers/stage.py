"""The ordered stages of caches: which rows move for each batch, and the slots of those that it names."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from recjax.embedding.layout import BoundPlan, Group
from recjax.embedding.pooled.layout import streams_of
from recjax.embedding.routing.hierarchical import merge
from recjax.embedding.routing.ordered import OrderedStage
from recjax.embedding.routing.routed import RoutedBatch
from recjax.embedding.routing.sorting import distinct
from recjax.errors import TrainingError
from recjax.tiers.admission import Admission, Course, OfOwners
from recjax.tiers.directory import CacheTooSmallError, Directory, Moves
from recjax.tiers.tier import Tier


class CacheStage(OrderedStage):
    """Admits the batches of a training. Nothing of it is in a checkpoint: a cache that is empty changes no number.

    Attributes:
      look_ahead: L; also 1 to know which rows of the next batch must stay.
      depth: 1, so that rows are read while the step before is under way.
    """

    depth = 1

    def __init__(self, bound: BoundPlan, tier: Tier, look_ahead: int) -> None:
        """An empty cache."""
        self.look_ahead = max(1, look_ahead)
        self._bound, self._groups, self._tier = bound, bound.cached, tier
        self._course: Course | None = None
        self._advanced = False
        self.load_state_dict({})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Starts again, with an empty cache."""
        del state
        if self._course is not None and not self._advanced:
            return
        self._course = None  # before others are made: the directories of large tables are large
        self._directories = {}
        self._advanced = False
        self._directories = {
            group.name: [Directory(group.home_rows, group.rows) for _ in range(group.owners)] for group in self._groups
        }
        self._course = self._tier.course(self._directories)

    def advance(self, routed: RoutedBatch, upcoming: Sequence[RoutedBatch]) -> RoutedBatch:
        """See `OrderedStage.advance`."""
        moves: dict[str, list[Moves]] = {}
        named: OfOwners = {}
        self._advanced = True
        for group in self._groups:
            directories = self._directories[group.name]
            for batch in (routed, *upcoming)[directories[0].seen :]:
                for directory, homes_U in zip(directories, homes_by_owner(self._bound, group, batch), strict=True):
                    directory.see(homes_U)
            named[group.name] = [directory.oldest for directory in directories]
            try:
                moves[group.name] = [directory.admit() for directory in directories]
            except CacheTooSmallError as short:
                raise too_small(group, short.args[0]).in_all() from None
            slots_of = [directory.slot_of.take for directory in directories]
            routed = with_slots(self._bound, group, routed, slots_of)
        return dataclasses.replace(routed, admission=self._prepared(moves, named))

    def enter(self, homes: Mapping[str, np.ndarray]) -> Admission:
        """Has rows come that no batch has named yet, for a measurement that begins with caches which are full.

        Args:
          homes: group name -> int32, homes of each of its owners, ascending.
        """
        moves: dict[str, list[Moves]] = {}
        named: OfOwners = {}
        self._advanced = True
        for name, homes_U in homes.items():
            named[name] = [homes_U for _ in self._directories[name]]
            for directory in self._directories[name]:
                directory.see(homes_U)
            moves[name] = [directory.admit() for directory in self._directories[name]]
        return self._prepared(moves, named)

    def _prepared(self, moves: dict[str, list[Moves]], named: OfOwners) -> Admission:
        assert self._course is not None
        return self._tier.prepare(self._course, moves, named)


class ReadStage(OrderedStage):
    """Gives each batch of an evaluation rows of its own: nothing stays, and no cache is touched."""

    look_ahead = depth = 0

    def __init__(self, bound: BoundPlan) -> None:
        """`bound` is a plan with as many rows as homes in all groups of rows on the host: see `Tier.view`."""
        self._bound = bound

    def advance(self, routed: RoutedBatch, upcoming: Sequence[RoutedBatch]) -> RoutedBatch:
        """See `OrderedStage.advance`; the batch's `admission` are the homes of each group and owner, in their slots."""
        del upcoming
        homes: OfOwners = {}
        for group in self._bound.cached:
            homes[group.name] = homes_by_owner(self._bound, group, routed)
            slots_of = [_places_among(own_U) for own_U in homes[group.name]]
            routed = with_slots(self._bound, group, routed, slots_of)
        return dataclasses.replace(routed, admission=homes)


def homes_by_owner(bound: BoundPlan, group: Group, routed: RoutedBatch) -> list[np.ndarray]:
    """The distinct homes of each owner that a batch names, ascending: int32 [U] each."""
    if group.name in routed.named:
        return list(routed.named[group.name])
    each = group.home_rows
    found = [np.zeros(0, np.int32)] * group.owners
    if group.sources:
        keys_U = routed.keys[group.name]
        if routed.devices > 1:
            keys_U, _ = distinct(keys_U % (group.owners * each), group.owners * each)
        found = split_by_owner(group, keys_U)
    streams = streams_of(bound, group.name)
    for owner, homes_U in enumerate(found):
        pieces = [homes_U]
        for exchange, stream in streams:
            if owner in stream.owners:
                of_stream = routed.pooled[exchange][stream.name]
                pieces.append(of_stream.homes_L[of_stream.of(owner)].astype(np.int32, copy=False))
        if len(pieces) > 1:
            found[owner], _ = distinct(np.concatenate(pieces), each)
    return found


def split_by_owner(group: Group, keys_U: np.ndarray) -> list[np.ndarray]:
    """The homes of each owner among ascending keys (bucket, home): int32 [U] each; see `Group.destination`."""
    each = group.home_rows
    of_buckets = np.split(keys_U, np.searchsorted(keys_U, np.arange(1, group.owners) * each))
    return [(of_buckets[group.destination(owner)] % each).astype(np.int32) for owner in range(group.owners)]


def _places_among(homes_U: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    return lambda asked_K: np.searchsorted(homes_U, asked_K)


def with_slots(
    bound: BoundPlan, group: Group, routed: RoutedBatch, slots_of: Sequence[Callable[[np.ndarray], np.ndarray]]
) -> RoutedBatch:
    """The batch with the slots of its rows, and each list of rows in their order.

    Args:
      bound: the plan.
      group: one of its groups, whose buffer is a cache.
      routed: the batch, its rows in the order of their homes.
      slots_of: of each owner, from homes that the batch names to their slots.
    """
    pooled = dict(routed.pooled)
    for exchange, stream in streams_of(bound, group.name):
        found = pooled[exchange][stream.name]
        slots_L = np.zeros(len(found.homes_L), np.int32)
        for owner in stream.owners:
            mine = found.of(owner)
            slots_L[mine] = slots_of[owner](found.homes_L[mine])
        pooled[exchange] = {**pooled[exchange], stream.name: dataclasses.replace(found, homes_L=slots_L)}
    routed = dataclasses.replace(routed, pooled=pooled)
    if not group.sources:
        return routed
    keys_U, each = routed.keys[group.name], group.home_rows
    lists_U, homes_U = keys_U // each, keys_U % each
    slots_U = np.empty(len(keys_U), np.int64)
    for owner, slots in enumerate(slots_of):
        mine = slice(None) if group.owners == 1 else lists_U % group.owners == group.destination(owner)
        slots_U[mine] = slots(homes_U[mine])
    sorted_U, place_U = distinct(lists_U * group.rows + slots_U, routed.devices * group.owners * group.rows)
    ordered_U = np.empty_like(keys_U)
    ordered_U[place_U] = keys_U
    inverse = {source.name: place_U.take(routed.inverse[source.name]) for source in group.sources}
    merged = dict(routed.merged)
    if group.two_step:
        merged[group.name] = merge(group, sorted_U, routed.devices, group.rows)
    return dataclasses.replace(
        routed,
        merged=merged,
        keys={**routed.keys, group.name: ordered_U},
        slots={**routed.slots, group.name: (sorted_U % group.rows).astype(np.int32)},
        inverse={**routed.inverse, **inverse},
    )


def too_small(group: Group, needed: int) -> TrainingError:
    """The error of a cache that would have to hold so many rows."""
    return TrainingError(
        f"two batches in a row name {needed:,} rows of the tables of {group.name} on one device, but its cache has "
        f"room for {group.rows:,}: raise tier.device_bytes by the same factor, or lower train.batch_size."
    )
