"""The loads that a plan gives each device, counted from what the plan says: the truth for `recjax.planning.loads`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from recjax.embedding.bind import bind
from recjax.embedding.plan import Plan
from recjax.embedding.spec import FeatureSpec, TableSpec
from recjax.planning.loads import LOADS, Workload, describe_loads

SLOTS = {"sgd": lambda width: 0, "rowwise_adagrad": lambda width: 1, "adagrad": lambda width: width}  # floats a row


def recounted(plan: Plan, tables: tuple[TableSpec, ...], work: Workload) -> dict[str, list[float]]:
    """The loads of each device, from what the plan says and the definition of each load."""
    N = work.devices
    found = {key: [0.0] * N for key in LOADS}
    for table in tables:
        use = work.profile.tables[table.name]
        for segment in plan.tables[table.name]:
            first, last = segment.column_range(table.dim)
            width = last - first
            copied = segment.placement == "data_parallel"
            if segment.placement == "table_wise":
                assert isinstance(segment.owners, int)
                owners = [segment.owners]
            else:
                assert segment.placement in ("row_wise", "data_parallel")
                owners = list(segment.owners) if isinstance(segment.owners, tuple) else list(range(N))
            for nth, owner in enumerate(owners):
                rows = table.rows // len(owners) + (nth < table.rows % len(owners))
                part = rows / table.rows
                held = table.rows if copied else rows
                found["held_bytes"][owner] += held * (width + SLOTS[table.optimizer.kind](width)) * 4
                asked = use.ids * work.batch_size * (1 / N if copied else part)
                found["ids"][owner] += asked
                found["read_bytes"][owner] += asked * width * 4
                if segment.exchange.kind == "pooled":  # each part of the rows sends a vector for every bag
                    found["pooled_bytes"][owner] += use.bags * work.batch_size * width * 4
                elif not copied:
                    found["exchanged_bytes"][owner] += use.distinct * N * part * width * 4
    return found


def allocated(plan: Plan, tables: tuple[TableSpec, ...], work: Workload) -> float:
    """Bytes of each device's buffers: for tables that share one, as many as the device has that has most of them."""
    N = work.devices
    rows_of: dict[Any, list[int]] = {}
    for table in tables:
        for segment in plan.tables[table.name]:
            first, last = segment.column_range(table.dim)
            width = last - first
            copied = segment.placement == "data_parallel"
            alike = (copied, width, width < table.dim and table.optimizer.kind == "rowwise_adagrad", table.optimizer)
            rows_N = rows_of.setdefault(alike, [0] * N)
            named = (segment.owners,) if isinstance(segment.owners, int) else segment.owners
            owners: Sequence[int] = range(N) if isinstance(named, str) else named
            for nth, owner in enumerate(owners):
                split = table.rows // len(owners) + (nth < table.rows % len(owners))
                rows_N[owner] += table.rows if copied else split
    return sum(
        max(rows_N) * (width + SLOTS[optimizer.kind](width)) * 4 for (_, width, _, optimizer), rows_N in rows_of.items()
    )


def assert_loads(work: Workload, plan: Plan, tables: tuple[TableSpec, ...], features: tuple[FeatureSpec, ...]) -> None:
    """Compares all that `describe_loads` says of a plan with what is counted here."""
    described = describe_loads(work, bind(plan, tables, features, work.devices))
    for key, loads in recounted(plan, tables, work).items():
        assert described[key]["per_device"] == pytest.approx(loads, rel=1e-9, abs=0.5)
        assert described[key]["max"] == max(described[key]["per_device"])
        mean = sum(loads) / len(loads)
        assert described[key]["imbalance"] == pytest.approx(max(loads) / mean if mean else 1)
    expected, held = allocated(plan, tables, work), recounted(plan, tables, work)["held_bytes"]
    assert described["allocated_bytes"]["each"] == expected
    assert described["allocated_bytes"]["imbalance"] == pytest.approx(expected * len(held) / sum(held))
