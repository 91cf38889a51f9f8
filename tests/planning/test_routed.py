"""The ways of ids, in plans whose owners are known, and what devices hold of tables whose rows go two ways."""

import dataclasses

import pytest

from recjax.embedding.bind import bind
from recjax.embedding.optim import Sgd
from recjax.embedding.plan import Plan, make_plan
from recjax.embedding.segment import Exchange
from recjax.embedding.spec import FeatureSpec, TableSpec
from recjax.planning.loads import FeatureUse, Profile, TableUse, Workload
from recjax.planning.step_sizes import Routed, of_plan, routed, together

TABLES = (TableSpec("a", 1000, 16, Sgd(0.1)), TableSpec("b", 500, 16, Sgd(0.1)))
FEATURES = (FeatureSpec("x", "a", 1), FeatureSpec("y", "a", 3), FeatureSpec("z", "b", 2))
IDS = {"x": 100.0, "y": 300.0, "z": 200.0}


def ways(plan, kind, devices=4):
    bound = bind(make_plan(plan, TABLES, Exchange(kind=kind)), TABLES, FEATURES, devices)
    return routed(bound, lambda feature: IDS[feature.name])


def test_each_plan_has_the_ways_of_its_owners():
    assert ways("row_wise", "rows") == ways("data_parallel", "rows") == (Routed("", 600, 3),)
    assert ways("table_wise", "pooled") == (Routed("pooled", 600, 3),)
    assert ways("row_wise", "pooled") == (Routed("split_pooled", 600, 3, 4.0),)
    # each of four ranges of columns has an owner, to which all ids go
    assert ways("column_wise", "pooled") == (Routed("pooled", 2400, 12),)


def test_parts_of_a_way_are_added_and_their_owners_averaged_over_ids():
    parts = [Routed("split_pooled", 100, 1, 2.0), Routed("", 5, 2), Routed("split_pooled", 300, 2, 6.0)]
    assert together(parts) == (Routed("split_pooled", 400, 3, 5.0), Routed("", 5, 2))
    assert together([Routed("", 0, 1)]) == (Routed("", 0, 1, pytest.approx(0)),)


def test_a_buffer_of_which_rows_and_vectors_travel_is_held_once():
    """A table whole on one device, rows of its feature x travel, vectors of y: 1,000 rows of 16 floats either way."""
    plan = make_plan("table_wise", TABLES[:1], Exchange(kind="pooled"))
    use = TableUse(4.0, 160.0, 2, (FeatureUse("x", 1.0, 40.0), FeatureUse("y", 3.0, 120.0)))
    held = []
    for rows_of in ((), ("x",)):
        segments = tuple(dataclasses.replace(segment, rows_of=rows_of) for segment in plan.tables["a"])
        bound = bind(Plan({"a": segments}), TABLES[:1], FEATURES[:2], 4)
        found = of_plan(bound, Workload(Profile({"a": use}, "a test"), 400, 4))
        held.append((found.spread_bytes, len(found.rows), len(found.vectors)))
    assert held == [(64_000.0, 0, 1), (64_000.0, 1, 1)]
