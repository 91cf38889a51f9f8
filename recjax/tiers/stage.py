"""The ordered stages of caches: which rows move for each batch, and the slots of those that it names.

Of several processes each decides which rows come to the caches of its own devices, and which leave: it alone has their
directories. Its devices ask others for rows by their slots there. So each process sends the slots of the rows of its
own that the batch names, 4 bytes each, in the order of their homes, which all processes know
(`recjax.train.named_rows`). They travel over the mesh while the batch before is made ready. Where several processes
hold the same rows, or other columns of them, the first one tells their slots, and a checksum of what the others have
decided says whether it is the same.
"""

from __future__ import annotations

import collections
import dataclasses
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from recjax.embedding.group import Group
from recjax.embedding.layout import BoundPlan
from recjax.embedding.routing.capacity import rung
from recjax.embedding.routing.keys import Merged, distinct
from recjax.embedding.routing.routed import OrderedStage, RoutedBatch
from recjax.errors import TrainingError
from recjax.parallel import distributed
from recjax.parallel.mesh import Share, everywhere, put_share, sharded
from recjax.tiers.directory import NO_MOVES, CacheTooSmallError, Directory, Moves
from recjax.tiers.tier import Admission, Course, OfOwners, Tier

SlotsOf = Sequence[Callable[[np.ndarray], np.ndarray]]  # of each owner, from homes that a batch names to their slots
_HEAD = 3  # numbers before an owner's slots
Owner = tuple[str, int]  # a group's name, and the number of one of its owners


@dataclasses.dataclass(frozen=True)
class OwnerSlots:
    """Decisions on one owner's caches for one batch.

    Attributes:
      slots_U: int32, the slot of each home that the batch names, in the order of the homes.
      come: number of rows that come.
      leave: number of rows that leave.
      needed: 0, or how many rows the cache would have to hold and cannot; then the others mean nothing.
    """

    slots_U: np.ndarray
    come: int
    leave: int
    needed: int = 0


class SlotExchange:
    """Sends each process's decisions about its own rows to all others. All call it alike, batch after batch."""

    def __init__(self, bound: BoundPlan, mesh: Mesh) -> None:
        """Exchanges slots of the caches of a plan on these devices."""
        self._mesh, self._shares, self._size = mesh, Share.of_all(mesh), 0
        self._holders: dict[Owner, list[int]] = {}  # owner of rows -> the processes that hold some, the first one tells
        for group in bound.cached:
            where: Any = sharded(mesh, group.partition_axes).devices_indices_map((group.parts,))
            parts = [((index or (slice(None),))[0].start or 0, device.process_index) for device, index in where.items()]
            for owner in range(group.owners):
                held = {process: None for part, process in sorted(parts) if group.owner_of(part) == owner}
                self._holders[group.name, owner] = list(held)

    def begin(self, named: OfOwners, decided: Mapping[Owner, OwnerSlots]) -> jax.Array:
        """Sends what this process has decided; nothing is awaited.

        Args:
          named: group name -> of each owner the homes that the batch names.
          decided: for each owner of which this process holds some rows.
        """
        own = self._shares[jax.process_index()]
        lengths = [self._length(process, named) for process in range(len(self._shares))]
        needed = max(-(-n // share.count) for n, share in zip(lengths, self._shares, strict=True))
        if needed > self._size:
            self._size = rung(needed)  # each is a program
        message = self._message(jax.process_index(), decided)
        lists = np.zeros(own.count * self._size, np.int32)
        lists[: len(message)] = message
        return everywhere(put_share(lists.reshape(own.count, self._size), self._mesh))

    def finish(self, lists: jax.Array, named: OfOwners) -> dict[Owner, OwnerSlots]:
        """Returns what all processes have sent for a batch, of all owners.

        Raises:
          TrainingError: processes that hold the same rows have decided differently.
        """
        lists_NxC = np.asarray(lists)
        told: dict[Owner, OwnerSlots] = {}
        sums = []
        for process, share in enumerate(self._shares):
            message = lists_NxC[share.first : share.first + share.count].ravel()
            sums.append(int(message[:1].view(np.uint32)[0]))
            at = 1
            for owner in self._told_by(process):
                needed, come, leave = message[at : at + _HEAD].tolist()
                count = len(named[owner[0]][owner[1]])
                told[owner] = OwnerSlots(message[at + _HEAD : at + _HEAD + count], come, leave, needed)
                at += _HEAD + count
        if astray := [n for n, own_sum in enumerate(sums) if own_sum != self._checksum(n, told)]:
            raise TrainingError(
                f"process{'es' if len(astray) > 1 else ''} {', '.join(map(str, astray))} decided otherwise than other "
                "processes that hold the same rows which of them go to the devices' caches (tier.device_bytes), though "
                "all got the same batches. Check their memory, give all the same software, and start the same command "
                "again: the run goes on from its last checkpoint."
            ).in_all()
        return told

    def _told_by(self, process: int) -> list[Owner]:
        return [owner for owner, holders in self._holders.items() if holders[0] == process]

    def _length(self, process: int, named: OfOwners) -> int:
        return 1 + sum(_HEAD + len(named[name][owner]) for name, owner in self._told_by(process))

    def _message(self, process: int, decided: Mapping[Owner, OwnerSlots]) -> np.ndarray:
        """The checksum of what others tell, then for each owner that this process tells its numbers and slots."""
        pieces = [np.array([self._checksum(process, decided)], np.uint32).view(np.int32)]
        for owner in self._told_by(process):
            own = decided[owner]
            pieces += [np.array([own.needed, own.come, own.leave], np.int32), own.slots_U]
        return np.concatenate(pieces)

    def _checksum(self, process: int, decided: Mapping[Owner, OwnerSlots]) -> int:
        """Checksum of the slots of rows that a process holds but does not tell."""
        found = 0
        for owner, holders in self._holders.items():
            if process in holders[1:]:
                found = zlib.crc32(np.ascontiguousarray(decided[owner].slots_U).tobytes(), found)
        return found


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
        self._bound, self._tier = bound, tier
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
        for name, rows in self._tier.rows.groups.items():
            here = sorted({rows.group.owner_of(part) for part in rows.local_parts})
            self._directories[name] = {owner: Directory(rows.group.home_rows, rows.group.rows) for owner in here}
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
        longest: dict[str, tuple[int, int]] = {}
        slots: dict[str, SlotsOf] = {}
        for group in self._bound.cached:
            of_group = [owners[group.name, owner] for owner in range(group.owners)]
            if needed := max(own.needed for own in of_group):
                raise too_small(group, needed).in_all()
            longest[group.name] = max(own.come for own in of_group), max(own.leave for own in of_group)
            come = sum(own.come for own in of_group)
            self._course.misses += come
            self._course.hits += sum(len(own.slots_U) for own in of_group) - come
            slots[group.name] = [directory.slot_of.take for directory in self._directories[group.name].values()]
            if self._exchange is not None:
                pairs = zip(named[group.name], of_group, strict=True)
                slots[group.name] = [_found_in(homes_U, own.slots_U) for homes_U, own in pairs]
        admission = dataclasses.replace(decided.admission, longest=longest)
        return dataclasses.replace(with_slots(self._bound, routed, slots), admission=admission)

    def _decide(self, batches: Sequence[RoutedBatch]) -> _Decided:
        """Decides which rows move for the first of some batches, and begins to read them."""
        seen = next(directory.seen for of_group in self._directories.values() for directory in of_group.values())
        for batch in batches[seen:]:
            homes = homes_by_owner(self._bound, batch)
            for name, directories in self._directories.items():
                for owner, directory in directories.items():
                    directory.see(homes[name][owner])
        if self._exchange is None:
            named = {name: [own.oldest for own in of_group.values()] for name, of_group in self._directories.items()}
        else:  # of all owners
            named = homes_by_owner(self._bound, batches[0])
        moves: dict[str, dict[int, Moves]] = {}
        owners: dict[Owner, OwnerSlots] = {}
        for name, directories in self._directories.items():
            moves[name] = {}
            for owner, directory in directories.items():
                moved = moves[name][owner] = self._admit((name, owner), directory)
                needed = self._too_small.get((name, owner), 0)
                slots_U: np.ndarray = named[name][owner]  # of one process their number is all that is asked for
                if self._exchange is not None:
                    slots_U = directory.slot_of.take(slots_U)
                owners[name, owner] = OwnerSlots(slots_U, len(moved.come_K), moved.leaving, needed)
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
        homes = homes_by_owner(self._bound, routed)
        slots = {name: [_places_among(homes_U) for homes_U in of_owners] for name, of_owners in homes.items()}
        return dataclasses.replace(with_slots(self._bound, routed, slots), admission=homes)


def _places_among(homes_U: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    return lambda asked_K: np.searchsorted(homes_U, asked_K)


def _found_in(homes_U: np.ndarray, slots_U: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    return lambda asked_K: slots_U[np.searchsorted(homes_U, asked_K)]


def homes_by_owner(bound: BoundPlan, routed: RoutedBatch) -> OfOwners:
    """The distinct homes of each owner that a batch names, of each group with a cache: int32 [U] each, ascending."""
    homes: OfOwners = {}
    for group in bound.cached:
        if group.name in routed.named:
            homes[group.name] = list(routed.named[group.name])
            continue
        each = group.home_rows
        of_owners = [np.zeros(0, np.int32)] * group.owners
        if group.sources:
            keys_U = routed.keys[group.name]
            if routed.devices > 1:
                keys_U, _ = distinct(keys_U % (group.owners * each), group.owners * each)
            of_owners = split_by_owner(group, keys_U)
        streams = bound.streams_of(group.name)
        for owner, homes_U in enumerate(of_owners):
            pieces = [homes_U]
            for exchange, stream in streams:
                if owner in stream.owners:
                    of_stream = routed.pooled[exchange][stream.name]
                    pieces.append(of_stream.homes_L[of_stream.of(owner)].astype(np.int32, copy=False))
            if len(pieces) > 1:
                of_owners[owner], _ = distinct(np.concatenate(pieces), each)
        homes[group.name] = of_owners
    return homes


def split_by_owner(group: Group, keys_U: np.ndarray) -> list[np.ndarray]:
    """The homes of each owner among ascending keys (bucket, home): int32 [U] each; see `Group.destination`."""
    each = group.home_rows
    of_buckets = np.split(keys_U, np.searchsorted(keys_U, np.arange(1, group.owners) * each))
    return [(of_buckets[group.destination(owner)] % each).astype(np.int32) for owner in range(group.owners)]


def with_slots(bound: BoundPlan, routed: RoutedBatch, slots: Mapping[str, SlotsOf]) -> RoutedBatch:
    """The batch with the slots of its rows, and each list of rows in their order.

    Args:
      bound: a plan with caches.
      routed: the batch, its rows in the order of their homes.
      slots: of each group with a cache and of each owner, from homes that the batch names to their slots.
    """
    pooled, keys, merged = dict(routed.pooled), dict(routed.keys), dict(routed.merged)
    slots_of_keys, inverse = dict(routed.slots), dict(routed.inverse)
    for group in bound.cached:
        slots_of = slots[group.name]
        for exchange, stream in bound.streams_of(group.name):
            listed = pooled[exchange][stream.name]
            slots_L = np.zeros(len(listed.homes_L), np.int32)
            for owner in stream.owners:
                of_owner = listed.of(owner)
                slots_L[of_owner] = slots_of[owner](listed.homes_L[of_owner])
            pooled[exchange] = {**pooled[exchange], stream.name: dataclasses.replace(listed, homes_L=slots_L)}
        if not group.sources:
            continue
        keys_U, each = keys[group.name], group.home_rows
        lists_U, homes_U = keys_U // each, keys_U % each
        slots_U = np.empty(len(keys_U), np.int64)
        for owner, to_slots in enumerate(slots_of):
            of_lists = slice(None) if group.owners == 1 else lists_U % group.owners == group.destination(owner)
            slots_U[of_lists] = to_slots(homes_U[of_lists])
        sorted_U, place_U = distinct(lists_U * group.rows + slots_U, routed.devices * group.owners * group.rows)
        ordered_U = np.empty_like(keys_U)
        ordered_U[place_U] = keys_U
        keys[group.name], slots_of_keys[group.name] = ordered_U, (sorted_U % group.rows).astype(np.int32)
        inverse |= {source.name: place_U.take(inverse[source.name]) for source in group.sources}
        if group.two_step:
            merged[group.name] = Merged.of(group, sorted_U, routed.devices, group.rows)
    return dataclasses.replace(routed, pooled=pooled, merged=merged, keys=keys, slots=slots_of_keys, inverse=inverse)


def too_small(group: Group, needed: int) -> TrainingError:
    """The error of a cache that would have to hold so many rows."""
    return TrainingError(
        f"two batches in a row name {needed:,} rows of the tables of {group.name} on one device, but its cache has "
        f"room for {group.rows:,}: raise tier.device_bytes by the same factor, or lower train.batch_size."
    )
