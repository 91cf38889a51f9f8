"""A plan bound to a number of devices: the buffers of all segments, and the place of each row in them. See `bind.py`.

A table is mostly one segment. Otherwise its rows are divided into bands, and the columns of each band into ranges; then
a feature looks up several segments: a `Source` says which of them lie in one group, and a `Pool` what the fetched rows
are pooled to.

For a feature that exchanges pooled vectors (`Exchange.kind`), the devices send their ids to the owners of its table, an
owner sums the rows of each bag, and the sums travel back: Neo's 4D parallelism (Mudigere et al. 2022, section 4).

A *stream* is a feature's bags over one range of columns. It has one owner that holds all rows, or several that hold
some of them each (table-row-wise, or segments of rows): then these send partial sums, which the asker adds up. All
streams of one precision travel in one buffer, whatever their D, so that the padding is that of one sum over an owner's
columns and not of many. It consists of blocks of q columns of all b samples, q being the largest that divides every D:
a stream of D columns is D / q blocks, one after the other, and an owner's streams follow each other without gaps.

Partial sums of a stream whose owners are all devices of one of several hosts are added up there before they leave.
These shared streams have a buffer of their own, of which each device of a host sends what is for one device of each.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping

import numpy as np

from recjax.embedding.group import Group, InReplicas
from recjax.embedding.segment import Exchange
from recjax.embedding.sharding import BoundSegment, Source
from recjax.embedding.spec import FeatureSpec

ACROSS = " across hosts"  # after a group's name: the name of the capacity of its exchange across hosts
IDS = " pooled ids"  # the same for the ids that a device sends to one owner that pools
ROWS = " pooled rows"  # the same for the distinct rows that an owner is asked for by all devices
PAIRS = " pairs"  # after a lookup's name: that of the pairs of its elements and those that each meets
SUMMED = " across replicas"  # the same for the rows whose gradients a device sends to the other replica groups


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


@dataclasses.dataclass(frozen=True)
class Stream:
    """Bags of one feature over one range of columns.

    Attributes:
      source: the feature, and the segments that hold its rows. Its name is unique in the bound plan.
      owners: the devices that hold some of the rows.
      counted: True if the number of a bag's ids with an owner differs from bag to bag: these numbers travel, too.
      shared: True if its owners are the devices of one of several hosts.
    """

    source: Source
    owners: tuple[int, ...]
    counted: bool
    shared: bool = False

    @property
    def name(self) -> str:
        """Name of its source."""
        return self.source.name

    @property
    def feature(self) -> FeatureSpec:
        """Whose bags they are."""
        return self.source.feature

    @property
    def first(self) -> int:
        """Its first column in the feature's table."""
        return self.source.segments[0].first

    @property
    def last(self) -> int:
        """The column after its last."""
        return self.source.segments[0].last


@dataclasses.dataclass(frozen=True)
class PooledExchange:
    """Streams whose vectors travel together.

    Attributes:
      name: unique among groups and exchanges.
      exchange: the precision of the vectors, and of their gradients.
      groups: the table groups that the streams look up.
      streams: of each group, in the order of the groups.
    """

    name: str
    exchange: Exchange
    groups: tuple[Group, ...]
    streams: tuple[tuple[Stream, ...], ...]

    @property
    def devices(self) -> int:
        """N, devices of a replica group."""
        return self.groups[0].devices

    @property
    def hosts(self) -> int:
        """H, machines that these are in."""
        return self.groups[0].hosts

    @property
    def weighted(self) -> bool:
        """True if ids of some feature carry weights, which then travel with all ids."""
        return any(stream.feature.weighted for of_group in self.streams for stream in of_group)

    @property
    def features(self) -> tuple[FeatureSpec, ...]:
        """The features of all streams."""
        return tuple(dict.fromkeys(stream.feature for of_group in self.streams for stream in of_group))

    def sizes(self, capacities: Mapping[str, int]) -> tuple[tuple[int, int], ...]:
        """For each group its capacities for ids and for distinct rows."""
        return tuple((capacities[group.name + IDS], capacities[group.name + ROWS]) for group in self.groups)

    @functools.cached_property
    def block(self) -> int:
        """q, columns of a block."""
        return math.gcd(*(group.dim for group in self.groups))

    @functools.cached_property
    def of_owner(self) -> tuple[tuple[tuple[Stream, ...], ...], ...]:
        """The streams of each owner, group by group: first those that are not counted."""
        return tuple(
            tuple(
                tuple(sorted((s for s in of_group if owner in s.owners), key=lambda s: s.counted))
                for of_group in self.streams
            )
            for owner in range(self.devices)
        )

    @functools.cached_property
    def widths(self) -> tuple[int, ...]:
        """The most streams that an owner has of each group, T."""
        return tuple(max(len(groups[g]) for groups in self.of_owner) for g in range(len(self.groups)))

    @functools.cached_property
    def no_id(self) -> int:
        """The number in lists of ids that stands for none."""
        return max(group.rows for group in self.groups)

    @functools.cached_property
    def counted(self) -> int:
        """J, the most counted streams that an owner has."""
        return max(sum(s.counted for of_group in groups for s in of_group) for groups in self.of_owner)

    @functools.cached_property
    def blocks(self) -> int:
        """Blocks that travel between two devices: the most that an owner fills, without shared streams."""
        return max(self._filled(owner, False) for owner in range(self.devices))

    @functools.cached_property
    def shared_blocks(self) -> int:
        """Blocks of shared streams that travel between two devices: the most that a host fills."""
        return max(self._filled(owner, True) for owner in range(self.devices))

    def _filled(self, owner: int, shared: bool) -> int:
        return len(self._places[shared][owner])

    def columns(self, owner: int, shared: bool = False) -> int:
        """Columns of the vectors that an owner, or its host, sends for each sample, without padding."""
        return self._filled(owner, shared) * self.block

    @functools.cached_property
    def starts(self) -> dict[tuple[int, str], int]:
        """(owner, stream) -> its first block, of a shared one in the other buffer."""
        found = {}
        for owner, groups in enumerate(self.of_owner):
            start = [0, 0]
            for group, streams in zip(self.groups, groups, strict=True):
                for stream in streams:
                    found[owner, stream.name] = start[stream.shared]
                    start[stream.shared] += group.dim // self.block
        return found

    def sent_blocks(self, shared: bool) -> np.ndarray | None:
        """Returns the block of its sums that an owner sends in each place, int32 [N, `blocks`]; None if they lie so.

        Its sums are blocks too: of each group T streams, whether the owner has them or not. Beyond the last is nothing.
        """
        if len(self.groups) == 1 and not self.shared_blocks:
            return None
        size = self.shared_blocks if shared else self.blocks
        found = np.full((self.devices, size), self.summed_blocks, np.int32)
        for owner, places in enumerate(self._places[shared]):
            found[owner, : len(places)] = places
        return found

    def arrived_blocks(self) -> np.ndarray | None:
        """The inverse of `sent_blocks`: the place of each block of an owner's sums; a number beyond where it has none.

        Places in the buffer of shared streams follow those in the other.
        """
        if len(self.groups) == 1 and not self.shared_blocks:
            return None
        found = np.full((self.devices, self.summed_blocks), self.blocks + self.shared_blocks, np.int32)
        for first, of_owners in zip((0, self.blocks), self._places, strict=True):
            for owner, places in enumerate(of_owners):
                found[owner, places] = first + np.arange(len(places), dtype=np.int32)
        return found

    @property
    def summed_blocks(self) -> int:
        """Blocks of the sums of every owner."""
        return sum(group.dim // self.block * T for group, T in zip(self.groups, self.widths, strict=True))

    @functools.cached_property
    def _places(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """For each owner: of the blocks that it sends, the places among its sums; those of shared streams apart."""
        found: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
        for groups in self.of_owner:
            places: tuple[list[int], list[int]] = ([], [])
            start = 0
            for group, T, streams in zip(self.groups, self.widths, groups, strict=True):
                each = group.dim // self.block
                for t, stream in enumerate(streams):
                    places[stream.shared].extend(range(start + t * each, start + (t + 1) * each))
                start += each * T
            for all_of, own in zip(found, places, strict=True):
                all_of.append(np.array(own, np.int32))
        return found

    def fixed_lengths(self, g: int) -> np.ndarray:
        """Ids of a bag of each stream of a group that is not counted, int32 [N, T]; 0 for others."""
        found = np.zeros((self.devices, self.widths[g]), np.int32)
        for owner, groups in enumerate(self.of_owner):
            for t, stream in enumerate(groups[g]):
                found[owner, t] = 0 if stream.counted else stream.feature.bag or 0
        return found

    def counted_rows(self, g: int) -> np.ndarray:
        """Returns the number of each stream of a group among an owner's counts, int32 [N, T]; J for none."""
        found = np.full((self.devices, self.widths[g]), self.counted, np.int32)
        for owner, groups in enumerate(self.of_owner):
            row = sum(s.counted for of_group in groups[:g] for s in of_group)
            for t, stream in enumerate(groups[g]):
                if stream.counted:
                    found[owner, t] = row
                    row += 1
        return found


@dataclasses.dataclass(frozen=True)
class BoundPlan(InReplicas):
    """A plan bound to N devices in equal hosts, or to as many in each of some replica groups.

    Attributes:
      devices: N.
      hosts: machines that these are in.
      groups: the table groups.
      features: all features.
      pools: what is pooled from their rows; each feature is in one lookup, or in one for each range of its columns.
      replicas: groups of N devices.
      independent: as `Group` has it.
      pooled: exchanges of vectors that owners of rows have pooled.
    """

    devices: int
    hosts: int
    groups: tuple[Group, ...]
    features: tuple[FeatureSpec, ...]
    pools: tuple[Pool, ...]
    replicas: int = 1
    independent: bool = False
    pooled: tuple[PooledExchange, ...] = ()

    @property
    def fetching(self) -> tuple[Group, ...]:
        """The groups whose rows travel, or are looked up where they are."""
        return tuple(group for group in self.groups if group.sources)

    @property
    def cached(self) -> tuple[Group, ...]:
        """The groups whose buffers are caches."""
        return tuple(group for group in self.groups if group.cached)

    @property
    def listing(self) -> tuple[Group, ...]:
        """Groups of `fetching` of which devices list the rows that they fetch."""
        return tuple(group for group in self.fetching if group.listed)

    @property
    def hot(self) -> tuple[Group, ...]:
        """The other ones, whose rows every device has at hand: see `exchange/copies.py`."""
        return tuple(group for group in self.fetching if not group.listed)

    def streams_of(self, group: str) -> list[tuple[str, Stream]]:
        """The streams that look rows up in a group, by its name, each after the name of its exchange."""
        return [
            (exchange.name, stream)
            for exchange in self.pooled
            for member, streams in zip(exchange.groups, exchange.streams, strict=True)
            for stream in streams
            if member.name == group
        ]

    def sources_of(self, group: Group) -> list[Source]:
        """Lookups of features in a group, whether its rows travel or their owners pool them."""
        return [*group.sources, *(stream.source for _, stream in self.streams_of(group.name))]

    @functools.cached_property
    def lookups(self) -> tuple[Lookup, ...]:
        """Lookups of all pools."""
        return tuple(lookup for pool in self.pools for lookup in pool.lookups)

    def buffer_bytes(self, item_bytes: int) -> int:
        """Bytes of all buffers and slots that one device allocates; `item_bytes` as for `Group.row_bytes`."""
        return sum(group.rows * group.row_bytes(item_bytes) for group in self.groups)

    def group(self, name: str) -> Group:
        """Returns the group called `name`."""
        return next(group for group in self.groups if group.name == name)

    def with_groups(self, groups: Mapping[str, Group]) -> BoundPlan:
        """Returns the plan with others in place of the groups of these names."""
        pooled = (dataclasses.replace(e, groups=tuple(groups.get(g.name, g) for g in e.groups)) for e in self.pooled)
        of_plan = tuple(groups.get(group.name, group) for group in self.groups)
        return dataclasses.replace(self, groups=of_plan, pooled=tuple(pooled))

    def segments(self, table: str) -> list[tuple[Group, BoundSegment]]:
        """Returns the segments of a table with their groups, in the order of its plan."""
        return self._segments[table]

    @functools.cached_property
    def _segments(self) -> dict[str, list[tuple[Group, BoundSegment]]]:
        """By table."""
        found: dict[str, list[tuple[Group, BoundSegment]]] = {}
        for group in self.groups:
            for segment in group.segments:
                found.setdefault(segment.spec.name, []).append((group, segment))
        for of_table in found.values():
            of_table.sort(key=lambda pair: (pair[1].number, pair[1].first))
        return found
