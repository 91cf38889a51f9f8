"""Ways of tables, and the sizes of a step in which each table goes its way: what a planner searches in.

A table goes one of four ways: every device has a copy; its rows are spread over all devices, and distinct rows travel;
a few devices have it, in shards where that evens out loads, and pool; or one device has all of it, and pools. Rows that
are not all on the devices are `tier_choice`'s, hot rows `hot`'s.

Sizes here take tables with owners as spread evenly, as `balance` comes near to, and shards as ranges of rows;
`step_sizes.of_plan` has those of the plan that `as_plan` makes of an assignment.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import functools
import heapq
import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from recjax.embedding.bands import Band, BoundSegment
from recjax.embedding.bind import stack_of
from recjax.embedding.exchange.base import replica_events
from recjax.embedding.exchange.pooled import vector_events
from recjax.embedding.exchange.rows import RowExchange
from recjax.embedding.layout import ROWS, Group
from recjax.embedding.plan import AUTO_REPLICATE_BYTES, Plan, with_exchange
from recjax.embedding.routing.capacity import ROOM, rung
from recjax.embedding.row_order import Split
from recjax.embedding.segment import Exchange, Segment
from recjax.embedding.sharding import RowSharding
from recjax.embedding.spec import FeatureSpec, TableSpec
from recjax.planning.balance import GOOD_ENOUGH, balance
from recjax.planning.cuts import NARROWEST
from recjax.planning.loads import Workload
from recjax.planning.routed import Routed, RoutedBy, together
from recjax.planning.step_sizes import (
    Buffer,
    Copies,
    Owned,
    Rows,
    StepSizes,
    Vectors,
    distinct_of_all,
    list_ids,
    list_rows,
    rows_of_lists,
)

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

    @property
    def samples(self) -> int:
        """Samples of a device."""
        return -(-self.work.batch_size // (self.work.devices * self.work.replicas))

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
        work, b = demand.work, demand.samples
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

    def routed(self, by: RoutedBy, of_T: np.ndarray, owners: int = 0) -> Routed:
        """The ids of some tables, routed in one way."""
        return Routed(by, float(self.batch_ids_T[of_T].sum()), int(self.features_T[of_T].sum()), float(owners))

    def buffer(self, what: str, rows: int, item_bytes: int) -> Buffer:
        return Buffer.of(f"{what} of {self.spec.dim}", rows, self.spec.dim, self.spec, item_bytes)


def sizes(demand: Demand, ways: Assignment) -> StepSizes:
    """The sizes of a step if tables go these ways."""
    work, N = demand.work, demand.work.devices
    way_T = np.array([list(WAYS).index(ways[table.name]) for table in demand.tables])
    rows, copies, owned = [], [], []
    ways_of_ids: list[Routed] = []
    columns = widest = of_shards = 0.0
    ids_one: list[np.ndarray] = []  # of tables that are whole with one owner, and of others an owner's share
    ids_split = 0.0
    pooling = [feature for feature in demand.features if ways[feature.table] in POOLING]
    counted, weighted = sum(f.bag is None for f in pooling), any(f.weighted for f in pooling)
    for stack in demand.stacks:
        of_way = [way_T[stack.numbers_T] == number for number in range(len(WAYS))]
        copied_T, rows_T, even_T, whole_T = of_way
        pooled_T, split_T = even_T | whole_T, even_T.copy()
        split_T[even_T] = _split(stack.rows_T[even_T], N)
        split_T &= stack.rows_T * stack.spec.dim * 4 > AUTO_REPLICATE_BYTES  # see _placement
        ways_of_ids += [
            stack.routed("", copied_T | rows_T),
            stack.routed("pooled", pooled_T & ~split_T),
            stack.routed("split_pooled", split_T, N),
        ]
        if rows_T.any():
            rows.append(_rows(demand, stack, rows_T))
        if copied_T.any():
            asked = rung(int(float(stack.asked_T[copied_T].sum()) * ROOM))
            buffer = stack.buffer("copies", int(stack.rows_T[copied_T].sum()), work.item_bytes)
            looked_up = float(stack.ids_T[copied_T].sum()), int(stack.bags_T[copied_T].sum())
            copies.append(Copies(buffer, asked, *looked_up))
        if pooled_T.any():
            one_T = pooled_T & ~split_T
            rows_held = stack.rows_T[pooled_T].sum() / N * _UNEVEN
            rows_here = math.ceil(max(rows_held, stack.rows_T[whole_T].max(initial=0)))
            buffer = stack.buffer("owners", rows_here, work.item_bytes)
            ids, distinct = (
                _fullest(x_T[one_T], N) + float(x_T[split_T].sum()) / N for x_T in (stack.ids_T, stack.distinct_T)
            )
            bags = math.ceil(_fullest(stack.bags_T[one_T], N)) + int(stack.bags_T[split_T].sum())
            rows_asked = min(list_rows(distinct, 1), buffer.rows)
            alike = _group(demand, stack, rows_here)
            agreed = replica_events(alike, {alike.name + ROWS: rows_asked}, work.item_bytes)
            owned.append(Owned(buffer, list_ids(ids, counted > 0), rows_asked, bags=bags, agreed=tuple(agreed)))
            ids_one.append(stack.ids_T[one_T])
            ids_split += float(stack.ids_T[split_T].sum()) / N
            columns += buffer.width * float(stack.bags_T[one_T].sum())
            of_shards += buffer.width * float(stack.bags_T[split_T].sum())
            if one_T.any():
                widest = max(widest, buffer.width if whole_T.any() else min(buffer.width, NARROWEST))
    vectors: tuple[Vectors, ...] = ()
    if owned:
        widest = max(columns / N * _UNEVEN, widest) + of_shards
        ids, counts = _fullest(np.concatenate(ids_one), N) + ids_split, math.ceil(counted / N) * demand.samples
        listed = list_ids(ids, counted > 0 or ids_split > 0, N, counts)
        group = _group(demand, demand.stacks[0], 1)
        events = vector_events(
            group, listed, demand.samples, (widest, 0.0), widest, weighted, demand.exchange, work.item_bytes
        )
        vectors = (Vectors(tuple(owned), listed, tuple(events)),)
    of_tables, routed = (tuple(rows), tuple(copies), vectors), together([part for part in ways_of_ids if part.features])
    groups = work.replicas, work.all_hosts
    return StepSizes(N, work.hosts, demand.samples, work.item_bytes, *of_tables, demand.host_routes, routed, *groups)


def _split(rows_T: np.ndarray, devices: int) -> np.ndarray:
    """A mask of tables with several owners: the largest, until whole ones even out the rest, as `balance` has it."""
    sizes = sorted(set(rows_T.tolist()), reverse=True)

    def even(count: int) -> bool:
        """Returns whether it suffices to split the tables of the first so many sizes."""
        split_T = np.isin(rows_T, sizes[:count])
        held = [rows_T[split_T].sum() / devices] * devices
        for rows in np.sort(rows_T[~split_T])[::-1].tolist():
            heapq.heapreplace(held, held[0] + rows)  # the heaviest first, to the one that has least
        return bool(max(held) <= GOOD_ENOUGH * rows_T.sum() / devices)

    count = bisect.bisect_left(range(len(sizes)), True, key=even)
    return np.isin(rows_T, sizes[:count])


def _fullest(of_table_T: np.ndarray, devices: int) -> float:
    """Load of the owner that has most of it: of a buffer with fewer tables than devices that of one of them."""
    return max(float(of_table_T.sum()) / devices * _UNEVEN, float(of_table_T.max(initial=0)))


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
    asked = tuple(
        t if t.placement else dataclasses.replace(t, placement=_placement(t, ways[t.name])) for t in demand.tables
    )
    exchange = dataclasses.replace(demand.exchange, kind="pooled")
    alone = demand.work.devices == 1
    divided = balance(asked, demand.features, demand.work, exchange)
    found = {}
    for table in demand.tables:
        way, segments = ways[table.name], divided.tables[table.name]
        if way not in POOLING or alone:
            kind = dataclasses.replace(demand.exchange, kind="rows")
            segments = tuple(with_exchange(segment, kind) for segment in segments)
        found[table.name] = tuple(_because(segment, table, why[table.name]) for segment in segments)
    return Plan(found)


def _placement(table: TableSpec, way: Way) -> str | None:
    """Returns the spec that `balance` takes for a table: it splits what it may place, and else copies small tables."""
    small = table.rows * table.dim * 4 <= AUTO_REPLICATE_BYTES
    pooled = "table_wise" if small else None
    return {"copy": "data_parallel", "rows": "row_wise", "pooled": pooled, "whole": "table_wise"}[way]


def _because(segment: Segment, table: TableSpec, why: str) -> Segment:
    if table.placement:
        return dataclasses.replace(segment, why=f"embedding.tables.{table.name}.placement={table.placement}; {why}")
    split = segment.why.partition(": ")[2] if segment.why.startswith("balanced") else ""
    return dataclasses.replace(segment, why=f"{why}; {split}" if split and split != "whole" else why)
