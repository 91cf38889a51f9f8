"""Hot rows: which rows every device gets at hand (`embedding.hot`), after P2RES's two-fold parallelism.

A row is worth a copy on every device, or on every host, if nearly every device asks for it in nearly every step: then
its gradient is summed by a reduce-scatter and its new value comes by an all-gather, in arrays without ids, and the
input need not sort the ids that name it. Rows are taken in the order of P(a device's share of a batch names it), as
counted in the run's own first batches (`recjax.data.presence`); where rows travel without dedup, of the ids that name
them.

How many: those with which the tables' part of a step is shortest, by the machine's measured curves of what changes with
the number K: all-to-alls of ids, rows and gradients, gathers, sorts and scatters of the rest; reduce-scatter,
all-gather and passes over K rows; and routing on the host. Without a machine, by the bytes that a device sends. With
distinct rows a row costs p * (N-1)/N * (4 + 8 D) bytes where it is asked for, and 2 * (N-1)/N * 4 (D + 1) with a
copy: at equal rates of both collectives no copy is worth it, and "none" is the answer. A copy on every host takes as
many bytes as one on every device.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from recjax.data.pipeline import batches
from recjax.data.presence import Presence, count_presence
from recjax.embedding.plan import Plan
from recjax.embedding.routing.host import devices_route
from recjax.embedding.segment import COPIED, HOT, HOT_PER_HOST, HOT_PLACEMENTS, RowIds, Segment
from recjax.embedding.spec import FeatureSpec, TableSpec, ids_per_sample
from recjax.errors import ConfigError
from recjax.planning.costs import Costs
from recjax.planning.machine import Machine, open_machine
from recjax.planning.work import Work, gather, scatter, sort
from recjax.utils.text import aligned

if TYPE_CHECKING:
    from recjax.config.run import RunConfig
    from recjax.data.source import BlockSource

MOST_IDS = 2**26  # in the batches that are counted


@dataclasses.dataclass(frozen=True)
class Candidates:
    """Rows that may be hot, the best first; M of them in G stacks of equal width.

    Attributes:
      tables: names of their tables.
      table_M: index of each one's.
      ids_M: within the table.
      asked_M: how often a device's share of a batch asks for it, float64: P(it does) with dedup, else ids.
      found_M: ids of a batch that name it.
      row_bytes_M: D * itemsize of each.
      slot_bytes_M: of its optimizer's slots.
      other_ids: ids of a batch that name rows of other tables.
      joining_ids: of these ids of tables that become hot as a whole once any row is: see `joins`.
      features: that look up tables.
    """

    tables: tuple[str, ...]
    table_M: np.ndarray
    ids_M: np.ndarray
    asked_M: np.ndarray
    found_M: np.ndarray
    row_bytes_M: np.ndarray
    slot_bytes_M: np.ndarray
    other_ids: float
    joining_ids: float = 0.0
    features: int = 1


def ranked(
    plan: Plan,
    config: RunConfig,
    source: BlockSource,
    tables: Sequence[TableSpec],
    features: Sequence[FeatureSpec],
    shape: tuple[int, int, int],
) -> tuple[Candidates, Presence]:
    """The rows that may be hot, and the presence that they are ranked by; arguments are those of `hot.hot_rows`."""
    presence = first_batches(config, source, tables, features, math.prod(shape))
    free = [t for t in tables if may_be_hot(plan.tables[t.name])]
    found = candidates(presence, tables, free, plan, config.embedding.dedup, config.item_bytes)
    return dataclasses.replace(found, features=len(features)), presence


def may_be_hot(segments: Sequence[Segment]) -> bool:
    """True if some rows of a table can be hot: it has no copies already, and is not split by rows into sets."""
    return all(s.rows == "all" and s.placement not in COPIED for s in segments)


def joins(table: TableSpec, segments: Sequence[Segment]) -> bool:
    """True if a table that all devices have copies of anyway becomes hot, to travel in the same arrays as hot rows."""
    return table.placement is None and all(s.placement == COPIED[0] for s in segments)


def first_batches(
    config: RunConfig,
    source: BlockSource,
    tables: Sequence[TableSpec],
    features: Sequence[FeatureSpec],
    shares: int,
    position: int = 0,
) -> Presence:
    """Counts `embedding.hot.batches` batches of a run from a sample on, or as many as have `MOST_IDS` ids."""
    train = config.train
    ids = ids_per_sample(features) * train.batch_size
    rows = int(source.row_counts("train").sum())
    count = max(1, min(config.embedding.hot.batches, int(MOST_IDS / max(1, ids)), -(-rows // train.batch_size)))
    order: Any = {
        "seed": config.seed,
        "shuffle": train.shuffle,
        "shuffle_blocks": train.shuffle_blocks,
        "position": position,
    }
    stream = itertools.islice(batches(source, "train", train.batch_size, workers=0, **order), count) if rows else ()
    looking = [(f.reads, f.table) for f in features]
    return count_presence(stream, {t.name: t.rows for t in tables}, looking, train.batch_size, shares)


def candidates(
    presence: Presence, tables: Sequence[TableSpec], free: Sequence[TableSpec], plan: Plan, dedup: bool, item_bytes: int
) -> Candidates:
    """The rows that may be hot, those that travel most first; equal ones in the order of the tables and their ids."""
    of: list[list[np.ndarray]] = []
    for number, table in enumerate(free):
        items = presence.tables[table.name]
        found_U = presence.occurrences(table.name)
        asked_U = presence.probability(table.name) if dedup else found_U / presence.shares
        if any(s.exchange.kind == "pooled" for s in plan.tables[table.name]):
            asked_U = asked_U * 0  # vectors travel, whichever rows they are sums of
        value_bytes = 2 if table.dtype == "bfloat16" else item_bytes
        slots = sum(math.prod(slot.shape) for slot in table.optimizer.slots(table.dim).values())
        sizes = (number, table.dim * value_bytes, slots * item_bytes)
        of.append([*(np.full(len(items.ids_U), size) for size in sizes), items.ids_U, asked_U, found_U])
    joined = [np.concatenate(column) for column in zip(*of, strict=True)] if of else [np.zeros(0, np.int64)] * 6
    table_M, row_bytes_M, slot_bytes_M, ids_M, asked_M, found_M = joined
    order_M = np.lexsort((ids_M, table_M, -found_M, -asked_M))
    others = [t for t in tables if t not in free]
    joining = [t for t in others if joins(t, plan.tables[t.name])]
    ids, joining_ids = (sum(float(presence.occurrences(t.name).sum()) for t in of) for of in (others, joining))
    return Candidates(
        tuple(t.name for t in free),
        table_M[order_M],
        ids_M[order_M],
        asked_M[order_M],
        found_M[order_M],
        row_bytes_M[order_M],
        slot_bytes_M[order_M],
        ids,
        joining_ids,
    )


LADDER = (0, *(64 * 2**n for n in range(12)))  # numbers of rows that are compared: 64 to 131,072
WORTH = 0.05  # of the time without hot rows, that a set must save
_HOT_ID = 0.4  # of the host's time for an id, where its row is hot: one look-up in place of a sort
_PASSES = 10  # over the rows of which all are read and written: copied beside the others, their gradients, the new rows


@dataclasses.dataclass(frozen=True)
class HotCopies:
    """Copies of hot rows on the devices of a replica group: see `recjax.embedding.exchange.copies`.

    Attributes:
      devices: N.
      hosts: H, in which these stand.
      per_host: whether every host has a copy, divided over its devices, and not every device.
    """

    devices: int
    hosts: int = 1
    per_host: bool = False

    @property
    def placement(self) -> str:
        """Placement of segments of these rows."""
        return HOT_PER_HOST if self.per_host else HOT

    @property
    def holders(self) -> int:
        """Number of devices that hold a copy together."""
        return self.devices // self.hosts if self.per_host else 1

    @property
    def all_devices(self) -> dict[str, float]:
        """Sizes of a collective of all devices beside its bytes."""
        return {"devices": float(self.devices)} | ({"hosts": float(self.hosts)} if self.hosts > 1 else {})

    def held_bytes(self, row_bytes: Any, slot_bytes: Any) -> Any:
        """Bytes of a row that a device holds between steps, with its part of the optimizer's slots; elementwise."""
        return row_bytes / self.holders + slot_bytes / self.devices

    def step_bytes(self, row_bytes: Any, slot_bytes: Any) -> Any:
        """Bytes of a row in a step, in which devices that hold ranges have all rows besides; elementwise."""
        return self.held_bytes(row_bytes, slot_bytes) + (row_bytes if self.holders > 1 else 0)

    def works(self, rows: int, row_bytes: float) -> list[Work]:
        """Work of a device for so many hot rows of one width in a step."""
        moved, N = rows * row_bytes, self.devices
        marked = moved + 4 * rows  # gradients, and how many devices touched each row
        if self.per_host:
            E, H = self.holders, self.hosts
            inside, across = {"devices": float(E), "hosts": 1.0}, {"devices": float(H), "hosts": float(H)}
            sent = [("all_gather", moved, inside), ("reduce_scatter", marked, inside)]
            sent += [("reduce_scatter", marked / E, across), ("all_gather", moved / E, across)]
        else:
            sent = [("reduce_scatter", marked, self.all_devices), ("all_gather", moved, self.all_devices)]
        works = [Work(kind, {"bytes": size, **among}, 0.0, size) for kind, size, among in sent]
        passes = (_PASSES * moved, 4 * moved / N)  # over all rows, and over those that a device updates
        return works + [Work("elementwise", {"bytes": size}, 0.0, size) for size in passes]


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Estimates for one number of hot rows. Costs are in us on a machine, else in bytes that a device sends.

    Attributes:
      rows: K.
      cost: of the tables' part of a step.
      covered: share of a batch's ids that name hot rows, those of small tables that join them included.
      travelling: rows that a device still asks for.
      held_bytes: of hot rows and their slots on a device, between steps.
    """

    rows: int
    cost: float
    covered: float
    travelling: float
    held_bytes: float


@dataclasses.dataclass(frozen=True)
class Choice:
    """Chosen hot rows.

    Attributes:
      ids: name of each table that has some -> its ids, ascending.
      curve: what was compared.
      unit: of its costs, "us" or "bytes".
      why: the reason in words.
      placement: of the chosen rows.
    """

    ids: dict[str, tuple[int, ...]]
    curve: tuple[Estimate, ...]
    unit: str
    why: str
    placement: str = HOT

    @property
    def rows(self) -> int:
        """K."""
        return sum(map(len, self.ids.values()))


def hot_rows(
    plan: Plan,
    config: RunConfig,
    source: BlockSource,
    tables: Sequence[TableSpec],
    features: Sequence[FeatureSpec],
    shape: tuple[int, int, int],
    room_bytes: float = math.inf,
) -> Choice:
    """Chooses the hot rows of a run, as `embedding.hot` says; by the planner's machine, if it names none.

    Deterministic: the same data, seed, batch size and devices give the same.

    Args:
      plan: of all rows.
      config: of the run.
      source: its data, of which the first training batches are read.
      tables: of the model.
      features: of the model.
      shape: replica groups, hosts of each, devices of each of these.
      room_bytes: of a device in a step, for as many as save time.

    Raises:
      ConfigError: there is no such machine.
      DataError: the data cannot be read.
    """
    _machine(config)  # there is one, before anything is counted
    found, presence = ranked(plan, config, source, tables, features, shape)
    return choose(found, presence, config, copies_of(config, shape), room_bytes)


def copies_of(config: RunConfig, shape: tuple[int, int, int]) -> HotCopies:
    """Copies as `embedding.hot.copies` says on a mesh: replica groups, hosts of each, devices of each of these."""
    return HotCopies(shape[1] * shape[2], shape[1], config.embedding.hot.copies == "host")


def choose(
    found: Candidates, presence: Presence, config: RunConfig, copies: HotCopies, room_bytes: float = math.inf
) -> Choice:
    """Takes as many of the ranked rows as `embedding.hot` says; see `hot_rows`."""
    hot, machine = config.embedding.hot, _machine(config)
    sizes = found.row_bytes_M, found.slot_bytes_M
    rooms = (copies.held_bytes(*sizes), hot.memory_mib * 2**20), (copies.step_bytes(*sizes), room_bytes)
    limit = min(np.searchsorted(np.cumsum(each_M), room, "right") for each_M, room in rooms)
    if hot.rows != "auto":
        count = min(hot.rows, len(found.ids_M))
        why = f"embedding.hot.rows={hot.rows}"
        more = "" if count == hot.rows else f", of which the first {presence.batches} batches have {count:,}"
        return Choice(_by_table(found, count), (), "", why + more, copies.placement)
    platform = machine.platform if machine else "cpu"
    on_host = not devices_route(config.train.routing, platform, not hot.refresh)
    work = (found, copies, machine, on_host)
    counts = [count for count in LADDER if count <= min(int(limit), len(found.ids_M))] or [0]
    curve = tuple(estimate(count, *work) for count in counts)
    return _chosen(found, curve, machine, on_host, presence, config.train.batch_size, copies)


def estimate(
    rows: int, found: Candidates, copies: HotCopies, machine: Machine | None, routes_on_host: bool = True
) -> Estimate:
    """The cost of the tables' part of a step with the first `rows` candidates as hot rows.

    Args:
      rows: K.
      found: the candidates.
      copies: on which devices.
      machine: whose curves count; None: bytes do.
      routes_on_host: whether the host finds the distinct rows.
    """
    total = float(found.found_M.sum()) + found.other_ids
    hot_ids = float(found.found_M[:rows].sum()) + (found.joining_ids if rows else 0.0)
    travelling = float(found.asked_M[rows:].sum())
    held = float(copies.held_bytes(found.row_bytes_M, found.slot_bytes_M)[:rows].sum())
    cost = 0.0
    for row_bytes in np.unique(found.row_bytes_M):
        same_M = found.row_bytes_M == row_bytes
        cold, hot = float(found.asked_M[rows:][same_M[rows:]].sum()), int(same_M[:rows].sum())
        if machine is None:
            cost += _sent_bytes(cold, hot, float(row_bytes), copies.devices)
        else:
            table_bytes = float(row_bytes) * max(1.0, float(same_M.sum())) / copies.devices
            cost += _device_us(cold, hot, float(row_bytes), copies, table_bytes, Costs(machine))
    if machine is not None and routes_on_host:
        sizes = {"ids": max(1.0, total), "features": float(found.features), "devices": float(copies.devices)}
        route_us = Costs(machine).host("host_route", **sizes).us
        host_us = route_us * (1 - (1 - _HOT_ID) * hot_ids / max(1.0, total))
        cost = cost + host_us / machine.cores if machine.shared else max(cost, host_us)
    return Estimate(rows, cost, hot_ids / max(1.0, total), travelling, held)


def with_hot_rows(plan: Plan, choice: Choice, tables: Sequence[TableSpec]) -> Plan:
    """Returns the plan with the chosen rows in a segment of their own, and all others where it has them.

    Small tables that all devices have copies of anyway become hot as a whole: they travel in the same arrays.
    """
    found = dict(plan.tables)
    for table in tables if choice.ids else ():
        if joins(table, found[table.name]):
            found[table.name] = tuple(dataclasses.replace(s, placement=choice.placement) for s in found[table.name])
        if ids := choice.ids.get(table.name):
            rest = found[table.name] if len(ids) < table.rows else ()
            others = tuple(dataclasses.replace(segment, rows="rest") for segment in rest)
            found[table.name] = (Segment(choice.placement, RowIds(ids), why=choice.why), *others)
    return Plan(found)


def of_equal_sizes(plan: Plan, presence: Presence, dedup: bool) -> Plan:
    """Returns the plan with other hot rows, as many of each table: those that travel most.

    Where fewer are present, the rows that were hot stay so, lower ids first.
    """
    found = {}
    for name, segments in plan.tables.items():
        found[name] = segments
        sets = [s for s in segments if s.placement in HOT_PLACEMENTS and isinstance(s.rows, RowIds)]
        if len(sets) != 1 or len(segments) == 1:
            continue
        items, count = presence.tables[name], len(sets[0].rows.ids)  # type: ignore[union-attr]
        found_U = presence.occurrences(name)
        asked_U = presence.probability(name) if dedup else found_U
        best = items.ids_U[np.lexsort((items.ids_U, -found_U, -asked_U))[:count]].tolist()
        known = set(best)
        best += [id for id in sets[0].rows.ids if id not in known][: count - len(best)]  # type: ignore[union-attr]
        other = dataclasses.replace(sets[0], rows=RowIds(tuple(sorted(best))))
        found[name] = tuple(other if s is sets[0] else s for s in segments)
    return Plan(found)


def refuse_twice(plan: Plan, source: str) -> None:
    """Refuses `embedding.hot.rows` beside a plan file, which has its own sets (ConfigError)."""
    sets = any(s.placement in HOT_PLACEMENTS for segments in plan.tables.values() for s in segments)
    raise ConfigError(
        f"embedding.hot.rows is set, but plan={source} is a file, which says itself which rows are hot"
        f"{' (it has some)' if sets else ''}. Leave that to the file (embedding.hot.rows=0), or let recjax plan again: "
        "`recjax plan PRESET plan=auto embedding.hot.rows=auto --save FILE`."
    )


def describe_hot(choice: Choice) -> dict[str, Any]:
    """A choice as JSON values: "rows", "copies", "why", "unit", "tables" (name -> rows) and "curve", the estimates."""
    return {
        "rows": choice.rows,
        "copies": "device" if choice.placement == HOT else "host",
        "why": choice.why,
        "unit": choice.unit,
        "tables": {name: len(ids) for name, ids in choice.ids.items()},
        "curve": [dataclasses.asdict(estimate) for estimate in choice.curve],
    }


def hot_table(described: dict[str, Any]) -> str:
    """The same as text."""
    where = ", a copy on every host" if described["copies"] == "host" else ""
    head = f"hot rows: {described['rows']:,}{where} ({described['why']})"
    if not described["curve"]:
        return head
    cost = "tables' part of a step" if described["unit"] == "us" else "bytes sent a step"
    cells = [["hot rows", cost, "ids covered", "rows that travel", "bytes held"]]
    for of in described["curve"]:
        mark = " <-" if of["rows"] == described["rows"] else ""
        unit = " us" if described["unit"] == "us" else ""
        cells.append(
            [
                f"{of['rows']:,}",
                f"{of['cost']:,.0f}{unit}",
                f"{of['covered']:.1%}",
                f"{of['travelling']:,.0f}",
                f"{of['held_bytes']:,.0f}{mark}",
            ]
        )
    return "\n".join([head, *aligned(cells)])


def _chosen(
    found: Candidates,
    curve: tuple[Estimate, ...],
    machine: Machine | None,
    on_host: bool,
    presence: Presence,
    batch_size: int,
    copies: HotCopies,
) -> Choice:
    """The choice by a curve, whose first estimate is that of no hot row."""
    none, best = curve[0], min(curve, key=lambda of: (of.cost, of.rows))
    unit, by = ("us", f"by {machine.name}'s curves") if machine else ("bytes", "by bytes sent")
    about = f"{presence.batches} batches of {batch_size:,} on {copies.devices} device(s)"
    if machine and on_host and not machine.knows("host_route"):
        about += (
            f"; {machine.name}'s file does not say how long a host routes, which copies shorten: only the devices' "
            "part is compared (`recjax calibrate` there measures both)"
        )
    if best.rows == 0 or best.cost > (1 - WORTH) * none.cost:
        most = max((of.covered for of in curve), default=0.0)
        saved = 1 - best.cost / none.cost if none.cost else 0.0
        why = (
            f"none: {by}, no set of up to {curve[-1].rows:,} rows (which cover {most:.0%} of the ids) saves more than "
            f"{WORTH:.0%} (the best {saved:.1%}); {about}"
        )
        if machine is None and not best.rows:
            why += (
                "; a copy costs as many bytes as a row that every device asks for in every step. Name a machine "
                "(embedding.hot.machine) to have time decide"
            )
        return Choice({}, curve, unit, why, copies.placement)
    why = f"{by}: {1 - best.cost / none.cost:.0%} less than without, {best.covered:.0%} of the ids; {about}"
    return Choice(_by_table(found, best.rows), curve, unit, why, copies.placement)


def _by_table(found: Candidates, count: int) -> dict[str, tuple[int, ...]]:
    """Name of each table -> the ids of its rows among the first `count`, ascending."""
    return {
        name: tuple(np.sort(found.ids_M[:count][found.table_M[:count] == number]).tolist())
        for number, name in enumerate(found.tables)
        if (found.table_M[:count] == number).any()
    }


def _machine(config: RunConfig) -> Machine | None:
    """The machine by which the number of rows is chosen, if it is and there is one."""
    name = config.embedding.hot.machine or config.planner.machine
    return open_machine(name) if config.embedding.hot.rows == "auto" and name else None


def _sent_bytes(cold: float, hot: int, row_bytes: float, devices: int) -> float:
    """Bytes that leave a device: ids, rows and gradients of those asked for; gradients and new rows of hot ones."""
    return (devices - 1) / devices * (cold * (4 + 2 * row_bytes) + hot * (2 * row_bytes + 4))


def _device_us(cold: float, hot: int, row_bytes: float, copies: HotCopies, table_bytes: float, costs: Costs) -> float:
    """Time of a device for rows of one width: what it is asked for and asks for, and hot ones."""
    machine, devices = costs.machine, copies.devices
    works: list[Work] = []
    if cold:
        moved = cold * row_bytes
        sizes = (4 * cold, moved, moved)
        works += [Work("all_to_all", {"bytes": max(1.0, size), **copies.all_devices}, 0.0, size) for size in sizes]
        works += [gather(cold, row_bytes, table_bytes, 4 * cold) for _ in range(3)]  # rows, their order, those updated
        operands = 1 if machine.platform == "cpu" else 2  # see `recjax.embedding.segment_sums`
        works.append(sort(max(2.0, cold), operands, 8 * cold))
        works.append(scatter(cold, row_bytes, moved, 4 * cold, "sorted_add"))
        works.append(scatter(cold, row_bytes, table_bytes, 4 * cold, "sorted"))
        works.append(Work("elementwise", {"bytes": 4 * moved}, 0.0, 4 * moved))
    if hot:
        works += copies.works(hot, row_bytes)
    total = 0.0
    for work in works:
        if "devices" not in work.sizes:  # devices that share the cores of a host take turns
            cost = costs.of(work)
            total += cost.us * (max(1.0, devices * cost.cores / machine.cores) if machine.shared else 1.0)
        elif work.sizes["devices"] > 1:  # measured from the first device's start to the last one's end
            total += costs.of(work).us
    return total
