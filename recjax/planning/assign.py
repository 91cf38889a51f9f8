"""Ways of tables, and the sizes of a step in which each table goes its way: what a planner searches in.

A table goes one of four ways: every device has a copy; its rows are spread over all devices, and distinct rows travel;
a few devices have it, in shards where that evens out loads, and pool; or one device has all of it, and pools. Rows that
are not all on the devices are `tier_choice`'s, hot rows `hot`'s.

Sizes here take tables with owners as spread evenly, as `balance` comes near to, and shards as ranges of rows;
`step_sizes.of_plan` has those of the plan that `as_plan` makes of an assignment.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import heapq
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from recjax.embedding.bind import stack_of
from recjax.embedding.exchange.base import replica_events
from recjax.embedding.exchange.pooled import vector_events
from recjax.embedding.exchange.rows import RowExchange
from recjax.embedding.group import Group
from recjax.embedding.layout import ROWS
from recjax.embedding.plan import Plan, with_exchange
from recjax.embedding.routing.capacity import ROOM, rung
from recjax.embedding.row_order import Band, Split
from recjax.embedding.segment import Exchange, Segment
from recjax.embedding.sharding import BoundSegment, RowSharding
from recjax.embedding.spec import FeatureSpec, TableSpec
from recjax.parallel.mesh import MODEL_AXES
from recjax.planning.balance import ALLOCATED, LARGEST, balance
from recjax.planning.cuts import LISTED, NARROWEST, Cut, cut_to
from recjax.planning.loads import Workload
from recjax.planning.step_sizes import (
    Buffer,
    Copies,
    Owned,
    Routed,
    RoutedBy,
    Rows,
    StepSizes,
    Vectors,
    distinct_of_all,
    list_ids,
    list_rows,
    rows_of_lists,
    together,
)
from recjax.utils.phases import Phase

Way = Literal["copy", "rows", "pooled", "whole"]
WAYS: dict[Way, str] = {
    "copy": "a copy on every device",
    "rows": "rows spread, distinct rows travel",
    "pooled": "with owners, which pool",
    "whole": "whole with one owner, which pools",
}
POOLING: tuple[Way, ...] = ("pooled", "whole")
_UNEVEN = 1.15  # the fullest owner over the mean, in ids and columns

Assignment = Mapping[str, Way]  # of each table


@dataclasses.dataclass(frozen=True)
class Demand:
    """Tables, what a step asks of them, and how rows and vectors travel."""

    tables: tuple[TableSpec, ...]
    features: tuple[FeatureSpec, ...]
    work: Workload
    exchange: Exchange
    host_routes: bool = True

    @functools.cached_property
    def stacks(self) -> tuple[_Stack, ...]:
        """Tables that share a buffer if they go the same way."""
        found: dict[Any, list[int]] = collections.defaultdict(list)
        for number, table in enumerate(self.tables):
            found[stack_of(table, table.dim, self.exchange)].append(number)
        return tuple(_Stack.of(self, np.array(numbers)) for numbers in found.values())


@dataclasses.dataclass(frozen=True)
class _Stack:
    """Tables that may share a buffer: their numbers, and of each what a step asks of it."""

    numbers_T: np.ndarray
    spec: TableSpec
    rows_T: np.ndarray
    ids_T: np.ndarray  # of a device
    bags_T: np.ndarray  # vectors of a sample
    asked_T: np.ndarray  # rows that a device asks for
    distinct_T: np.ndarray  # rows that all devices ask for
    batch_ids_T: np.ndarray  # of a batch of all devices
    features_T: np.ndarray  # that look them up

    @classmethod
    def of(cls, demand: Demand, numbers_T: np.ndarray) -> _Stack:
        work, b = demand.work, demand.work.samples
        specs = [demand.tables[number] for number in numbers_T]
        uses = [work.profile.tables[spec.name] for spec in specs]
        ids_T = np.array([b * use.ids for use in uses])
        distinct = [distinct_of_all(s, use.distinct, use.ids, work) for s, use in zip(specs, uses, strict=True)]
        asked_T = np.array([use.distinct for use in uses]) if work.dedup else ids_T
        bags_T = np.array([max(1, use.bags) for use in uses])
        rows_T = np.array([spec.rows for spec in specs])
        batch_ids_T = np.array([work.batch_size * use.ids for use in uses])
        features_T = np.array([len(use.features) or max(1, use.bags) for use in uses])
        asking = asked_T, np.array(distinct), batch_ids_T, features_T
        return cls(numbers_T, specs[0], rows_T, ids_T, bags_T, *asking)

    def routed(self, by: RoutedBy, of_T: np.ndarray, owners: int = 0, ranges: int = 1) -> Routed:
        """The ids of some tables, routed in one way, once for each of so many ranges of columns."""
        ids, features = float(self.batch_ids_T[of_T].sum()), int(self.features_T[of_T].sum())
        return Routed(by, ids * ranges, features * ranges, float(owners))

    def buffer(self, what: str, rows: int, width: int, item_bytes: int) -> Buffer:
        """A buffer of tables of this kind, or of ranges of their columns."""
        return Buffer.of(f"{what} of {width} like {self.spec.name}", rows, width, self.spec, item_bytes)


def sizes(demand: Demand, ways: Assignment) -> StepSizes:
    """The sizes of a step if tables go these ways."""
    work, N = demand.work, demand.work.devices
    way_T = np.array([list(WAYS).index(ways[table.name]) for table in demand.tables])
    rows, copies = [], []
    ways_of_ids: list[Routed] = []
    buffers: dict[Any, list[_Shards]] = collections.defaultdict(list)
    for stack in demand.stacks:
        copied_T, rows_T, even_T, whole_T = (way_T[stack.numbers_T] == number for number in range(len(WAYS)))
        ways_of_ids.append(stack.routed("", copied_T | rows_T))
        if rows_T.any():
            rows.append(_rows(demand, stack, rows_T))
        if copied_T.any():
            asked = rung(int(float(stack.asked_T[copied_T].sum()) * ROOM))
            buffer = stack.buffer("copies", int(stack.rows_T[copied_T].sum()), stack.spec.dim, work.item_bytes)
            looked_up = float(stack.ids_T[copied_T].sum()), int(stack.bags_T[copied_T].sum())
            copies.append(Copies(buffer, asked, *looked_up))
        for of_T, width in (
            (even_T, cut_to(Cut(stack.spec, stack.spec.dim), NARROWEST).width),
            (whole_T, stack.spec.dim),
        ):
            if of_T.any():
                key = stack_of(stack.spec, width, demand.exchange)
                buffers[key].append(_Shards(stack, of_T, width, of_T is even_T))
    vectors: tuple[Vectors, ...] = ()
    if buffers:
        pooling = [feature for feature in demand.features if ways[feature.table] in POOLING]
        counted, weighted = sum(f.bag is None for f in pooling), any(f.weighted for f in pooling)
        owned = [_owned(demand, shards, counted > 0) for shards in buffers.values()]
        shards = [s for of_buffer in buffers.values() for s in of_buffer]
        parts = _parts(demand, shards)
        ways_of_ids += [part for s, p in zip(shards, parts, strict=True) for part in s.routed(p)]
        columns = sum(float((s.vectors_T * p).sum()) * s.width for s, p in zip(shards, parts, strict=True))
        widest = max(columns / N * _UNEVEN, *(float(x.bags * x.buffer.width) for x in owned))
        split = any((p > 1).any() for p in parts)
        counts = math.ceil(counted / N) * work.samples
        listed = list_ids(_fullest(shards, parts, "ids_T", N), counted > 0 or split, N, counts)
        meeting = _group(demand, demand.stacks[0], 1).meeting
        events = vector_events(
            meeting, listed, work.samples, (widest, 0.0), widest, weighted, demand.exchange, work.item_bytes
        )
        if any(tables.divided for tables in owned):
            size = N * listed * work.item_bytes
            events += [meeting.event(Phase.ROW_STATISTIC, "all-to-all", MODEL_AXES, size)] * 2
        vectors = (Vectors(tuple(owned), listed, tuple(events)),)
    routed = together([part for part in ways_of_ids if part.features])
    return StepSizes.of(work, rows, copies, vectors, demand.host_routes, routed)


@dataclasses.dataclass(frozen=True)
class _Shards:
    """Tables of a stack whose owners pool, in ranges of columns; the rows of some may be divided."""

    stack: _Stack
    of_T: np.ndarray
    width: int
    divisible: bool

    @property
    def ranges(self) -> int:
        """Ranges of columns, each with an owner of its own."""
        return -(-self.stack.spec.dim // self.width)

    @property
    def vectors_T(self) -> np.ndarray:
        """Vectors of a sample from each part of the rows of a table, of all ranges together."""
        return self.stack.bags_T[self.of_T] * self.ranges

    def sum(self, field: str) -> float:
        """Returns the sum of something over all tables and ranges."""
        return float(getattr(self.stack, field)[self.of_T].sum()) * self.ranges

    def routed(self, parts_T: np.ndarray) -> list[Routed]:
        """Returns the ids of tables whose owners have all rows, and of others."""
        places_T = np.flatnonzero(self.of_T)
        split = parts_T > 1
        found = [self.stack.routed("pooled", places_T[~split], 0, self.ranges)] if (~split).any() else []
        if split.any():
            found.append(self.stack.routed("split_pooled", places_T[split], round(parts_T[split].mean()), self.ranges))
        return found


def _parts(demand: Demand, shards: Sequence[_Shards]) -> list[np.ndarray]:
    """Parts of the rows of each table, [T] of each: as many as `balance` makes for even rows, and for ids."""
    N = demand.work.devices
    values = sum(s.sum("rows_T") * s.width for s in shards) / N
    ids = sum(s.sum("ids_T") for s in shards) / N
    parts: list[np.ndarray] = []
    for most in LARGEST:
        parts, sizes = [], [np.zeros(0)]
        for s in shards:
            rows_T, ids_T = s.stack.rows_T[s.of_T], s.stack.ids_T[s.of_T]
            parts_T = np.maximum(rows_T * s.width / (most * values), ids_T / max(1.0, most * LISTED * ids))
            parts_T = np.clip(np.ceil(parts_T), 1, np.minimum(N, rows_T)) if s.divisible else np.ones(len(rows_T))
            parts.append(parts_T)
            sizes.append(np.repeat(rows_T * s.width / parts_T, (s.ranges * parts_T).astype(int)))
        loads = [0.0] * N
        for size in np.sort(np.concatenate(sizes))[::-1].tolist():
            heapq.heapreplace(loads, loads[0] + size)  # the largest first, to the one that has least
        if max(loads) <= ALLOCATED * values:
            break
    return parts


def _fullest(shards: Sequence[_Shards], parts: Sequence[np.ndarray], field: str, devices: int) -> float:
    """Load of the owner that has most of it: of fewer shards than devices that of one of them."""
    largest = max(float((getattr(s.stack, field)[s.of_T] / p).max()) for s, p in zip(shards, parts, strict=True))
    return max(sum(s.sum(field) for s in shards) / devices * _UNEVEN, largest)


def _owned(demand: Demand, shards: Sequence[_Shards], counted: bool) -> Owned:
    """The tables of a buffer whose owners pool."""
    work, N, first = demand.work, demand.work.devices, shards[0]
    parts = _parts(demand, shards)
    rows = math.ceil(_fullest(shards, parts, "rows_T", N))
    buffer = first.stack.buffer("owners", rows, first.width, work.item_bytes)
    bags = sum(float((s.vectors_T * p).sum()) for s, p in zip(shards, parts, strict=True))
    distinct = min(list_rows(_fullest(shards, parts, "distinct_T", N), 1), buffer.rows)
    alike = _group(demand, first.stack, rows)
    agreed = tuple(replica_events(alike, {alike.name + ROWS: distinct}, work.item_bytes))
    split = counted or any((p > 1).any() for p in parts)
    listed, vectors = list_ids(_fullest(shards, parts, "ids_T", N), split), math.ceil(bags / N)
    divided = first.stack.spec.optimizer.row_wise and first.width < first.stack.spec.dim
    return Owned(buffer, listed, distinct, vectors if divided else 0, vectors, agreed)


def _rows(demand: Demand, stack: _Stack, rows_T: np.ndarray) -> Rows:
    """The tables of a stack whose rows are spread."""
    work, N = demand.work, demand.work.devices
    asked, rows = float(stack.asked_T[rows_T].sum()), int(stack.rows_T[rows_T].sum())
    C = list_rows(asked / N, N, asked / max(1, rows))
    ids, bags = float(stack.ids_T[rows_T].sum()), int(stack.bags_T[rows_T].sum())
    return rows_of_lists(RowExchange(_group(demand, stack, math.ceil(rows / N))), C, ids, bags, work)


def _group(demand: Demand, stack: _Stack, rows: int) -> Group:
    """A group with so many rows on a device, of tables like those of a stack, spread by rows."""
    work, spec = demand.work, stack.spec
    split = Split(spec.rows, work.devices)
    segment = BoundSegment(spec, "row_wise", split, (0,) * work.devices, Band(spec.rows), 0, spec.dim)
    return Group(
        f"rows of {spec.dim}",
        RowSharding(work.devices, work.hosts),
        rows,
        (segment,),
        (),
        exchange=demand.exchange,
        replicas=work.replicas,
        independent=work.replicas > 1 and not work.groups_agree,
        row_pieces=demand.exchange.pieces if work.devices > 1 else 1,
    )


def as_plan(demand: Demand, ways: Assignment, why: Mapping[str, str]) -> Plan:
    """A plan in which tables go these ways; those with owners are divided by `balance`.

    Args:
      demand: of all tables.
      ways: of each table. A table with a placement of its own keeps that.
      why: the reason of each table's way, for people.
    """
    placements = {"copy": "data_parallel", "rows": "row_wise", "pooled": None, "whole": "table_wise"}
    asked = tuple(
        t if t.placement else dataclasses.replace(t, placement=placements[ways[t.name]]) for t in demand.tables
    )
    exchange = dataclasses.replace(demand.exchange, kind="pooled")
    alone = demand.work.devices == 1
    divided = balance(asked, demand.features, demand.work, exchange, copies=False)
    found = {}
    for table in demand.tables:
        way, segments = ways[table.name], divided.tables[table.name]
        if way not in POOLING or alone:
            kind = dataclasses.replace(demand.exchange, kind="rows")
            segments = tuple(with_exchange(segment, kind) for segment in segments)
        found[table.name] = tuple(_because(segment, table, why[table.name]) for segment in segments)
    return Plan(found)


def _because(segment: Segment, table: TableSpec, why: str) -> Segment:
    if table.placement:
        return dataclasses.replace(segment, why=f"embedding.tables.{table.name}.placement={table.placement}; {why}")
    split = segment.why.partition(": ")[2] if segment.why.startswith("balanced") else ""
    return dataclasses.replace(segment, why=f"{why}; {split}" if split and split != "whole" else why)
