"""Choice between rows and pooled vectors: bytes worked out by hand."""

import pytest

from recjax.embedding.optim import Sgd
from recjax.embedding.plan import Exchange, Plan, RowIds, Segment
from recjax.embedding.spec import FeatureSpec, TableSpec
from recjax.planning.kinds import bytes_of, choose_kinds
from recjax.planning.loads import Workload
from recjax.planning.profile import Profile, TableUse

SGD = Sgd(0.1)


def work(ids: float, distinct: float, hosts: int = 1, bags: int = 1) -> Workload:
    return Workload(Profile({"t": TableUse(ids, distinct, bags)}, "by hand"), batch_size=800, devices=8, hosts=hosts)


@pytest.mark.parametrize(
    ("segments", "rows", "vectors"),
    [
        # 300 distinct rows of 16 columns there and back, and their ids; 100 vectors, and 500 ids
        ((Segment("table_wise"),), 300 * (4 + 128), 100 * 128 + 500 * 4),
        # each of 8 shards of 2 columns asks for all ids
        ((Segment("column_wise"),), 300 * (4 * 8 + 128), 100 * 128 + 500 * 4 * 8),
        # 4 devices of a host send a vector each
        ((Segment("table_row_wise"),), 300 * (4 + 128), 100 * 128 * 4 + 500 * 4),
        ((Segment("row_wise", owners=(0, 5)),), 300 * (4 + 128), 100 * 128 * 2 + 500 * 4),
        (
            (Segment("table_wise", columns=(0, 4)), Segment("table_wise", columns=(4, 16))),
            300 * (8 + 128),
            100 * 128 + 500 * 4 * 2,
        ),
        ((Segment("table_wise", exchange=Exchange("bfloat16", "int8")),), 300 * (4 + 56), 100 * 56 + 500 * 4),
    ],
)
def test_bytes_of_a_device_and_step(segments, rows, vectors):
    table = TableSpec("t", 1000, 16, SGD)
    assert bytes_of(segments, table, work(5, 300, hosts=2)) == (rows, vectors)


def test_vectors_of_tables_that_hold_bfloat16_are_float32():
    table = TableSpec("t", 1000, 16, SGD, dtype="bfloat16")
    found = bytes_of((Segment("table_wise"),), table, work(5, 300, bags=2))
    assert found == (300 * (4 + 32 + 64), 100 * 2 * 128 + 500 * 4)


@pytest.mark.parametrize(
    ("segment", "pooling", "ids", "distinct", "kind"),
    [
        (Segment("table_wise"), "sum", 5, 300, "pooled"),
        (Segment("table_wise"), "sum", 1, 60, "rows"),
        (Segment("table_wise"), "none", 5, 300, "rows"),
        (Segment("row_wise"), "sum", 5, 300, "rows"),
        (Segment("grid"), "sum", 5, 300, "rows"),
    ],
)
def test_the_fewer_bytes_decide(segment, pooling, ids, distinct, kind):
    tables, features = (TableSpec("t", 1000, 16, SGD),), (FeatureSpec("f", "t", 5, pooling),)
    (chosen,) = choose_kinds(Plan({"t": (segment,)}), tables, features, work(ids, distinct)).tables["t"]
    assert chosen.exchange.kind == kind
    assert ("pooled: 2.7 times fewer bytes than rows" in chosen.why) == (kind == "pooled")


def test_segments_of_a_table_are_of_one_kind_but_for_copies():
    tables, features = (TableSpec("t", 1000, 16, SGD),), (FeatureSpec("f", "t", 5),)
    plan = Plan({"t": (Segment("data_parallel", RowIds((1, 2))), Segment("table_wise", "rest"))})
    copies, rest = choose_kinds(plan, tables, features, work(5, 300)).tables["t"]
    assert (copies.exchange, rest.exchange) == (Exchange(), Exchange(kind="pooled"))
