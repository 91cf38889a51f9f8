"""Reduced precision on the way between devices: what arrives, in how many bytes, and who may ask for it."""

import dataclasses

import numpy as np
import pytest

import recjax
from recjax.data.synthetic.clicks import Synthetic
from recjax.embedding.bind import bind
from recjax.embedding.group import Group
from recjax.embedding.optim import Sgd
from recjax.embedding.plan import Plan, make_plan
from recjax.embedding.plan_report import describe_plan, plan_table
from recjax.embedding.routing.routed import GroupRouting, Routing
from recjax.embedding.segment import EXACT, Exchange, Segment
from recjax.embedding.spec import FeatureSpec, TableSpec
from recjax.errors import ConfigError
from recjax.planning.compiled_collectives import useful_bytes
from recjax.train.build import build_trainer

D, C = 14, 8
TABLE, FEATURE = TableSpec("t", 40, D, Sgd(0.1)), FeatureSpec("f", "t")


def group_of(placement: str, devices: int, exchange: Exchange) -> Group:
    plan = Plan({"t": (Segment(placement, exchange=exchange),)})
    return bind(plan, (TABLE,), (FEATURE,), devices).groups[0]


def test_tables_of_another_precision_exchange_apart_and_replicated_ones_do_not_care():
    tables = tuple(TableSpec(n, 9, 4, Sgd(0.1)) for n in "abcde")
    features = tuple(FeatureSpec(n, n) for n in "abcde")
    way = Exchange("int8", "bfloat16")
    plan = make_plan(
        "row_wise", (*tables[:3], *(dataclasses.replace(t, placement="data_parallel") for t in tables[3:]))
    )
    reduced = {"b": (Segment("row_wise", exchange=way),), "c": (Segment("table_wise", exchange=way),)}
    bound = bind(Plan({**plan.tables, **reduced}), tables, features, 2)
    assert {g.name: [t.spec.name for t in g.segments] for g in bound.groups} == {
        "row_wise_D4_sgd": ["a"],
        "row_wise+table_wise_D4_sgd_int8_bfloat16": ["b", "c"],
        "data_parallel_D4_sgd": ["d", "e"],
    }
    assert [g.exchange for g in bound.groups] == [EXACT, way, EXACT]


def test_a_plan_gets_the_exchange_of_the_config_but_for_replicated_tables():
    tables = (TableSpec("a", 10, 4, Sgd(0.1)), TableSpec("b", 10**6, 4, Sgd(0.1)))
    way = Exchange("float16", "bfloat16")
    plan = make_plan("auto", tables, way)
    assert [plan.tables[n][0].exchange for n in "ab"] == [EXACT, way]
    assert [s.exchange for (s,) in make_plan("column_wise", tables, way).tables.values()] == [way, way]
    features = tuple(FeatureSpec(t.name, t.name) for t in tables)
    described = describe_plan(plan, tables, features, 2, 8)
    assert described["tables"]["b"]["exchange"] == {"forward": "float16", "backward": "bfloat16", "kind": "rows"}
    assert "\nb      row_wise, float16 / bfloat16  1,000,000" in plan_table(described)


def test_a_plan_file_has_its_own_exchange(tmp_path):
    tables = (TableSpec("a", 10, 4, Sgd(0.1)), TableSpec("b", 10, 4, Sgd(0.1)))
    way = Exchange("int8", "bfloat16")
    path = tmp_path / "plan.json"
    plan = Plan({"a": (Segment("row_wise", exchange=way),), "b": (Segment("data_parallel"),)})
    path.write_text(plan.to_json())
    assert make_plan(str(path), tables) == make_plan(str(path), tables, way) == plan
    words = (
        r"plan\.json exchanges rows of table 'a' in int8 and gradients in bfloat16, but .* says int8 and int8. Leave"
    )
    with pytest.raises(ConfigError, match=words):
        make_plan(str(path), tables, Exchange("int8", "int8"))


@pytest.mark.parametrize("preset", ["synthetic", "movietweetings"])
def test_settings(preset):
    config = recjax.load(preset, "embedding.exchange.forward=int8", "embedding.exchange.backward=bfloat16")
    assert config.embedding.exchange == Exchange("int8", "bfloat16", "auto")
    assert recjax.load(preset).embedding.exchange == Exchange(kind="auto")
    with pytest.raises(ConfigError, match="embedding.exchange.forward=int4"):
        recjax.load(preset, "embedding.exchange.forward=int4")


def test_float64_refuses_to_round():
    config = recjax.load("synthetic", "compute_dtype=float64", "plan=row_wise", "embedding.exchange.backward=float16")
    with pytest.raises(ConfigError, match="compute_dtype is float64, but .* table 'sparse_0' .* reduced precision"):
        build_trainer(config, Synthetic(rows=(30,), train_rows=10).open())


def test_useful_bytes_know_the_precision():
    """Two devices, each of which asks 3 rows of itself and 4 of the other."""
    counts = np.array([[3, 4], [4, 3]], np.int32)
    for placement, columns in (("row_wise", D), ("column_wise", D // 2)):
        group = group_of(placement, 2, Exchange("int8", "float16"))
        bound = dataclasses.replace(bind(make_plan(placement, (TABLE,)), (TABLE,), (FEATURE,), 2), groups=(group,))
        asked = counts if placement == "row_wise" else np.array([[4], [4]], np.int32)
        routing = Routing({group.name: GroupRouting(np.zeros((2, len(asked[0]), C)), asked)}, {})
        useful = {phase: size for (phase, *_), size in useful_bytes(bound, routing, 4, 0).items()}
        assert useful == {"id_exchange": 16, "row_exchange": 4 * (columns + 8), "grad_exchange": 4 * (columns + 1) * 2}
    narrow = dataclasses.replace(TABLE, dtype="bfloat16")  # whose rows are narrow as they are, and its gradients not
    bound = bind(make_plan("row_wise", (narrow,)), (narrow,), (FEATURE,), 2)
    routing = Routing({bound.groups[0].name: GroupRouting(np.zeros((2, 2, C)), counts)}, {})
    useful = {phase: size for (phase, *_), size in useful_bytes(bound, routing, 4, 0).items()}
    assert useful == {"id_exchange": 16, "row_exchange": 8 * D, "grad_exchange": 16 * D}
