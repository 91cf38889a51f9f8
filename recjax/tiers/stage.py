"""The ordered stages of caches: which rows move for each batch, and the slots of those that it names."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from recjax.embedding.layout import BoundPlan, Group
from recjax.embedding.routing.hierarchical import merge
from recjax.embedding.routing.ordered import OrderedStage
from recjax.embedding.routing.routed import RoutedBatch
from recjax.embedding.routing.sorting import distinct
from recjax.errors import TrainingError
from recjax.parallel import distributed
from recjax.tiers.admission import Admission, Course, OfOwners
from recjax.tiers.directory import NO_MOVES, CacheTooSmallError, Directory, Moves
from recjax.tiers.slot_exchange import Owner, OwnerSlots, SlotExchange
from recjax.tiers.tier import Tier

SlotsOf = Sequence[Callable[[np.ndarray], np.ndarray]]  # of each owner, from homes that a batch names to their slots


@dataclasses.dataclass(frozen=True)
class _Decided:
    """Decisions on a batch before its turn.

    Attributes:
      admission: without `longest`.
      owners: for each owner whose directory is here.
      lists: of several processes, what all tell each other; else None.
    """

    admission: Admission
    owners: dict[Owner, OwnerSlots]
    lists: jax.Array | None


class CacheStage(OrderedStage):
    """Admits the batches of a training. Nothing of it is in a checkpoint: a cache that is empty changes no number.

    Of several processes each decides for the rows of its own devices, a batch further ahead, and hears from the others
    where theirs are.

    Attributes:
      look_ahead: L, or one more of several processes; also 1 to know which rows of the next batch must stay.
      depth: 1, so that rows are read while the step before is under way.
    """

    depth = 1

    def __init__(self, bound: BoundPlan, tier: Tier, look_ahead: int) -> None:
        """An empty cache."""
        self._exchange = SlotExchange(bound, tier.rows.mesh) if distributed.processes() > 1 else None
        self._sight, self._ahead = max(1, look_ahead), int(self._exchange is not None)
        self.look_ahead = self._sight + self._ahead
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
        self._directories: dict[str, dict[int, Directory]] = {}
        self._decided: collections.deque[_Decided] = collections.deque()
        self._too_small: dict[Owner, int] = {}
        self._advanced = False
        for group in self._groups:
            here = sorted({group.owner_of(part) for part in self._tier.rows.local_parts[group.name]})
            self._directories[group.name] = {owner: Directory(group.home_rows, group.rows) for owner in here}
        self._course = self._tier.course()

    def advance(self, routed: RoutedBatch, upcoming: Sequence[RoutedBatch]) -> RoutedBatch:
        """See `OrderedStage.advance`."""
        self._advanced = True
        batches = (routed, *upcoming)
        while len(self._decided) <= self._ahead and len(self._decided) < len(batches):
            first = len(self._decided)
            self._decided.append(self._decide(batches[first : first + 1 + self._sight]))
        decided = self._decided.popleft()
        named, owners = decided.admission.named, decided.owners
        if self._exchange is not None and decided.lists is not None:
            owners = self._exchange.finish(decided.lists, named)
        assert self._course is not None
        longest = {}
        for group in self._groups:
            of_group = [owners[group.name, owner] for owner in range(group.owners)]
            if needed := max(own.needed for own in of_group):
                raise too_small(group, needed).in_all()
            longest[group.name] = max(own.come for own in of_group), max(own.leave for own in of_group)
            come = sum(own.come for own in of_group)
            self._course.misses += come
            self._course.hits += sum(len(own.slots_U) for own in of_group) - come
            if self._exchange is None:
                slots_of: SlotsOf = [directory.slot_of.take for directory in self._directories[group.name].values()]
            else:
                pairs = zip(named[group.name], of_group, strict=True)
                slots_of = [_found_in(homes_U, own.slots_U) for homes_U, own in pairs]
            routed = with_slots(self._bound, group, routed, slots_of)
        return dataclasses.replace(routed, admission=dataclasses.replace(decided.admission, longest=longest))

    def _decide(self, batches: Sequence[RoutedBatch]) -> _Decided:
        """Decides which rows move for the first of some batches, and begins to read them."""
        moves: dict[str, dict[int, Moves]] = {}
        named: OfOwners = {}
        owners: dict[Owner, OwnerSlots] = {}
        for group in self._groups:
            directories = self._directories[group.name]
            seen = next((directory.seen for directory in directories.values()), 0)
            for batch in batches[seen:]:
                homes = homes_by_owner(self._bound, group, batch)
                for owner, directory in directories.items():
                    directory.see(homes[owner])
            if self._exchange is None:
                named[group.name] = [directory.oldest for directory in directories.values()]
            else:  # of all owners
                named[group.name] = homes_by_owner(self._bound, group, batches[0])
            moves[group.name] = {}
            for owner, directory in directories.items():
                moved = moves[group.name][owner] = self._admit((group.name, owner), directory)
                needed = self._too_small.get((group.name, owner), 0)
                slots_U: np.ndarray = named[group.name][owner]  # of one process their number is all that is asked for
                if self._exchange is not None:
                    slots_U = directory.slot_of.take(slots_U)
                owners[group.name, owner] = OwnerSlots(slots_U, len(moved.come_K), moved.leaving, needed)
        lists = None if self._exchange is None else self._exchange.begin(named, owners)
        return _Decided(self._prepared(moves, named), owners, lists)

    def _admit(self, owner: Owner, directory: Directory) -> Moves:
        """Admits the oldest batch of an owner; nothing any more once its cache was too small, which all hear of."""
        if owner not in self._too_small:
            try:
                return directory.admit()
            except CacheTooSmallError as short:
                self._too_small[owner] = short.args[0]
        return NO_MOVES

    def enter(self, homes: Mapping[str, np.ndarray]) -> Admission:
        """Has rows come that no batch has named yet, for a measurement that begins with caches which are full.

        Args:
          homes: group name -> int32, homes of each of its owners, ascending.
        """
        moves: dict[str, dict[int, Moves]] = {}
        named: OfOwners = {}
        longest = {}
        self._advanced = True
        for name, homes_U in homes.items():
            named[name] = [homes_U for _ in self._directories[name]]
            for directory in self._directories[name].values():
                directory.see(homes_U)
            moves[name] = {owner: directory.admit() for owner, directory in self._directories[name].items()}
            moved = moves[name].values()
            longest[name] = max(len(own.come_K) for own in moved), max(own.leaving for own in moved)
        return dataclasses.replace(self._prepared(moves, named), longest=longest)

    def _prepared(self, moves: Mapping[str, Mapping[int, Moves]], named: OfOwners) -> Admission:
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
    streams = bound.streams_of(group.name)
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


def _found_in(homes_U: np.ndarray, slots_U: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    return lambda asked_K: slots_U[np.searchsorted(homes_U, asked_K)]


def with_slots(bound: BoundPlan, group: Group, routed: RoutedBatch, slots_of: SlotsOf) -> RoutedBatch:
    """The batch with the slots of its rows, and each list of rows in their order.

    Args:
      bound: the plan.
      group: one of its groups, whose buffer is a cache.
      routed: the batch, its rows in the order of their homes.
      slots_of: of each owner, from homes that the batch names to their slots.
    """
    pooled = dict(routed.pooled)
    for exchange, stream in bound.streams_of(group.name):
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
