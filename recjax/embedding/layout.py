"""A plan bound to a number of devices: which buffer holds each table, and where in it each row lies.

Tables whose rows are spread (row-wise; table-row-wise: over one host; table-wise: all rows on one device) and whose D,
dtype, optimizer and precision of the exchange are equal share one buffer and one set of exchanges, whatever their
placement. So do column-wise tables among each other, those in a grid (columns over hosts, rows over the devices of
each), and replicated ones. With one host a grid has all columns together, so its tables are row-wise; with one device a
host they are column-wise.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, Literal

from recjax.embedding.optim import SlotSpec
from recjax.embedding.plan import EXACT, OWNED, Exchange, Plan, Segment
from recjax.embedding.row_order import RowOrder, Split, library
from recjax.embedding.spec import MAX_ROWS, FeatureSpec, Held, Rounding, TableSpec, check_specs
from recjax.errors import ConfigError
from recjax.parallel.mesh import ACROSS_GROUPS, ACROSS_HOSTS, BATCH_AXES, MODEL_AXES, per_host

Sharding = Literal["rows", "columns", "grid", "copies"]
SHARDING: dict[str, Sharding] = {
    "row_wise": "rows",
    "table_wise": "rows",
    "table_row_wise": "rows",
    "column_wise": "columns",
    "grid": "grid",
    "data_parallel": "copies",
}
ACROSS = " across hosts"  # behind a group's name: the name of the capacity of its exchange across hosts
SUMMED = " across replicas"  # the same for the rows whose gradients a device sends to the other replica groups


@dataclasses.dataclass(frozen=True)
class BoundTable:
    """A table's place in its group's buffer.

    Attributes:
      spec: the table.
      placement: as the plan has it.
      split: its storage positions over the parts of the buffer that differ in rows.
      offsets: where its range starts in each of those parts, in rows.
    """

    spec: TableSpec
    placement: str
    split: Split
    offsets: tuple[int, ...]

    @functools.cached_property
    def order(self) -> RowOrder:
        """Row to storage position."""
        return RowOrder(self.spec.rows)

    def locate(self, ids: Any) -> tuple[Any, Any]:
        """(owner, slot in the owner's part of the group buffer) of each row id, elementwise. For NumPy and JAX."""
        owner, within = self.split.owner_and_offset(self.order.position(ids))
        return owner, within + library(ids).asarray(self.offsets, ids.dtype)[owner]


@dataclasses.dataclass(frozen=True)
class Piece:
    """A rectangle of a table in one part of its group's buffer.

    Attributes:
      part: which part, 0 to `Group.parts` - 1.
      offset: its first row there; its first column there is 0.
      start, stop: the storage positions that it holds.
      first, last: the columns that it holds, `last` excluded.
    """

    part: int
    offset: int
    start: int
    stop: int
    first: int
    last: int


class _InReplicas:
    """What stands in `replicas` groups of `devices` devices each."""

    devices: int
    replicas: int
    independent: bool

    @property
    def all_devices(self) -> int:
        """Devices of all replica groups, over which the batch is split."""
        return self.devices * self.replicas

    @property
    def synchronous(self) -> bool:
        """Whether several groups of devices hold the same values, and agree on the gradients in each step."""
        return self.replicas > 1 and not self.independent


@dataclasses.dataclass(frozen=True)
class Group(_InReplicas):
    """Tables that share a buffer and its exchanges.

    Attributes:
      name: stable and readable, for example "row_wise_D16_rowwise_adagrad".
      sharding: "rows": each device holds some rows of the stack; "columns": some columns of all rows; "grid": some
        columns, by its host, of some rows, by its place within the host; "copies": everything.
      devices: N.
      hosts: machines in which they stand, N / hosts in each.
      rows: R, rows of one device's part of the buffer.
      tables: the stacked tables; all have this group's D and optimizer.
      features: the features that look them up.
      dedup: whether a row travels once however many of a device's ids ask for it.
      exchange: precision in which rows and gradients travel; of no meaning for "copies".
      replicas: groups of N devices that each hold all of this; the batch is split over all of them.
      independent: whether each group of devices holds values of its own, and updates them by its own samples alone.
    """

    name: str
    sharding: Sharding
    devices: int
    hosts: int
    rows: int
    tables: tuple[BoundTable, ...]
    features: tuple[FeatureSpec, ...]
    dedup: bool = True
    exchange: Exchange = EXACT
    replicas: int = 1
    independent: bool = False

    @property
    def versions(self) -> int:
        """Versions of the values: each is a buffer of its own, and they stand one behind the other in the array."""
        return 1 if self.synchronous else self.replicas

    @property
    def held_over(self) -> tuple[str, ...]:
        """Mesh axes that the buffer's rows are split over."""
        if self.sharding == "copies":
            return ACROSS_GROUPS if self.independent else ()
        return MODEL_AXES if self.synchronous else BATCH_AXES

    @property
    def dim(self) -> int:
        """D."""
        return self.tables[0].spec.dim

    @property
    def dtype(self) -> Held:
        """Of the values of all its tables: see `TableSpec`."""
        return self.tables[0].spec.dtype

    @property
    def rounding(self) -> Rounding:
        """Of updated values, if they are bfloat16."""
        return self.tables[0].spec.rounding

    @property
    def optimizer(self) -> Any:
        """The sparse optimizer of all its tables."""
        return self.tables[0].spec.optimizer

    @property
    def parts(self) -> int:
        """Parts of one version of the buffer, [parts * R, width]: N, or 1 if every device holds all of it."""
        return 1 if self.sharding == "copies" else self.devices

    @property
    def per_host(self) -> int:
        """Devices of a host."""
        return self.devices // self.hosts

    @property
    def owners(self) -> int:
        """O, parts among which a row is sought: all N if rows are spread, those of one host in a grid, else one."""
        return {"rows": self.devices, "grid": self.per_host}.get(self.sharding, 1)

    @property
    def columns(self) -> Split:
        """The D columns over what they are spread over: devices or hosts; over one where a device has whole rows."""
        return Split(self.dim, {"columns": self.devices, "grid": self.hosts}.get(self.sharding, 1))

    @property
    def width(self) -> int:
        """W, columns of the buffer: D, or the longest of the parts if they are spread."""
        return self.columns.longest

    def place(self, part: Any) -> tuple[Any, Any]:
        """(owner, which of `columns`) of a part of the buffer: the rows and the columns that it holds."""
        return part % self.owners, part // self.owners

    @property
    def two_step(self) -> bool:
        """Whether rows travel in two steps, inside a host and across hosts: see `hierarchical.py`."""
        return self.sharding != "copies" and 1 < self.hosts < self.devices

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes of the exchange with the owners: of the whole of it, or of its step across hosts."""
        return ACROSS_HOSTS if self.two_step else MODEL_AXES

    @property
    def lists(self) -> int:
        """Lists of rows that a device fetches: one from each owner, or, in two steps, from each relay of its host."""
        return min(self.owners, self.per_host) if self.two_step else self.owners

    @property
    def asks(self) -> int:
        """Owners that one list is gathered from: 1, but in two steps as many as there are hosts if rows are spread."""
        return self.owners // self.lists

    def bucket(self, owner: Any) -> Any:
        """Number of an owner in the order of (list, owner within the list)."""
        return owner if self.asks == 1 else owner % self.lists * self.asks + owner // self.lists

    def slots(self) -> dict[str, SlotSpec]:
        """What the optimizer keeps for every row in one part of the buffer, by slot name."""
        slots: dict[str, SlotSpec] = self.optimizer.slots(self.width)
        return slots

    def table(self, name: str) -> BoundTable:
        """The stacked table called `name`."""
        return next(t for t in self.tables if t.spec.name == name)

    def pieces(self, table: BoundTable, part: int | None = None) -> Iterator[Piece]:
        """Where a table lies: its pieces in all parts, or in one."""
        for k in range(self.parts) if part is None else (part,):
            owner, column = self.place(k)
            start, stop = int(table.split.start(owner)), int(table.split.start(owner + 1))
            first, last = int(self.columns.start(column)), int(self.columns.start(column + 1))
            yield Piece(k, table.offsets[owner], start, stop, first, last)


@dataclasses.dataclass(frozen=True)
class BoundPlan(_InReplicas):
    """A plan bound to N devices in equal hosts, or to as many in each of some replica groups.

    Attributes:
      devices: N.
      hosts: in which these stand.
      groups: the table groups.
      features: all features.
      replicas: groups of N devices.
      independent: as `Group` has it.
    """

    devices: int
    hosts: int
    groups: tuple[Group, ...]
    features: tuple[FeatureSpec, ...]
    replicas: int = 1
    independent: bool = False


def bind(
    plan: Plan,
    tables: tuple[TableSpec, ...],
    features: tuple[FeatureSpec, ...],
    devices: int,
    dedup: bool = True,
    hosts: int = 1,
    replicas: int = 1,
    independent: bool = False,
) -> BoundPlan:
    """Stacks the tables of a plan into groups for `devices` devices, equally many in each of `hosts` hosts.

    Both are those of one replica group. `dedup`, `replicas` and `independent` are as `Group` has them.

    Raises:
      ConfigError: what `check_specs` refuses, hosts that do not divide the devices, an owner that the mesh does not
        have, or a group of more rows on one device than int32 can count.
    """
    check_specs(tables, features)
    spans = {"table_wise": 1, "table_row_wise": per_host(devices, hosts)}  # devices that hold one table's rows
    owners = _owners(plan, tables, features, devices, spans)
    members: dict[tuple[Any, ...], list[TableSpec]] = {}
    for table in tables:
        segment = plan.tables[table.name][0]
        sharding = SHARDING[segment.placement]
        if sharding == "grid" and (hosts == 1 or hosts == devices):
            sharding = "rows" if hosts == 1 else "columns"
        held = () if table.dtype == "float32" else (table.dtype, table.rounding)
        members.setdefault((sharding, table.dim, held, table.optimizer, segment.exchange), []).append(table)
    groups: list[Group] = []
    names = {f.name for f in features}  # capacities are kept by feature and group name, so these must differ
    for (sharding, dim, held, optimizer, exchange), specs in members.items():
        used = {s.name for s in specs}
        bound = []
        ends = [0] * {"rows": devices, "grid": devices // hosts}.get(sharding, 1)  # rows taken so far in each part
        for spec in specs:
            placement = plan.tables[spec.name][0].placement
            split = Split(spec.rows, len(ends))
            if placement in OWNED:
                split = Split(spec.rows, spans[placement], owners[spec.name] * spans[placement])
            bound.append(BoundTable(spec, placement, split, tuple(ends)))
            ends = [end + int(split.start(k + 1) - split.start(k)) for k, end in enumerate(ends)]
        base = name = (
            f"{'+'.join(dict.fromkeys(t.placement for t in bound))}_D{dim}_{'_'.join((*held, optimizer.kind))}"
        )
        if exchange != EXACT:
            base = name = f"{base}_{exchange.forward}_{exchange.backward}"
        while {name, name + ACROSS, name + SUMMED} & names:  # two optimizers of one kind that differ in a setting
            name = f"{base}_{len(names)}"
        names.add(name)
        looking = tuple(f for f in features if f.table in used)
        size, groups_are = max(1, *ends), (replicas, independent and replicas > 1)
        groups.append(Group(name, sharding, devices, hosts, size, tuple(bound), looking, dedup, exchange, *groups_are))
        if max(ends) > MAX_ROWS:
            raise ConfigError(
                f"group {name}: {max(ends):,} rows on one device exceed int32. Use more devices or fewer rows."
            )
    return BoundPlan(devices, hosts, tuple(groups), features, replicas, independent and replicas > 1)


def _owners(
    plan: Plan,
    tables: tuple[TableSpec, ...],
    features: tuple[FeatureSpec, ...],
    devices: int,
    spans: dict[str, int],
) -> dict[str, int]:
    """The device of each table-wise table and the host of each table-row-wise one.

    That is the plan's, or else the least loaded one; the table that loads each of its devices most goes first. A
    table's load is its share of all bytes plus its share of all lookups (a jagged bag counts as one id), since memory
    and time are both bounded by the fullest device.
    """
    alone = {t.name: plan.tables[t.name][0] for t in tables if plan.tables[t.name][0].placement in OWNED}
    lookups = {name: sum(f.bag or 1 for f in features if f.table == name) for name in alone}
    values = {t.name: t.rows * t.dim for t in tables if t.name in alone}
    span = {name: spans[segment.placement] for name, segment in alone.items()}
    load = {  # on each of its devices
        name: (values[name] / sum(values.values()) + lookups[name] / sum(lookups.values())) / span[name]
        for name in alone
    }
    owners: dict[str, int] = {}
    loads = [0.0] * devices

    def give(name: str, owner: int) -> None:
        owners[name] = owner
        for n in range(owner * span[name], (owner + 1) * span[name]):
            loads[n] += load[name]

    for name, segment in alone.items():
        if segment.owners == Segment.owners:
            continue
        unit, there_are = OWNED[segment.placement], devices // span[name]
        if int(segment.owners) >= there_are:
            raise ConfigError(
                f"the plan puts table {name!r} on {unit} {segment.owners}, but the mesh has only {there_are}, counted "
                f'from 0. Write "owners": "all" to let recjax choose, or use more {unit}s.'
            )
        give(name, int(segment.owners))
    for name in sorted(load.keys() - owners.keys(), key=lambda name: (-load[name], name)):
        starts = range(0, devices, span[name])
        least = min(starts, key=lambda n: sum(loads[n : n + span[name]]))
        give(name, least // span[name])
    return owners
