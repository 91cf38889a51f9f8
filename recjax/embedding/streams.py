"""Streams of pooled vectors: which bags each owner of rows sums for all devices, and their places in what travels.

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

from recjax.embedding.layout import IDS, ROWS, Group
from recjax.embedding.segment import Exchange
from recjax.embedding.sharding import Source
from recjax.embedding.spec import FeatureSpec


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
