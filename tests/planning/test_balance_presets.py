"""`plan=balanced` for published models: how even the loads are, and how much travels where vectors are pooled."""

from __future__ import annotations

import functools
import time
from typing import Any

import numpy as np
import pytest
from support.loads import assert_loads

from recjax.config import presets
from recjax.data.synthetic.stream import CRITEO_KAGGLE_ROWS
from recjax.embedding.bind import bind
from recjax.embedding.plan import Plan
from recjax.embedding.plan_report import describe_plan
from recjax.planning.balance import GOOD_ENOUGH
from recjax.planning.loads import LOADS, describe_loads
from recjax.planning.resolve import resolve, workload
from recjax.planning.step_sizes import of_plan
from recjax.train.table_specs import specs
from recjax.utils.phases import Phase

pytestmark = pytest.mark.full

ALL_LOADS = (*LOADS, "allocated_bytes")


def balanced(preset: str, devices: int, *overrides: str) -> tuple[Plan, dict[str, Any], float]:
    """The plan of a preset, its loads, and the seconds of processor time that it took."""
    config = presets.load(preset, [*overrides, f"mesh.devices={devices}", "plan=balanced"])
    source = config.data.open()
    tables, features = specs(config, source.schema)
    started = time.process_time()
    plan, _ = resolve(config, source, tables, features, config.mesh.shape)
    seconds = time.process_time() - started
    work = workload(config, source, tables, features, config.mesh.shape)
    assert_loads(work, plan, tables, features)
    loads = describe_loads(work, bind(plan, tables, features, devices))
    described = describe_plan(plan, tables, features, devices, config.train.batch_size)
    assert described["bytes_per_device"] == loads["held_bytes"]["per_device"]
    return plan, loads, seconds


def test_a_thousand_tables_on_128_devices() -> None:
    plan, loads, seconds = balanced("bench_model_a", 128, "embedding.exchange.kind=rows")
    assert len(plan.tables) == 1000
    assert max(loads[key]["imbalance"] for key in ALL_LOADS) <= 1.10
    assert seconds < 5


def test_a_thousand_tables_whose_vectors_are_pooled() -> None:
    """Meta's model A: 163 MiB of useful vectors a device if all were pooled; owners work on few ids in vain.

    What they work on are the lists of each buffer in which tables pool, as long as its fullest owner's.
    """
    plan, loads, _ = balanced("bench_model_a", 128)
    assert sum(s[0].exchange.kind == "pooled" for s in plan.tables.values()) > 400
    assert max(loads[key]["imbalance"] for key in ("held_bytes", "read_bytes", "allocated_bytes")) <= 1.10
    assert padded_mib(plan, "bench_model_a", 128) <= 205
    assert listed_over_mean(plan, "bench_model_a", 128) <= 2


@pytest.mark.parametrize(("devices", "most", "with_rows"), [(8, 110, 85), (16, 30, 45), (64, 8, 17)])
def test_mlperfs_tables_whose_vectors_are_pooled(devices: int, most: float, with_rows: float) -> None:
    """Rows alone are 272 MiB on 8 devices and 54 on 64."""
    preset = ("bench_mlperf_dcnv2", "data.scale=1", "train.batch_size=65536")
    plan, loads, _ = balanced(preset[0], devices, *preset[1:])
    assert 0 < padded_mib(plan, preset[0], devices, *preset[1:]) <= most
    assert loads["allocated_bytes"]["imbalance"] <= 1.2
    assert forward_mib(plan, preset[0], devices, *preset[1:]) <= with_rows


def test_columns_are_split_where_parts_of_rows_would_send_more() -> None:
    """bench_multihot: 512 samples a device, 10 ids a bag, 64 columns.

    Five tables hold 1.4 shares each. In 8 parts of rows each would send 8 vectors for a bag, more than distinct rows.
    """
    plans = {kind: balanced("bench_multihot", 8, f"embedding.exchange.kind={kind}")[0] for kind in ("rows", "auto")}
    assert {s.exchange.kind for n in (2, 3, 11, 15, 20) for s in plans["auto"].tables[f"sparse_{n}"]} == {"pooled"}
    rng = np.random.default_rng(0)
    sent = dict.fromkeys(plans, 0.0)
    for name, rows in zip(plans["rows"].tables, CRITEO_KAGGLE_ROWS, strict=True):
        distinct = np.unique((rng.zipf(1.1, 5120) - 1) % min(rows, 1_000_000)).size
        for kind, plan in plans.items():
            for s in (s for s in plan.tables[name] if s.placement != "data_parallel"):
                first, last = s.column_range(64)
                parts = 1 if isinstance(s.owners, int) else 8 if s.owners == "all" else len(s.owners)
                row, vectors = 2 * 4 * (last - first), 512 * parts
                by_rows = s.exchange.kind == "rows"
                sent[kind] += distinct * (4 + row) if by_rows else 5120 * 4 + vectors * row
    assert sent["rows"] >= 2.5 * sent["auto"]


def forward_mib(plan: Plan, preset: str, devices: int, *overrides: str) -> float:
    """MiB of rows and pooled vectors that a device sends to others for a forward pass, as exchanges tell it."""
    config = presets.load(preset, [*overrides, f"mesh.devices={devices}"])
    source = config.data.open()
    tables, features = specs(config, source.schema)
    sizes = of_plan(
        bind(plan, tables, features, devices), workload(config, source, tables, features, config.mesh.shape)
    )
    told = [part.events for part in sizes.rows] + [part.events for part in sizes.vectors]
    sent = sum(
        e.padded_bytes for events in told for e in events if e.phase in (Phase.ROW_EXCHANGE, Phase.POOLED_EXCHANGE)
    )
    return sent * (devices - 1) / devices / 2**20


def listed_over_mean(plan: Plan, preset: str, devices: int) -> float:
    """Ids of pooled tables of the fullest owner of each width that pools, added up, over the mean of an owner."""
    config = presets.load(preset)
    tables, features = specs(config, config.data.open().schema)
    ids = {f.table: float(f.bag or 0) for f in features}  # one feature a table
    assert all(ids.values()) and len(ids) == len(tables)
    ids_of: dict[tuple[int, bool], list[float]] = {}
    for table in tables:
        for s in plan.tables[table.name]:
            if s.exchange.kind == "pooled":
                first, last = s.column_range(table.dim)
                buffer = ids_of.setdefault((last - first, last - first < table.dim), [0.0] * devices)
                owners = [s.owners] if isinstance(s.owners, int) else range(devices) if s.owners == "all" else s.owners
                for owner in owners:
                    buffer[owner] += ids[table.name] / len(owners)
    return sum(map(max, ids_of.values())) / sum(sum(buffer) / devices for buffer in ids_of.values())


def padded_mib(plan: Plan, preset: str, devices: int, *overrides: str) -> float:
    """MiB of pooled vectors that a device sends to others, as much to each as the owner of most columns has."""
    config = presets.load(preset, [*overrides, f"mesh.devices={devices}"])
    columns = [0] * devices
    for name, segments in plan.tables.items():
        for s in segments:
            if s.exchange.kind == "pooled":
                first, last = s.column_range(dims(preset, overrides)[name])
                owners = [s.owners] if isinstance(s.owners, int) else range(devices) if s.owners == "all" else s.owners
                for owner in owners:
                    columns[owner] += last - first
    return max(columns) * config.train.batch_size / devices * 4 * (devices - 1) / 2**20


@functools.cache
def dims(preset: str, overrides: tuple[str, ...]) -> dict[str, int]:
    config = presets.load(preset, list(overrides))
    return {t.name: t.dim for t in specs(config, config.data.open().schema)[0]}


@pytest.mark.parametrize("devices", [8, 16, 64])
@pytest.mark.parametrize(("preset", "overrides"), [("bench_mlperf_dcnv2", ["data.scale=1"]), ("bench_mlperf64", [])])
def test_mlperfs_tables(preset: str, overrides: list[str], devices: int) -> None:
    _, loads, _ = balanced(preset, devices, *overrides, "embedding.exchange.kind=rows")
    assert max(loads[key]["imbalance"] for key in ALL_LOADS) <= GOOD_ENOUGH


@pytest.mark.parametrize("devices", [128, pytest.param(1024, marks=pytest.mark.wide)])
def test_twelve_trillion_parameters(devices: int) -> None:
    plan, loads, _ = balanced("bench_model_f", devices, "embedding.exchange.kind=rows")
    assert len(plan.tables) == 22
    assert max(loads[key]["imbalance"] for key in ALL_LOADS) <= GOOD_ENOUGH
