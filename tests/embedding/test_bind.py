"""The binding of a plan to a number of devices: which buffer holds each table, and where in it each row lies."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.routing import locate, segment_of

from recjax.embedding.bind import bind
from recjax.embedding.layout import ACROSS, BoundPlan
from recjax.embedding.optim import RowWiseAdagrad, Sgd
from recjax.embedding.plan import Plan, make_plan
from recjax.embedding.segment import PLACEMENTS, Segment
from recjax.embedding.sharding import GridSharding
from recjax.embedding.spec import FeatureSpec, TableSpec
from recjax.errors import ConfigError

SGD, ADAGRAD = Sgd(0.1), RowWiseAdagrad(0.1)


def specs(*tables: TableSpec) -> tuple[tuple[TableSpec, ...], tuple[FeatureSpec, ...]]:
    """The tables, and for each a feature of its name."""
    return tables, tuple(FeatureSpec(t.name, t.name) for t in tables)


def test_one_group_for_each_placement_width_and_optimizer():
    tables, features = specs(
        TableSpec("a", 50, 4, SGD),
        TableSpec("b", 60, 4, ADAGRAD),
        TableSpec("c", 70, 4, SGD),
        TableSpec("d", 80, 8, SGD),
        TableSpec("e", 90, 4, SGD),
        TableSpec("f", 95, 4, RowWiseAdagrad(0.1)),  # equal to b's, not the same object
    )
    placements = {t.name: (Segment("data_parallel" if t.name == "e" else "row_wise"),) for t in tables}
    bound = bind(Plan(placements), tables, features, 4)
    assert {g.name: [t.spec.name for t in g.segments] for g in bound.groups} == {
        "row_wise_D4_sgd": ["a", "c"],
        "row_wise_D4_rowwise_adagrad": ["b", "f"],
        "row_wise_D8_sgd": ["d"],
        "data_parallel_D4_sgd": ["e"],
    }
    for group in bound.groups:
        assert {(t.spec.dim, t.spec.optimizer) for t in group.segments} == {(group.dim, group.optimizer)}
        assert (group.owners, group.parts) == ((4, 4) if group.spread else (1, 1))
        assert [f.name for f in group.features] == [t.spec.name for t in group.segments]


def test_optimizers_of_one_kind_with_other_settings_do_not_share_a_buffer():
    rates = [0.1, 0.2, 0.1, 0.3]
    tables, features = specs(*(TableSpec(f"t{i}", 40, 4, Sgd(rate)) for i, rate in enumerate(rates)))
    bound = bind(make_plan("row_wise", tables), tables, features, 3)
    assert [(g.optimizer.learning_rate, [t.spec.name for t in g.segments]) for g in bound.groups] == [
        (0.1, ["t0", "t2"]),
        (0.2, ["t1"]),
        (0.3, ["t3"]),
    ]
    assert len({g.name for g in bound.groups}) == 3


def test_features_may_share_a_table():
    tables = (TableSpec("user", 40, 4, SGD), TableSpec("item", 50, 4, ADAGRAD))
    features = (FeatureSpec("viewer", "user"), FeatureSpec("seen", "item", None), FeatureSpec("seller", "user"))
    bound = bind(make_plan("row_wise", tables), tables, features, 2)
    assert [[f.name for f in g.features] for g in bound.groups] == [["viewer", "seller"], ["seen"]]
    assert bound.features == features


def check_slots(bound: BoundPlan, tables: tuple[TableSpec, ...]) -> None:
    """Every (table, row, column) has one place and no two share one; no buffer is larger than its fullest device."""
    placed = [t.spec for g in bound.groups for t in g.segments]
    assert sorted(t.name for t in placed) == sorted(t.name for t in tables)
    for group in bound.groups:
        places = []
        cells = np.zeros((group.parts, group.rows, group.width), int)
        for table in group.segments:
            owner, slot, _ = table.locate(np.arange(table.spec.rows))
            assert owner.shape == slot.shape == (table.spec.rows,)
            assert owner.min() >= 0 and owner.max() < group.owners
            assert slot.min() >= 0 and slot.max() < group.rows
            counts = np.bincount(owner, minlength=group.owners)
            if table.placement == "table_wise":
                assert np.count_nonzero(counts) == 1
            elif table.placement == "table_row_wise":
                (host,) = set((np.flatnonzero(counts) // group.per_host).tolist())
                of_host = counts[host * group.per_host : (host + 1) * group.per_host]
                assert of_host.max() - of_host.min() <= 1
            else:
                assert counts.max() - counts.min() <= 1
            places.append(owner * group.rows + slot)
            held = np.zeros((table.spec.rows, table.spec.dim), int)
            for piece in group.pieces(table):
                held[piece.start : piece.stop, piece.first : piece.last] += 1
                size = piece.stop - piece.start, piece.last - piece.first
                cells[piece.part, piece.offset : piece.offset + size[0], : size[1]] += 1
                # the piece is where `locate` seeks its rows
                rows = table.order.row(np.arange(piece.start, piece.stop))
                assert (slot[rows] == piece.offset + np.arange(size[0])).all()
                assert (owner[rows] == group.place(piece.part)[0]).all()
            assert (held == 1).all()
        assert cells.max() == 1
        fullest = cells.any(axis=2).sum(axis=1).max()
        assert len(np.unique(np.concatenate(places))) == sum(t.spec.rows for t in group.segments)
        assert group.rows == max(fullest, 1)


tables_of_a_model = st.lists(
    st.tuples(st.integers(1, 9000), st.sampled_from([1, 4, 16]), st.sampled_from([SGD, Sgd(0.2), ADAGRAD])),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(
    tables_of_a_model,
    st.integers(1, 20),
    st.integers(1, 4),
    st.sampled_from([*PLACEMENTS, "auto"]),
)
def test_every_row_of_every_table_has_one_place(sizes, per_host, hosts, plan):
    tables, features = specs(*(TableSpec(f"t{i}", *size) for i, size in enumerate(sizes)))
    check_slots(bind(make_plan(plan, tables), tables, features, per_host * hosts, hosts=hosts), tables)


@pytest.mark.parametrize("devices", [1, 2, 3, 5, 8, 64, 300])
def test_tables_smaller_than_the_number_of_devices(devices):
    tables, features = specs(TableSpec("one", 1, 4, SGD), TableSpec("two", 2, 4, SGD), TableSpec("big", 999, 4, SGD))
    for plan in PLACEMENTS:
        check_slots(bind(make_plan(plan, tables), tables, features, devices), tables)


def test_more_rows_than_int32_on_one_device_are_refused():
    tables, features = specs(TableSpec("a", 2**31 - 1, 1, SGD), TableSpec("b", 2**20, 1, SGD))
    plan = make_plan("row_wise", tables)
    with pytest.raises(ConfigError, match=r"group row_wise_D1_sgd: 2,148,532,223 rows on one device exceed int32"):
        bind(plan, tables, features, 1)
    assert bind(plan, tables, features, 2).groups[0].rows == 2**30 + 2**19


def test_row_wise_and_table_wise_tables_share_a_buffer():
    tables, features = specs(TableSpec("a", 10, 4, SGD), TableSpec("b", 6, 4, SGD), TableSpec("c", 4, 4, SGD))
    plan = Plan({"a": (Segment("row_wise"),), "b": (Segment("table_wise", owners=1),), "c": (Segment("row_wise"),)})
    (group,) = bind(plan, tables, features, 2).groups
    assert group.name == "row_wise+table_wise_D4_sgd"
    assert [t.offsets for t in group.segments] == [(0, 0), (5, 5), (5, 11)]
    assert group.rows == 13  # device 1 holds 5 rows of a, all 6 of b and 2 of c
    assert set(locate(group, "b", np.arange(6))[0]) == {1}


def test_table_wise_tables_go_to_the_least_loaded_device():
    """By hand: shares of bytes plus shares of lookups are 50/100 + 1/8, 25/100 + 5/8, 15/100 + 1/8, 10/100 + 1/8."""
    sizes = {"big": 500, "busy": 250, "mid": 150, "small": 100}
    tables = tuple(TableSpec(name, rows, 4, SGD) for name, rows in sizes.items())
    features = tuple(FeatureSpec(t.name, t.name, 5 if t.name == "busy" else 1) for t in tables)
    (group,) = bind(make_plan("table_wise", tables), tables, features, 2).groups
    # busy 0.875 to device 0; big 0.625 to 1; mid 0.275 to 1 (0.9); small 0.225 to 0 (1.1)
    assert {t.spec.name: t.split.first for t in group.segments} == {"busy": 0, "big": 1, "mid": 1, "small": 0}


def test_owners_of_the_plan_are_kept_and_the_others_go_around_them():
    tables, features = specs(*(TableSpec(name, 100, 4, SGD) for name in "abc"))
    plan = Plan({"a": (Segment("table_wise"),), "b": (Segment("table_wise", owners=0),), "c": (Segment("table_wise"),)})
    (group,) = bind(plan, tables, features, 3).groups
    assert {t.spec.name: t.split.first for t in group.segments} == {"a": 1, "b": 0, "c": 2}
    with pytest.raises(ConfigError, match="puts table 'b' on device 3, but the mesh has only 3"):
        moved = Plan({**plan.tables, "b": (Segment("table_wise", owners=3),)})
        bind(moved, tables, features, 3)


def test_owners_that_the_mesh_lacks_are_refused_though_no_column_is_left_for_them():
    tables, features = specs(TableSpec("a", 10, 1, SGD))
    plan = Plan({"a": (Segment("column_wise", owners=(0, 3)),)})
    with pytest.raises(ConfigError, match="over the devices 0, 3, but the mesh has only 3"):
        bind(plan, tables, features, 3)


def test_columns_are_cut_evenly():
    tables, features = specs(TableSpec("a", 10, 5, SGD))
    (group,) = bind(make_plan("column_wise", tables), tables, features, 3).groups
    assert (group.width, group.rows, group.parts, group.owners) == (2, 10, 3, 1)
    assert [(p.first, p.last) for p in group.pieces(group.segments[0])] == [(0, 2), (2, 4), (4, 5)]


def test_hosts_must_have_equally_many_devices():
    tables, features = specs(TableSpec("a", 10, 4, SGD))
    with pytest.raises(ConfigError, match=r"6 devices cannot be shared evenly among 4 hosts\. .* to 1, 2, 3 or 6"):
        bind(make_plan("row_wise", tables), tables, features, 6, hosts=4)


def test_rows_of_a_table_over_one_host():
    """It shares its buffer with row-wise and table-wise tables, and is cut evenly over its host's devices."""
    tables, features = specs(TableSpec("a", 5, 4, SGD), TableSpec("b", 8, 4, SGD), TableSpec("c", 3, 4, SGD))
    plan = {"a": Segment("table_row_wise", owners=1), "b": Segment("row_wise"), "c": Segment("table_wise", owners=0)}
    (group,) = bind(Plan({k: (v,) for k, v in plan.items()}), tables, features, 4, hosts=2).groups
    assert group.name == "table_row_wise+row_wise+table_wise_D4_sgd"
    assert [(p.part, p.stop - p.start) for p in group.pieces(segment_of(group, "a"))] == [
        (0, 0),
        (1, 0),
        (2, 3),
        (3, 2),
    ]
    assert [t.offsets for t in group.segments] == [(0, 0, 0, 0), (0, 0, 3, 2), (2, 2, 5, 4)]
    assert set(locate(group, "a", np.arange(5))[0].tolist()) == {2, 3}


def test_tables_over_one_host_go_to_the_least_loaded_one():
    """By hand, 2 hosts of 2 devices: shares of bytes plus lookups are 0.75, 0.65 and 0.6, over two devices each or one.

    The table on one device loads it most (0.65) and goes to device 0; then "a" (0.375 on each) to host 1; then "c"
    (0.3 on each) to host 0, on which lie 0.65 in all, against 0.75.
    """
    tables, features = specs(*(TableSpec(n, rows, 4, SGD) for n, rows in (("a", 500), ("b", 380), ("c", 320))))
    plan = Plan({n: (Segment("table_wise" if n == "b" else "table_row_wise"),) for n in "abc"})
    (group,) = bind(plan, tables, features, 4, hosts=2).groups
    assert {t.spec.name: (t.split.first, t.split.owners) for t in group.segments} == {
        "a": (2, 2),
        "b": (0, 1),
        "c": (0, 2),
    }
    moved = Plan({**plan.tables, "c": (Segment("table_row_wise", owners=0),)})
    (group,) = bind(moved, tables, features, 4, hosts=2).groups
    assert {t.spec.name: t.split.first for t in group.segments} == {"a": 0, "b": 2, "c": 0}
    with pytest.raises(ConfigError, match="puts table 'c' on host 2, but the mesh has only 2, counted from 0"):
        bind(Plan({**plan.tables, "c": (Segment("table_row_wise", owners=2),)}), tables, features, 4, hosts=2)


def test_a_grid_has_columns_over_hosts_and_rows_inside():
    tables, features = specs(TableSpec("a", 5, 3, SGD))
    (group,) = bind(make_plan("grid", tables), tables, features, 4, hosts=2).groups
    found = [(p.part, p.start, p.stop, p.first, p.last) for p in group.pieces(group.segments[0])]
    assert found == [(0, 0, 3, 0, 2), (1, 3, 5, 0, 2), (2, 0, 3, 2, 3), (3, 3, 5, 2, 3)]
    assert (type(group.sharding), group.owners, group.parts, group.width, group.rows) == (GridSharding, 2, 4, 2, 3)


@pytest.mark.parametrize(
    ("hosts", "grid_is", "table_row_wise_is"), [(1, "row_wise", "row_wise"), (4, "column_wise", "table_wise")]
)
def test_without_two_levels_they_are_the_placements_of_one(hosts, grid_is, table_row_wise_is):
    tables, features = specs(TableSpec("a", 10, 4, SGD), TableSpec("b", 7, 4, SGD))
    for placement, same in (("grid", grid_is), ("table_row_wise", table_row_wise_is)):
        (found,) = bind(make_plan(placement, tables), tables, features, 4, hosts=hosts).groups
        (expected,) = bind(make_plan(same, tables), tables, features, 4, hosts=hosts).groups
        assert found.sharding == expected.sharding and not found.two_step
        for a, b in zip(found.segments, expected.segments, strict=True):
            assert a.placement == placement
            assert list(found.pieces(a)) == list(expected.pieces(b))


def test_no_capacity_has_the_name_of_another():
    """Those of features, of groups, and of their exchanges across hosts are kept by name in one place."""
    tables, _ = specs(TableSpec("a", 10, 4, SGD))
    for name in ("row_wise_D4_sgd", "row_wise_D4_sgd across hosts"):
        (group,) = bind(make_plan("row_wise", tables), tables, (FeatureSpec(name, "a"),), 4, hosts=2).groups
        assert name not in (group.name, group.name + ACROSS)
