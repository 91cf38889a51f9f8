"""Sizes of what a training step does under a plan, without compiling it: of lists of rows, of buffers, of products.

The program of a step has static sizes, those of the device that needs most, and pads the others to them. So one set of
sizes stands for all devices, and imbalance shows in it as padding.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import numpy as np

from recjax.embedding.exchange.base import GroupExchange, replica_events
from recjax.embedding.exchange.copies import ReplicatedExchange
from recjax.embedding.exchange.events import Event
from recjax.embedding.exchange.pooled import PoolingExchange
from recjax.embedding.group import Group
from recjax.embedding.layout import ACROSS, ROWS, SUMMED, BoundPlan, PooledExchange
from recjax.embedding.routing.capacity import LISTED_IDS, LISTED_ROWS, ROOM, rung
from recjax.embedding.sharded import exchange_of
from recjax.embedding.sharding import BoundSegment
from recjax.embedding.spec import FeatureSpec, TableSpec
from recjax.planning.loads import Workload
from recjax.utils.phases import Phase

_HEAPS = 0.8  # exponent with which distinct rows grow with samples, as long as the table has more


RoutedBy = Literal["", "pooled", "split_pooled"]


@dataclasses.dataclass(frozen=True)
class Routed:
    """Ids that go one way.

    Attributes:
      by: which way: "", distinct rows are sought, and listed for their owners; "pooled", ids go on to an owner that
        pools and has all rows of the table: nothing is sought; "split_pooled", each of several owners has some rows,
        and ids are gone through for each. They are variants of `host_route` and `host_pack` in a machine file.
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


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A device's part of the rows of tables that lie together.

    Attributes:
      name: for people.
      rows: R.
      width: W, columns.
      value_bytes: of the values of a row.
      slot_bytes: of the optimizer's slots of a row.
      slots: how many of these.
    """

    name: str
    rows: int
    width: int
    value_bytes: float
    slot_bytes: float
    slots: int

    @classmethod
    def of(cls, name: str, rows: int, width: int, spec: TableSpec, item_bytes: int) -> Buffer:
        """The buffer of tables like this one, in so many rows and columns."""
        slots = spec.optimizer.slots(width)
        values = width * (2 if spec.dtype == "bfloat16" else item_bytes)
        floats = sum(math.prod(slot.shape) for slot in slots.values())
        return cls(name, rows, width, float(values), float(item_bytes * floats), len(slots))

    @property
    def bytes(self) -> float:
        """Bytes of all rows and their slots."""
        return self.rows * (self.value_bytes + self.slot_bytes)


@dataclasses.dataclass(frozen=True)
class Rows:
    """Tables whose distinct rows travel.

    Attributes:
      buffer: that holds them.
      list_rows: C, rows in the list from one device to one owner.
      ids: that a device looks up.
      bags: pooled vectors of a sample that it makes.
      events: the collectives, as their exchange tells them.
      divided: vectors of a sample that a device has parts of only, so that statistics of rows are agreed on.
    """

    buffer: Buffer
    list_rows: int
    ids: float
    bags: int
    events: tuple[Event, ...] = ()
    divided: int = 0


@dataclasses.dataclass(frozen=True)
class Copies:
    """Tables that every device holds: the rows that one asks for, its ids, and the vectors of a sample."""

    buffer: Buffer
    asked: int
    ids: float
    bags: int


@dataclasses.dataclass(frozen=True)
class Owned:
    """Tables whose owners pool.

    Attributes:
      buffer: that holds them.
      list_ids: ids in the list from one device to one owner.
      distinct: rows that an owner is asked for.
      divided: bags of an owner whose rows' columns lie with several, which then agree on statistics of rows.
      bags: vectors of a sample that an owner makes.
      agreed: collectives by which replica groups that hold the same agree on gradients.
    """

    buffer: Buffer
    list_ids: int
    distinct: int
    divided: int = 0
    bags: int = 1
    agreed: tuple[Event, ...] = ()


@dataclasses.dataclass(frozen=True)
class Vectors:
    """Pooled vectors that travel together.

    Attributes:
      groups: whose vectors they are.
      list_entries: of the list from one device to one owner: ids of all groups, and counts.
      events: the collectives, as their exchange tells them.
    """

    groups: tuple[Owned, ...]
    list_entries: int
    events: tuple[Event, ...] = ()


@dataclasses.dataclass(frozen=True)
class DenseSizes:
    """Sizes of the dense part.

    Attributes:
      layers: (K, N) of each matrix of parameters, in the order of the forward pass.
      values: of all dense parameters.
      slots: of the optimizer, for each value.
      leaves: arrays of parameters.
      pairs: (vectors, D) of a dot interaction; None without.
      columns: of all pooled vectors of a sample.
      dtype: that products are done in, see `work.matmul`.
      bucket_bytes: as `recjax.train.dense` has it; 0: gradients are sent after the backward pass.
      sharded: whether a device holds 1/N of parameters.
      accumulate: parts in which a device's samples are processed.
    """

    layers: tuple[tuple[int, int], ...]
    values: int
    slots: int
    leaves: int
    pairs: tuple[int, int] | None
    columns: int
    dtype: str = "f32"
    bucket_bytes: float = 0.0
    sharded: bool = False
    accumulate: int = 1


@dataclasses.dataclass(frozen=True)
class StepSizes:
    """Sizes of a step on one device.

    Attributes:
      devices: N, of one replica group.
      hosts: that these are in.
      samples: b, of a device.
      item_bytes: of an element that is not bfloat16.
      rows, copies, vectors: of the tables.
      host_routes: whether the host finds distinct rows.
      routed: ids of a batch of all devices, by the way in which they are routed; () if rows are listed for all.
      replicas: replica groups.
      all_hosts: that all groups are in.
    """

    devices: int
    hosts: int
    samples: int
    item_bytes: int
    rows: tuple[Rows, ...]
    copies: tuple[Copies, ...]
    vectors: tuple[Vectors, ...]
    host_routes: bool = True
    routed: tuple[Routed, ...] = ()
    replicas: int = 1
    all_hosts: int = 1

    @classmethod
    def of(
        cls,
        work: Workload,
        rows: Iterable[Rows],
        copies: Iterable[Copies],
        vectors: Iterable[Vectors],
        host_routes: bool,
        by_way: tuple[Routed, ...],
    ) -> StepSizes:
        """The sizes of a step with this work."""
        return cls(
            devices=work.devices,
            hosts=work.hosts,
            samples=work.samples,
            item_bytes=work.item_bytes,
            rows=tuple(rows),
            copies=tuple(copies),
            vectors=tuple(vectors),
            host_routes=host_routes,
            routed=by_way,
            replicas=work.replicas,
            all_hosts=work.all_hosts,
        )

    @property
    def all_devices(self) -> int:
        """Devices of all replica groups."""
        return self.devices * self.replicas

    @property
    def spread_bytes(self) -> float:
        """Bytes of the buffers and slots that a device allocates for rows that are spread over devices."""
        owned = {g.buffer for v in self.vectors for g in v.groups}  # of which rows may travel, too
        return sum(buffer.bytes for buffer in owned.union(g.buffer for g in self.rows))

    @property
    def copied_bytes(self) -> float:
        """The same for tables that every device holds alike."""
        return sum(g.buffer.bytes for g in self.copies)

    @property
    def sent_bytes(self) -> float:
        """Bytes of the collectives of a step by which rows and pooled vectors travel, with padding."""
        told = [part.events for part in self.rows] + [part.events for part in self.vectors]
        return sum(event.padded_bytes for events in told for event in events)

    @property
    def lists(self) -> list[float]:
        """Entries of the lists of ids that a device gets, one for each group."""
        found = [float(self.devices * g.list_rows) for g in self.rows] + [float(g.asked) for g in self.copies]
        return found + [float(self.devices * v.list_entries) for v in self.vectors]

    @property
    def ids(self) -> float:
        """Ids that a device looks up in what it has fetched."""
        return sum(g.ids for g in self.rows) + sum(g.ids for g in self.copies)

    @property
    def fetched_bytes(self) -> float:
        """Bytes of fetched rows, or of pooled vectors in their place, that a device receives."""
        rows = sum(self.devices * g.list_rows * g.buffer.width * self.item_bytes for g in self.rows)
        copies = sum(g.asked * g.buffer.width * self.item_bytes for g in self.copies)
        phase = Phase.POOLED_EXCHANGE
        vectors = sum(e.padded_bytes for v in self.vectors for e in v.events if e.phase == phase)
        listed = sum(self.devices * g.list_ids * 12.0 for v in self.vectors for g in v.groups)
        return rows + copies + vectors + listed


def list_rows(expected: float, owners: int, share: float = 0.0) -> int:
    """The size of a list of rows from a device to an owner.

    Args:
      expected: rows in the mean list.
      owners: over which rows are spread at random, so that some lists are longer.
      share: of all rows that are in some list; the lists are even where all are.
    """
    spread = _deviations(owners) * math.sqrt(expected * max(0.0, 1 - share))
    largest = expected + spread
    return rung(int(largest * LISTED_ROWS.room(int(largest))))


def list_ids(expected: float, counted: bool, owners: int = 1, counts: float = 0.0) -> int:
    """The size of a list of ids from a device to an owner.

    Args:
      expected: ids in the mean list of the fullest owner.
      counted: whether lists differ by chance: bags are jagged, or rows of a table lie with several owners. Then a list
        has more room at first, too (`routing.capacity`).
      owners: that have such lists of as many devices.
      counts: numbers that stand in each list beside the ids.
    """
    if not counted:
        return rung(int((expected + counts) * ROOM))
    largest = expected + _deviations(owners) * math.sqrt(expected) + counts
    return rung(int(largest * LISTED_IDS.room(int(largest))))


def _deviations(owners: int) -> float:
    """Standard deviations that the largest of the lists between so many devices lies above the mean, as if normal."""
    return math.sqrt(2 * math.log(owners**2))


def distinct_of_all(spec: TableSpec, distinct: float, ids: float, work: Workload) -> float:
    """Distinct rows that all devices together ask for, from those of one device's share of the batch."""
    grown = distinct * work.devices**_HEAPS
    return max(1.0, min(grown, float(spec.rows), ids * work.batch_size / work.replicas))


def of_plan(bound: BoundPlan, work: Workload, host_routes: bool = True) -> StepSizes:
    """The sizes of a step under a bound plan.

    Rows of a segment that is not all of a table are taken to be as frequent as others.
    """
    rows, copies = [], []
    for group in bound.fetching:
        asked_O, ids = _asked(group, work)
        largest, bags = float(asked_O.max()), len(group.sources)
        if isinstance(exchange := exchange_of(group), ReplicatedExchange):
            copies.append(Copies(_buffer(group, work.item_bytes), rung(int(largest * ROOM)), ids, bags))
            continue
        whole = group.owners == 1 or all(segment.split.owners == 1 for segment in group.segments)
        C = list_rows(largest, 1 if whole else group.owners, largest / max(1, group.rows))
        rows.append(rows_of_lists(exchange, C, ids, bags, work))
    vectors = tuple(_vectors(exchange, work) for exchange in bound.pooled)

    def ids_of(feature: FeatureSpec) -> float:
        return work.batch_size * work.profile.tables[feature.table].ids_of(feature.name)

    return StepSizes.of(work, rows, copies, vectors, host_routes, routed(bound, ids_of))


def _buffer(group: Group, item_bytes: int) -> Buffer:
    return Buffer.of(group.name, group.rows, group.width, group.segments[0].spec, item_bytes)


def _asked(group: Group, work: Workload) -> tuple[np.ndarray, float]:
    """Rows that a device asks of each owner, float64 [O]; and ids that it looks up."""
    asked_O = np.zeros(group.owners)
    ids = 0.0
    asking: dict[int, list[str]] = {}
    for source in group.sources:
        use = work.profile.tables[source.feature.table]
        share = sum(segment.band.size for segment in source.segments) / source.segments[0].spec.rows
        ids += work.samples * use.ids_of(source.feature.name) * share
        for segment in source.segments:
            asking.setdefault(id(segment), []).append(source.feature.name)
    for segment in group.segments:
        if id(segment) in asking:
            use = work.profile.tables[segment.spec.name].of(asking[id(segment)])
            start, stop = segment.split.bounds(np.arange(group.owners))
            asked_O += (use.distinct if work.dedup else work.samples * use.ids) * (stop - start) / segment.spec.rows
    return asked_O, ids


def rows_of_lists(exchange: GroupExchange, C: int, ids: float, bags: int, work: Workload) -> Rows:
    """The tables of an exchange of rows, in lists of C rows from one device to one owner."""
    group = exchange.group
    of_host = min(C * group.per_host**_HEAPS, rung(group.rows))  # asked of an owner by all devices of a host
    capacities = {group.name: C, group.name + ACROSS: rung(int(of_host)), group.name + SUMMED: group.devices * C}
    events = exchange.events(capacities, work.samples, work.item_bytes)
    divided = bags if group.divides_row_means else 0
    return Rows(_buffer(group, work.item_bytes), C, ids, bags, tuple(events), divided)


def _vectors(exchange: PooledExchange, work: Workload) -> Vectors:
    groups, samples = [], work.samples
    total_N = np.zeros(exchange.devices)
    for number, (group, streams) in enumerate(zip(exchange.groups, exchange.streams, strict=True)):
        ids_N, rows_N = np.zeros(group.devices), np.zeros(group.devices)
        asking: dict[int, tuple[BoundSegment, list[str]]] = {}
        for stream in streams:
            use = work.profile.tables[stream.feature.table]
            for segment in stream.source.segments:
                held_N = group.counts(segment)[0] / segment.spec.rows
                ids_N += samples * use.ids_of(stream.feature.name) * held_N
                asking.setdefault(id(segment), (segment, []))[1].append(stream.feature.name)
        for segment, names in asking.values():
            use = work.profile.tables[segment.spec.name].of(names)
            held_N = group.counts(segment)[0] / segment.spec.rows
            rows_N += distinct_of_all(segment.spec, use.distinct, use.ids, work) * held_N
        distinct = min(list_rows(float(rows_N.max()), 1), group.rows)
        listed = list_ids(float(ids_N.max()), bool(exchange.counted))
        bags = exchange.widths[number]
        divided = bags if group.divides_row_means else 0
        agreed = tuple(replica_events(group, {group.name + ROWS: distinct}, work.item_bytes))
        groups.append(Owned(_buffer(group, work.item_bytes), listed, distinct, divided, bags, agreed))
        total_N += ids_N
    # The fullest owner of all groups together, which is no group's fullest alone.
    entries = list_ids(float(total_N.max()), bool(exchange.counted), exchange.devices, exchange.counted * samples)
    events = PoolingExchange(exchange).events({exchange.name: entries}, samples, work.item_bytes)
    return Vectors(tuple(groups), entries, tuple(events))


def total_ids(work: Workload, tables: Sequence[TableSpec]) -> float:
    """Ids of a batch, over all devices."""
    return work.batch_size * sum(work.profile.tables[t.name].ids for t in tables)
