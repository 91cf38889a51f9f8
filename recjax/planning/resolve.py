"""The plan of a run: what its config's `plan` says, on the devices that it has."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

from recjax.config.run import RunConfig
from recjax.data.source import BlockSource, has_blocks
from recjax.embedding.bind import bind
from recjax.embedding.layout import BoundPlan
from recjax.embedding.plan import Plan, is_file, kind_in_words, make_plan
from recjax.embedding.segment import Segment
from recjax.embedding.spec import FeatureSpec, TableSpec
from recjax.planning.balance import balance
from recjax.planning.hot import Choice, hot_rows, refuse_twice, with_hot_rows
from recjax.planning.loads import TableUse, Workload, profile_of

# Placements whose owners may pool: a few devices have all columns, or all rows, that a bag needs.
CHOSEN = ("table_wise", "column_wise", "table_row_wise")


def may_pool(plan: Plan, tables: Sequence[TableSpec], features: Sequence[FeatureSpec]) -> list[TableSpec]:
    """Returns the tables for which there is a choice: all their segments are with owners, some of their bags pooled."""
    pooled = {feature.table for feature in features if feature.pooling != "none"}
    return [
        table
        for table in tables
        if table.name in pooled
        and any(s.placement in CHOSEN for s in plan.tables[table.name])
        and all(s.placement in (*CHOSEN, "row_wise", "data_parallel") for s in plan.tables[table.name])
    ]


def choose_kinds(plan: Plan, tables: Sequence[TableSpec], features: Sequence[FeatureSpec], work: Workload) -> Plan:
    """Returns the plan with pooled vectors exchanged of those features of which they are fewer bytes than rows.

    Of a table's features those with the fewest ids a bag are tried as rows: none of them, the first, and so on to all.

    Args:
      plan: the plan; what exchanges pooled vectors in it goes on to.
      tables: of the model.
      features: of the model.
      work: the step's work, and the devices that share it.
    """
    chosen = dict(plan.tables)
    for table in may_pool(plan, tables, features):
        segments, use = chosen[table.name], work.profile.tables[table.name]
        splits = [(use.features[:k], use.features[k:]) for k in range(len(use.features))] or [((), ())]
        rows_of: tuple[str, ...] = ()
        least = math.inf
        for by_rows, pooled in splits:
            names = [f.name for f in by_rows]
            rows = bytes_of(segments, table, work, use.of(names))[0] if names else 0.0
            vectors = bytes_of(segments, table, work, use.of([f.name for f in pooled]))[1]
            if rows + vectors < least:
                least, rows_of = rows + vectors, tuple(f.name for f in by_rows if f.pooled)
        if least < (all_rows := bytes_of(segments, table, work)[0]):
            chosen[table.name] = tuple(_pooled(segment, rows_of, all_rows / least) for segment in segments)
    return Plan(chosen)


def bytes_of(
    segments: Sequence[Segment], table: TableSpec, work: Workload, use: TableUse | None = None
) -> tuple[float, float]:
    """Returns the bytes that a device has to do with for one table in a step: see `Workload.bytes_sent`.

    Rows of a segment that is not all of the table are taken to be as frequent as others.

    Args:
      segments: of the table.
      table: the table.
      work: the step's work.
      use: of the table by some of its features; None: by all.
    """
    rows = vectors = 0.0
    for segment in segments:
        if segment.placement == "data_parallel":
            continue
        spread = len(segment.owners) if isinstance(segment.owners, tuple) else work.devices
        ranges = spread if segment.placement == "column_wise" else 1
        parts = {"row_wise": spread, "table_row_wise": work.devices // work.hosts}.get(segment.placement, 1)
        first, last = segment.column_range(table.dim)
        of_segment = work.bytes_sent(table, segment.exchange, last - first, ranges, parts, use)
        rows, vectors = rows + of_segment[0], vectors + of_segment[1]
    return rows, vectors


def _pooled(segment: Segment, rows_of: tuple[str, ...], fewer: float) -> Segment:
    if segment.placement == "data_parallel":
        return segment
    exchange = dataclasses.replace(segment.exchange, kind="pooled")
    found = dataclasses.replace(segment, exchange=exchange, rows_of=rows_of)
    why = f"{segment.why}; " if segment.why else ""
    return dataclasses.replace(found, why=f"{why}{kind_in_words(found)}: {fewer:.1f} times fewer bytes than rows")


def resolve(
    config: RunConfig,
    source: BlockSource,
    tables: tuple[TableSpec, ...],
    features: tuple[FeatureSpec, ...],
    shape: tuple[int, int, int],
) -> tuple[Plan, Choice | None]:
    """Resolves the config's `plan` for a mesh, and `embedding.hot`.

    Args:
      config: of the run.
      source: its data, of which the first training samples are read where something is to be chosen by them.
      tables: of the model.
      features: of the model.
      shape: replica groups, hosts of each, devices of each of these.

    Returns:
      The plan, and how its hot rows were chosen; None if nothing was to be chosen.

    Raises:
      ConfigError: as for `make_plan`, or hot rows are asked for beside a plan file.
      DataError: the data cannot be read.
    """
    exchange, devices = config.embedding.exchange, shape[1] * shape[2]
    work = functools.cache(lambda: workload(config, source, tables, features, shape))
    plan = (
        balance(tables, features, work(), exchange)
        if config.plan == "balanced"
        else make_plan(config.plan, tables, exchange)
    )
    left = tables
    if config.plan == "balanced":  # which has chosen, but for tables of which some features may exchange rows
        pooling = [t for t in tables if plan.tables[t.name][0].exchange.kind == "pooled"]
        left = tuple(t for t in pooling if len(work().profile.tables[t.name].features) > 1)
    if exchange.kind == "auto" and not is_file(config.plan) and devices > 1 and may_pool(plan, left, features):
        plan = choose_kinds(plan, left, features, work())
    return add_hot_rows(plan, config, source, tables, features, shape)


def add_hot_rows(
    plan: Plan,
    config: RunConfig,
    source: BlockSource,
    tables: tuple[TableSpec, ...],
    features: tuple[FeatureSpec, ...],
    shape: tuple[int, int, int],
    room_bytes: float = math.inf,
) -> tuple[Plan, Choice | None]:
    """Adds to a plan the hot rows that the config asks for; arguments and results are those of `resolve`.

    `room_bytes` of a device are there for as many as save time.
    """
    if not config.embedding.hot.rows or not has_blocks(source):  # to predict, none are needed
        return plan, None
    if is_file(config.plan):
        refuse_twice(plan, config.plan)
    choice = hot_rows(plan, config, source, tables, features, shape, room_bytes)
    return with_hot_rows(plan, choice, tables), choice


def workload(
    config: RunConfig,
    source: BlockSource,
    tables: tuple[TableSpec, ...],
    features: tuple[FeatureSpec, ...],
    shape: tuple[int, int, int],
) -> Workload:
    """A training step's work on the tables; the arguments are those of `resolve`."""
    replicas, hosts, each = shape
    batch_size, devices = config.train.batch_size, hosts * each
    profile = profile_of(source, tables, features, batch_size, devices * replicas)
    agree = config.train.replica_sync == "exact"
    how = config.item_bytes, config.embedding.dedup, agree, config.mesh.hosts
    return Workload(profile, batch_size, devices, hosts, replicas, *how)


def bound_as(
    config: RunConfig,
    plan: Plan,
    tables: tuple[TableSpec, ...],
    features: tuple[FeatureSpec, ...],
    shape: tuple[int, int, int],
    one_gpu: bool = False,
) -> BoundPlan:
    """A run's plan, bound to the devices of a mesh of that shape, with all rows there.

    On one GPU tables of which each device would have a copy lie with those whose rows would be spread: nothing travels
    either way, and a small step there takes as long as it has operations, of which each group has some forty.
    """
    if one_gpu:
        rows = {"data_parallel": "row_wise"}
        segments = {
            name: tuple(dataclasses.replace(s, placement=rows.get(s.placement, s.placement)) for s in of_table)
            for name, of_table in plan.tables.items()
        }
        plan = dataclasses.replace(plan, tables=segments)
    replicas, hosts, each = shape
    held, independent = config.embedding, config.train.replica_sync != "exact"
    how: dict[str, Any] = {"atomics": held.atomics, "ragged": held.ragged, "row_pieces": held.exchange.pieces}
    return bind(plan, tables, features, hosts * each, held.dedup, hosts, replicas, independent, **how)
