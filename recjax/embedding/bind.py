"""Binds a plan to a number of devices: stacks tables into groups, and chooses owners that the plan leaves open."""

from __future__ import annotations

from typing import Any

from recjax.embedding.layout import ACROSS, SUMMED, BoundPlan, BoundTable, Group
from recjax.embedding.plan import EXACT, OWNED, Plan
from recjax.embedding.row_order import Split
from recjax.embedding.sharding.base import Sharding
from recjax.embedding.sharding.columns import ColumnSharding
from recjax.embedding.sharding.grid import GridSharding
from recjax.embedding.sharding.replicated import ReplicatedSharding
from recjax.embedding.sharding.rows import RowSharding
from recjax.embedding.spec import MAX_ROWS, FeatureSpec, TableSpec, check_specs
from recjax.errors import ConfigError
from recjax.parallel.mesh import per_host

SHARDINGS: dict[str, type[Sharding]] = {
    "row_wise": RowSharding,
    "table_wise": RowSharding,
    "table_row_wise": RowSharding,
    "column_wise": ColumnSharding,
    "grid": GridSharding,
    "data_parallel": ReplicatedSharding,
}


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
        sharding = _sharding(segment.placement, devices, hosts)
        held = () if table.dtype == "float32" else (table.dtype, table.rounding)
        members.setdefault((sharding, table.dim, held, table.optimizer, segment.exchange), []).append(table)
    groups: list[Group] = []
    names = {f.name for f in features}  # capacities are kept by feature and group name, so these must differ
    for (sharding, dim, held, optimizer, exchange), specs in members.items():
        used = {s.name for s in specs}
        bound = []
        ends = [0] * sharding.owners  # rows taken so far in each part
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
        groups.append(Group(name, sharding, size, tuple(bound), looking, dedup, exchange, *groups_are))
        if max(ends) > MAX_ROWS:
            raise ConfigError(
                f"group {name}: {max(ends):,} rows on one device exceed int32. Use more devices or fewer rows."
            )
    return BoundPlan(devices, hosts, tuple(groups), features, replicas, independent and replicas > 1)


def _sharding(placement: str, devices: int, hosts: int) -> Sharding:
    """With one host a grid has all columns together, so its tables are row-wise; with one device a host column-wise."""
    cls = SHARDINGS[placement]
    if cls is GridSharding and hosts in (1, devices):
        cls = RowSharding if hosts == 1 else ColumnSharding
    return cls(devices, hosts)


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
        if not isinstance(segment.owners, int):
            continue
        unit, there_are = OWNED[segment.placement], devices // span[name]
        if segment.owners >= there_are:
            raise ConfigError(
                f"the plan puts table {name!r} on {unit} {segment.owners}, but the mesh has only {there_are}, counted "
                f'from 0. Write "owners": "all" to let recjax choose, or use more {unit}s.'
            )
        give(name, segment.owners)
    for name in sorted(load.keys() - owners.keys(), key=lambda name: (-load[name], name)):
        starts = range(0, devices, span[name])
        least = min(starts, key=lambda n: sum(loads[n : n + span[name]]))
        give(name, least // span[name])
    return owners
