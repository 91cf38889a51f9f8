"""`embedding.exchange.kind=auto`: which tables exchange distinct rows, and which pooled vectors.

Rows cost what the distinct ids of a device ask for, vectors one for each bag. With bags of many ids vectors are fewer,
with bags of one rows are. Tables are compared by the bytes of both ways, ids with them, counted in the run's own data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from recjax.embedding.plan import Plan, Segment
from recjax.embedding.quantize import encoded_bytes
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
      plan: of which segments that exchange anything exchange rows.
      tables: of the model.
      features: of the model.
      work: the step's work, and the devices that share it.
    """
    chosen = dict(plan.tables)
    for table in may_pool(plan, tables, features):
        bags = sum(feature.table == table.name for feature in features)
        rows, vectors = bytes_of(chosen[table.name], table, bags, work)
        if vectors < rows:
            chosen[table.name] = tuple(_pooled(segment, rows / vectors) for segment in chosen[table.name])
    return Plan(chosen)


def bytes_of(segments: Sequence[Segment], table: TableSpec, bags: int, work: Workload) -> tuple[float, float]:
    """Returns the bytes that a device has to do with for one table in a step, exchanging rows and pooled vectors.

    Of rows that are spread over several devices each of these sends a vector. Rows of a segment that is not all of the
    table are taken to be as frequent as others.

    Args:
      segments: of the table.
      table: the table.
      bags: features that look it up.
      work: the step's work.
    """
    use = work.profile.tables[table.name]
    samples = work.batch_size / work.devices / work.replicas
    of_rows = of_vectors = 0.0
    for segment in segments:
        if segment.placement == "data_parallel":
            continue
        first, last = segment.column_range(table.dim)
        shards, holders = 1, 1
        if segment.placement == "column_wise":
            shards = len(segment.owners) if isinstance(segment.owners, tuple) else work.devices
        elif segment.placement == "table_row_wise":
            holders = work.devices // work.hosts
        elif segment.placement == "row_wise":
            holders = len(segment.owners) if isinstance(segment.owners, tuple) else work.devices
        item_bytes = 2 if table.dtype == "bfloat16" else work.item_bytes
        row = encoded_bytes(last - first, segment.exchange.forward, item_bytes)
        row += encoded_bytes(last - first, segment.exchange.backward, work.item_bytes)
        vector = row + (work.item_bytes - item_bytes) * (last - first) * (segment.exchange.forward == "float32")
        of_rows += use.distinct * (4 + row)
        of_vectors += samples * (bags * holders * vector + use.ids * 4 * shards)
    return of_rows, of_vectors


def _pooled(segment: Segment, fewer: float) -> Segment:
    if segment.placement == "data_parallel":
        return segment
    exchange = dataclasses.replace(segment.exchange, kind="pooled")
    why = f"{segment.why}; " if segment.why else ""
    return dataclasses.replace(segment, exchange=exchange, why=f"{why}pooled: {fewer:.1f} times fewer bytes than rows")
