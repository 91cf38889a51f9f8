"""`plan=balanced`: loads counted from the plan alone, cases by hand, and the command."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.commands import assert_refused, inside, write_preset
from support.loads import assert_loads

from recjax.embedding.bind import bind
from recjax.embedding.optim import Adagrad, RowWiseAdagrad, Sgd, SparseOptimizer
from recjax.embedding.plan import AUTO_REPLICATE_BYTES, Plan, check_plan
from recjax.embedding.plan_report import describe_plan, plan_table
from recjax.embedding.segment import Exchange, Segment
from recjax.embedding.spec import FeatureSpec, TableSpec
from recjax.planning.balance import GOOD_ENOUGH, balance
from recjax.planning.cuts import NARROWEST
from recjax.planning.loads import LOADS, Profile, TableUse, Workload, describe_loads

pytestmark = [pytest.mark.light_compile, pytest.mark.few_programs]


def use_of(tables: tuple[TableSpec, ...], ids: dict[str, float], samples: float) -> dict[str, TableUse]:
    """As many ids a sample as `ids` says, all distinct in so many samples, as far as there are rows."""
    return {t.name: TableUse(ids[t.name], min(t.rows, ids[t.name] * samples)) for t in tables}


def made(*shapes: tuple[int, int, float], devices: int, batch_size: int = 1000) -> tuple[Plan, Any]:
    """The plan of tables of (rows, D, ids a sample), called t0, t1, ..., which have no slots."""
    tables = tuple(TableSpec(f"t{n}", rows, dim, Sgd(0.1)) for n, (rows, dim, _) in enumerate(shapes))
    features = tuple(FeatureSpec(t.name, t.name, None) for t in tables)
    ids = {t.name: shape[2] for t, shape in zip(tables, shapes, strict=True)}
    work = Workload(Profile(use_of(tables, ids, batch_size / devices), "a test"), batch_size, devices)
    plan = balance(tables, features, work)
    check_plan(plan, tables)
    assert_loads(work, plan, tables, features)
    return plan, describe_loads(work, bind(plan, tables, features, devices))


def where(plan: Plan, table: str) -> list[Any]:
    return [(s.placement, s.columns, s.owners) for s in plan.tables[table]]


@st.composite
def models(draw: st.DrawFn) -> tuple[tuple[TableSpec, ...], tuple[FeatureSpec, ...], Workload]:
    rules: list[SparseOptimizer] = [Sgd(0.1), RowWiseAdagrad(0.1), Adagrad(0.1)]
    optimizers = st.sampled_from(rules)
    rows, dims = st.integers(1, 200_000), st.sampled_from([1, 4, 16, 48, 64, 67, 96, 256])
    placements = st.sampled_from([None, None, None, "row_wise", "table_wise", "data_parallel"])
    shapes = draw(st.lists(st.tuples(rows, dims, optimizers, placements), min_size=1, max_size=8))
    tables = tuple(
        TableSpec(f"t{n}", rows, dim, optimizer, placement=placement)
        for n, (rows, dim, optimizer, placement) in enumerate(shapes)
    )
    features = tuple(FeatureSpec(t.name, t.name, None) for t in tables)
    devices, batch_size = draw(st.integers(1, 9)), draw(st.integers(1, 5000))
    use = use_of(tables, {t.name: draw(st.just(0.0) | st.floats(1e-6, 100)) for t in tables}, batch_size / devices)
    return tables, features, Workload(Profile(use, "a test"), batch_size, devices)


@settings(max_examples=40, deadline=None)
@given(models())
def test_every_shard_has_one_owner_and_the_loads_are_the_printed_ones(
    model: tuple[tuple[TableSpec, ...], tuple[FeatureSpec, ...], Workload],
) -> None:
    tables, features, work = model
    plan = balance(tables, features, work)
    assert plan == balance(tables, features, work)
    check_plan(plan, tables)
    assert_loads(work, plan, tables, features)
    common: set[int] = set()
    for table in tables:
        segments = plan.tables[table.name]
        columns = [s.column_range(table.dim) for s in segments]
        assert sum(last - first for first, last in columns) == table.dim
        if table.placement:
            assert [s.placement for s in segments] == [table.placement]
            assert table.placement != "table_wise" or isinstance(segments[0].owners, int)
        else:
            small = table.rows * table.dim * 4 <= AUTO_REPLICATE_BYTES
            assert all(s.owners != "all" or s.placement != "table_wise" for s in segments)
            assert ({s.placement for s in segments} == {"data_parallel"}) == small
        if len(segments) > 1:
            widths = [last - first for first, last in columns]
            assert min(widths) >= NARROWEST
            assert set(widths[:-1]) == {max(widths)}  # what remains is the last
            common.add(widths[0])
    assert len(common) <= 1
    assert all(s.why for segments in plan.tables.values() for s in segments)
    assert Plan.from_json(plan.to_json()) == plan


def test_whole_tables_where_they_fit() -> None:
    """Four equal tables on two devices: two on each, and nothing is split."""
    plan, loads = made(*[(10_000, 16, 1)] * 4, devices=2)
    owners = [where(plan, f"t{n}") for n in range(4)]
    assert sorted(o[0][2] for o in owners) == [0, 0, 1, 1]
    assert {loads[key]["imbalance"] for key in LOADS} == {1.0}
    assert plan.tables["t0"][0].why == "balanced: whole"


def test_a_large_table_is_split_by_columns() -> None:
    """It has 1.5 of a device's bytes and few ids, so that two halves of its columns go to different devices."""
    plan, _ = made((60_000, 64, 0.1), (20_000, 64, 3), devices=2)
    assert sorted(where(plan, "t0")) == [("table_wise", (0, 32), 0), ("table_wise", (32, 64), 1)]
    assert plan.tables["t0"][0].why.startswith("balanced: ")
    assert "1.50 of a device's bytes held, so split into 2 ranges of columns" in plan.tables["t0"][0].why


def test_tables_of_several_widths_come_to_share_buffers() -> None:
    """Nine tables of three widths on three devices. One device a table would allocate three times what it holds."""
    shapes = [(rows, dim, 1) for dim in (32, 64, 96) for rows in (1000, 3000, 30_000)]
    plan, loads = made(*shapes, devices=3)
    assert max(load["imbalance"] for key, load in loads.items() if key != "profile") <= GOOD_ENOUGH
    whole, _ = made(*shapes, devices=1)
    assert all(s.why.endswith("whole") for segments in whole.tables.values() for s in segments)
    assert plan.tables["t0"][0].placement == "table_wise" and len(plan.tables["t0"]) == 1


def test_a_remainder_of_columns_shares_a_buffer_too() -> None:
    """Of three parts in two, 64 and 32 columns: both buffers have two equal shards on two devices."""
    plan, loads = made((50_000, 96, 1), (50_000, 96, 1), *[(50_000, 64, 1)] * 2, devices=2, batch_size=10)
    assert loads["allocated_bytes"]["imbalance"] <= GOOD_ENOUGH


def test_a_narrow_table_is_split_by_rows() -> None:
    plan, loads = made((60_000, 32, 1), devices=3)
    assert where(plan, "t0") == [("row_wise", "all", "all")]
    assert {loads[key]["imbalance"] for key in LOADS} == {1.0}


def test_a_table_with_too_many_ids_is_split_by_rows() -> None:
    """By columns each device would be asked for all its ids, and that is what it has too many of."""
    plan, _ = made((2000, 256, 100), *[(20_000, 256, 1)] * 4, devices=4)
    assert [s.placement for s in plan.tables["t0"]] == ["row_wise"]
    assert "ids a step" in plan.tables["t0"][0].why or "bytes read" in plan.tables["t0"][0].why


def test_columns_stay_so_wide_that_int32_counts_the_rows_of_a_device() -> None:
    """Two tables of 2^31 - 1 rows on two devices: in ranges of 32 columns a device would have 8 times as many rows."""
    plan, _ = made((2**31 - 1, 256, 0.001), (2**31 - 1, 256, 3), devices=4)
    narrowest = min(b - a for segments in plan.tables.values() for s in segments for a, b in [s.column_range(256)])
    assert narrowest >= 256  # half of 2 * 2^31 * 256 / 4 values on a device


def test_the_exchange_is_that_of_the_run() -> None:
    tables = (TableSpec("small", 4, 4, Sgd(0.1)), TableSpec("large", 100_000, 64, Sgd(0.1)))
    features = tuple(FeatureSpec(t.name, t.name) for t in tables)
    work = Workload(Profile({"small": TableUse(1, 4), "large": TableUse(1, 50)}, "a test"), 100, 2)
    exchange = Exchange("int8", "bfloat16")
    plan = balance(tables, features, work, exchange)
    assert {s.exchange for s in plan.tables["large"]} == {exchange}
    assert [s.exchange for s in plan.tables["small"]] == [Exchange()]
    [sent] = {work.of_columns(tables[1], 64, exchange)[2]}
    assert sent == 2 * 50 * (64 + 8)


def test_tables_placed_otherwise_count_and_their_hosts_are_named() -> None:
    tables = (
        TableSpec("mine", 50_000, 16, Sgd(0.1), placement="table_row_wise"),
        *(TableSpec(f"t{n}", 5000, 16, Sgd(0.1)) for n in range(10)),
    )
    features = tuple(FeatureSpec(t.name, t.name) for t in tables)
    use = {t.name: TableUse(t.rows / 5000, t.rows / 50) for t in tables}
    work = Workload(Profile(use, "a test"), 1000, 4, hosts=2)
    plan = balance(tables, features, work)
    assert where(plan, "mine") == [("table_row_wise", "all", 0)]
    loads = describe_loads(work, bind(plan, tables, features, 4, hosts=2))
    assert max(loads[key]["imbalance"] for key in LOADS) <= GOOD_ENOUGH


@pytest.fixture(scope="module")
def preset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_preset(tmp_path_factory.mktemp("preset"))


LARGE = ("data.rows=40000,3000,2000", "embedding.dim=64", "model.interaction=cat", "embedding.exchange.kind=rows")


def test_the_command_prints_saves_and_takes_it_back(preset: Path, tmp_path: Path) -> None:
    options = (preset, *LARGE, "mesh.devices=3")
    file = tmp_path / "plan.json"
    result = inside("plan", *options, "plan=balanced", "--save", file, "--json").result
    loads = result["loads"]
    assert re.fullmatch(r"the first [\d,]+ training samples", loads["profile"])
    for key in LOADS:
        assert len(loads[key]["per_device"]) == 3
        assert 1 <= loads[key]["imbalance"] <= GOOD_ENOUGH
    assert sum(loads["held_bytes"]["per_device"]) == sum(result["bytes_per_device"])
    assert "of a device's" in json.dumps(result["tables"]["sparse_0"])
    assert inside("plan", *options, f"plan={file}", "--json").result == result
    text = inside("plan", *options, "plan=balanced").out
    assert "so split into" in text and "load of a device" in text
    for words in LOADS.values():
        assert words in text
    assert inside("plan", *options, "plan=table_wise", "--json").result["loads"]["held_bytes"]["imbalance"] > 2


def test_a_name_that_is_nearly_right(preset: Path) -> None:
    assert_refused(inside("plan", preset, "plan=balance"), 2, "Did you mean balanced?")


def test_a_wrong_plan_is_refused_before_there_are_devices(preset: Path, tmp_path: Path) -> None:
    options = ("plan=balance", "mesh.platform=gpu", "--out", tmp_path / "run")  # which there is not
    assert_refused(inside("train", preset, *options), 2, "Did you mean balanced?")


def test_the_plan_says_what_devices_allocate():
    """Two tables of 100 rows, D = 4 and 8, SGD, each on a device of its own: both devices have room for both."""
    tables = (TableSpec("a", 100, 4, Sgd()), TableSpec("b", 100, 8, Sgd()))
    features = (FeatureSpec("f", "a"), FeatureSpec("g", "b"))
    plan = Plan({"a": (Segment("table_wise", owners=0),), "b": (Segment("table_wise", owners=1),)})
    described = describe_plan(plan, tables, features, 2, 8)
    assert described["bytes_per_device"] == [1600, 3200]
    assert described["buffer_bytes_per_device"] == 4800
    assert "the buffers of each device take 4,800 bytes" in plan_table(described)
    even = describe_plan(Plan({n: (Segment("row_wise"),) for n in "ab"}), tables, features, 2, 8)
    assert even["buffer_bytes_per_device"] == 2400 == even["bytes_per_device"][0]
    assert "buffers of each device" not in plan_table(even)
