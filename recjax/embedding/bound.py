"""A plan bound to a number of devices: which buffer holds each table, and where in it each row lies.

Tables whose rows are spread (row-wise, or table-wise: all rows on one device) and whose D and optimizer
are equal share one buffer and one set of exchanges, whatever their placement. So do column-wise tables
among each other, and replicated ones.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, Literal

from recjax.embedding.optim import SlotSpec
from recjax.embedding.plan import Plan, Segment
from recjax.embedding.rows import RowOrder, Split, library
from recjax.embedding.spec import MAX_ROWS, FeatureSpec, TableSpec, check_specs
from recjax.errors import ConfigError

Sharding = Literal["rows", "columns", "copies"]
SHARDING: dict[str, Sharding] = {
    "row_wise": "rows",
    "table_wise": "rows",
    "column_wise": "columns",
    "data_parallel": "copies",
}


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


@dataclasses.dataclass(frozen=True)
class Group:
    """Tables that share a buffer and its exchanges.

    Attributes:
      name: stable and readable, for example "row_wise_D16_rowwise_adagrad".
      sharding: "rows": each device holds some rows of the stack; "columns": some columns of all rows;
        "copies": everything.
      devices: N.
      rows: R, rows of one device's part of the buffer.
      tables: the stacked tables; all have this group's D and optimizer.
      features: the features that look them up.
      dedup: whether a row travels once however many of a device's ids ask for it.
    """

    name: str
    sharding: Sharding
    devices: int
    rows: int
    tables: tuple[BoundTable, ...]
    features: tuple[FeatureSpec, ...]
    dedup: bool = True

    @property
    def dim(self) -> int:
        """D."""
        return self.tables[0].spec.dim

    @property
    def optimizer(self) -> Any:
        """The sparse optimizer of all its tables."""
        return self.tables[0].spec.optimizer

    @property
    def parts(self) -> int:
        """Parts of the buffer [parts * R, width]: N, or 1 if every device holds all of it."""
        return 1 if self.sharding == "copies" else self.devices

    @property
    def owners(self) -> int:
        """O, devices among which a row is sought: N if rows are spread, else 1, for every device has all rows."""
        return self.devices if self.sharding == "rows" else 1

    @property
    def columns(self) -> Split:
        """The D columns over the devices; over one where a device has whole rows."""
        return Split(self.dim, self.devices if self.sharding == "columns" else 1)

    @property
    def width(self) -> int:
        """Columns of the buffer: D, or ceil(D / N) if columns are spread, of which the last devices may use fewer."""
        return self.columns.longest

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
            owner = k if self.sharding == "rows" else 0
            start, stop = int(table.split.start(owner)), int(table.split.start(owner + 1))
            column = k if self.sharding == "columns" else 0
            first, last = int(self.columns.start(column)), int(self.columns.start(column + 1))
            yield Piece(k, table.offsets[owner], start, stop, first, last)


@dataclasses.dataclass(frozen=True)
class BoundPlan:
    """A plan bound to N devices."""

    devices: int
    groups: tuple[Group, ...]
    features: tuple[FeatureSpec, ...]


def bind(
    plan: Plan, tables: tuple[TableSpec, ...], features: tuple[FeatureSpec, ...], devices: int, dedup: bool = True
) -> BoundPlan:
    """Stacks the tables of a plan into groups for `devices` devices; `dedup` as `Group` has it.

    Raises:
      ConfigError: what `check_specs` refuses, an owner that the mesh does not have, or a group of more rows on one
        device than int32 can count.
    """
    check_specs(tables, features)
    owners = _owners(plan, tables, features, devices)
    members: dict[tuple[Any, ...], list[TableSpec]] = {}
    for table in tables:
        sharding = SHARDING[plan.tables[table.name][0].placement]
        members.setdefault((sharding, table.dim, table.optimizer), []).append(table)
    groups: list[Group] = []
    names = {f.name for f in features}  # capacities are kept by feature and group name, so these must differ
    for (sharding, dim, optimizer), specs in members.items():
        used = {s.name for s in specs}
        bound = []
        ends = [0] * (devices if sharding == "rows" else 1)  # rows taken so far in each part
        for spec in specs:
            placement = plan.tables[spec.name][0].placement
            split = Split(spec.rows, len(ends))
            if placement == "table_wise":
                split = Split(spec.rows, 1, owners[spec.name])
            bound.append(BoundTable(spec, placement, split, tuple(ends)))
            ends = [end + int(split.start(k + 1) - split.start(k)) for k, end in enumerate(ends)]
        base = name = f"{'+'.join(dict.fromkeys(t.placement for t in bound))}_D{dim}_{optimizer.kind}"
        while name in names:  # two optimizers of one kind that differ in a setting
            name = f"{base}_{len(names)}"
        names.add(name)
        looking = tuple(f for f in features if f.table in used)
        groups.append(Group(name, sharding, devices, max(1, *ends), tuple(bound), looking, dedup))
        if max(ends) > MAX_ROWS:
            raise ConfigError(
                f"group {name}: {max(ends):,} rows on one device exceed int32. Use more devices or fewer rows."
            )
    return BoundPlan(devices, tuple(groups), features)


def _owners(
    plan: Plan, tables: tuple[TableSpec, ...], features: tuple[FeatureSpec, ...], devices: int
) -> dict[str, int]:
    """The device of each table-wise table: the plan's, or else the least loaded one, the heaviest table first.

    A table's load is its share of all bytes plus its share of all lookups (a jagged bag counts as one id), since
    memory and time are both bounded by the fullest device.
    """
    alone = [t for t in tables if plan.tables[t.name][0].placement == "table_wise"]
    lookups = {t.name: sum(f.bag or 1 for f in features if f.table == t.name) for t in alone}
    all_bytes = sum(t.rows * t.dim for t in alone)
    load = {t.name: t.rows * t.dim / all_bytes + lookups[t.name] / sum(lookups.values()) for t in alone}
    owners: dict[str, int] = {}
    loads = [0.0] * devices
    for table in alone:
        owner = plan.tables[table.name][0].owners
        if owner == Segment.owners:
            continue
        if int(owner) >= devices:
            raise ConfigError(
                f"the plan puts table {table.name!r} on device {owner}, but the mesh has only {devices}, counted from "
                '0. Write "owners": "all" to let recjax choose, or use more devices.'
            )
        owners[table.name] = int(owner)
        loads[int(owner)] += load[table.name]
    for name in sorted(load.keys() - owners.keys(), key=lambda name: (-load[name], name)):
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += load[name]
    return owners
