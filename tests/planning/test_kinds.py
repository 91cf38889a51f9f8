"""Choice between rows and pooled vectors: bytes worked out by hand."""

import pytest

from recjax.embedding.optim import Sgd
from recjax.embedding.plan import Plan
from recjax.embedding.segment import Exchange, RowIds, Segment
from recjax.embedding.spec import FeatureSpec, TableSpec
from recjax.planning.loads import FeatureUse, Profile, TableUse, Workload
from recjax.planning.resolve import bytes_of, choose_kinds

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


@pytest.mark.parametrize(
    ("features", "kind", "rows_of", "fewer"),
    [
        # 60 rows of "one" there and back with their ids; 100 vectors of "many", and its 4,000 ids
        ((("one", 1, 60, True), ("many", 40, 3000, True)), "pooled", ("one",), 3060 * 132 / (60 * 132 + 28_800)),
        # rows that a sequence asks for in any case
        ((("history", 5, 300, False), ("one", 1, 5, True)), "rows", (), 0),
        ((("history", 5, 300, False), ("many", 40, 2000, True)), "pooled", (), 2300 * 132 / (300 * 132 + 28_800)),
        # a third has few rows of its own but more ids than vectors would be
        (
            (("history", 5, 300, False), ("one", 1, 5, True), ("many", 40, 2000, True)),
            "pooled",
            ("one",),
            2305 * 132 / (305 * 132 + 28_800),
        ),
        ((("one", 1, 100, True), ("two", 2, 90, True)), "rows", (), 0),
        ((("some", 4, 300, True), ("many", 40, 3000, True)), "pooled", (), 3300 * 132 / (200 * 128 + 4400 * 4)),
    ],
)
def test_features_of_one_table_may_go_different_ways(features, kind, rows_of, fewer):
    """Batches of 100 a device, rows and vectors of 16 columns: 128 bytes there and back."""
    uses = tuple(FeatureUse(*feature) for feature in features)
    bags = len(uses) if all(f.pooled for f in uses) else 0
    use = TableUse(sum(f.ids for f in uses), sum(f.new for f in uses), bags, uses)
    work = Workload(Profile({"t": use}, "by hand"), batch_size=800, devices=8)
    specs = tuple(FeatureSpec(f.name, "t", None, "sum" if f.pooled else "none") for f in uses)
    tables = (TableSpec("t", 10_000, 16, SGD),)
    (chosen,) = choose_kinds(Plan({"t": (Segment("table_wise"),)}), tables, specs, work).tables["t"]
    assert (chosen.exchange.kind, chosen.rows_of) == (kind, rows_of)
    if fewer:
        named = f"pooled{' but for rows of one' if rows_of else ''}: {fewer:.1f} times fewer bytes than rows"
        assert chosen.why == named
