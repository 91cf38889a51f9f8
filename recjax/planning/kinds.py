"""`embedding.exchange.kind=auto`: which tables exchange distinct rows, and which pooled vectors.

Rows cost what the distinct ids of a device ask for, vectors one for each bag. With bags of many ids vectors are fewer,
with bags of one rows are. Tables are compared by the bytes of both ways, ids with them, counted in the run's own data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from recjax.embedding.plan import Plan, Segment
from recjax.embedding.spec import FeatureSpec, TableSpec
from recjax.planning.loads import Workload

# Placements whose owners may pool: a few devices have all columns, or all rows, that a bag needs.
CHOSEN = ("table_wise", "column_wise", "table_row_wise")


def may_pool(plan: Plan, tables: Sequence[TableSpec], features: Sequence[FeatureSpec]) -> list[TableSpec]:
    """Returns the tables for which there is a choice: all their segments are with owners, all their bags are pooled."""
    sequences = {feature.table for feature in features if feature.pooling == "none"}
    return [
        table
        for table in tables
        if table.name not in sequences
        and any(s.placement in CHOSEN for s in plan.tables[table.name])
        and all(s.placement in (*CHOSEN, "row_wise", "data_parallel") for s in plan.tables[table.name])
    ]


def choose_kinds(plan: Plan, tables: Sequence[TableSpec], features: Sequence[FeatureSpec], work: Workload) -> Plan:
    """Returns the plan with pooled vectors exchanged where these are fewer bytes than rows.

    Args:
      plan: the plan; what exchanges pooled vectors in it goes on to.
      tables: of the model.
      features: of the model.
      work: the step's work, and the devices that share it.
    """
    chosen = dict(plan.tables)
    for table in may_pool(plan, tables, features):
        rows, vectors = bytes_of(chosen[table.name], table, work)
        if vectors < rows:
            chosen[table.name] = tuple(_pooled(segment, rows / vectors) for segment in chosen[table.name])
    return Plan(chosen)


def bytes_of(segments: Sequence[Segment], table: TableSpec, work: Workload) -> tuple[float, float]:
    """Returns the bytes that a device has to do with for one table in a step: see `Workload.bytes_sent`.

    Rows of a segment that is not all of the table are taken to be as frequent as others.

    Args:
      segments: of the table.
      table: the table.
      work: the step's work.
    """
    rows = vectors = 0.0
    for segment in segments:
        if segment.placement == "data_parallel":
            continue
        spread = len(segment.owners) if isinstance(segment.owners, tuple) else work.devices
        ranges = spread if segment.placement == "column_wise" else 1
        parts = {"row_wise": spread, "table_row_wise": work.devices // work.hosts}.get(segment.placement, 1)
        first, last = segment.column_range(table.dim)
        of_segment = work.bytes_sent(table, segment.exchange, last - first, ranges, parts)
        rows, vectors = rows + of_segment[0], vectors + of_segment[1]
    return rows, vectors


def _pooled(segment: Segment, fewer: float) -> Segment:
    if segment.placement == "data_parallel":
        return segment
    exchange = dataclasses.replace(segment.exchange, kind="pooled")
    why = f"{segment.why}; " if segment.why else ""
    return dataclasses.replace(segment, exchange=exchange, why=f"{why}pooled: {fewer:.1f} times fewer bytes than rows")
