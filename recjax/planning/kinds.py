"""`embedding.exchange.kind=auto`: of which features distinct rows travel, and of which pooled vectors.

Rows cost what the distinct ids of a device ask for, vectors one for each bag. With bags of many ids vectors are fewer,
with bags of one rows are, and a table may be looked up by both. They are compared by the bytes of both ways, ids with
them, counted in the run's own data.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from recjax.embedding.plan import Plan, kind_in_words
from recjax.embedding.segment import Segment
from recjax.embedding.spec import FeatureSpec, TableSpec
from recjax.planning.loads import Workload
from recjax.planning.profile import TableUse

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
