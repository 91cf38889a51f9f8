"""Plan files and their refusals, and the plans that a name or a table's own setting makes."""

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recjax.embedding.optim import RowWiseAdagrad, Sgd
from recjax.embedding.plan import AUTO_REPLICATE_BYTES, PLACEMENTS, Exchange, Plan, Segment, make_plan
from recjax.embedding.spec import TableSpec
from recjax.errors import ConfigError

SGD, ADAGRAD = Sgd(0.1), RowWiseAdagrad(0.1)


def plan_text(**changes: object) -> str:
    """A plan file for one table "t", with changes to its segment; None removes a key."""
    segment = {"placement": "row_wise", **changes}
    return json.dumps(
        {"format": "recjax-plan/1", "tables": {"t": [{k: v for k, v in segment.items() if v is not None}]}}
    )


@settings(max_examples=50)
@given(
    st.dictionaries(
        st.text(max_size=8),
        st.tuples(st.builds(Segment, st.sampled_from(["row_wise", "data_parallel"]), why=st.text())),
        max_size=4,
    )
)
def test_json_round_trip(tables):
    plan = Plan(tables)
    assert Plan.from_json(plan.to_json()) == plan


def test_the_file_holds_every_key():
    """Files are for people and other programs: what a segment does not say would have to be guessed."""
    text = Plan({"user": (Segment("row_wise", why="large"),)}).to_json()
    assert json.loads(text) == {
        "format": "recjax-plan/1",
        "tables": {
            "user": [
                {
                    "placement": "row_wise",
                    "rows": "all",
                    "columns": "all",
                    "owners": "all",
                    "tier": "device",
                    "exchange": {"forward": "float32", "backward": "float32", "kind": "rows"},
                    "why": "large",
                }
            ]
        },
    }
    assert text.endswith("}\n")


def test_keys_left_out_have_their_defaults():
    assert Plan.from_json(plan_text()) == Plan({"t": (Segment("row_wise"),)})


@pytest.mark.parametrize(
    ("value", "exchange"),
    [
        ("float32", Exchange()),
        ("int8", Exchange("int8", "int8")),
        ({"backward": "bfloat16"}, Exchange("float32", "bfloat16")),
        ({"forward": "float16", "backward": "int8"}, Exchange("float16", "int8")),
    ],
)
def test_an_exchange_is_one_precision_or_one_for_each_direction(value, exchange):
    plan = Plan.from_json(plan_text(exchange=value))
    assert plan == Plan({"t": (Segment("row_wise", exchange=exchange),)}) == Plan.from_json(plan.to_json())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"my\.json:1: not valid JSON"),
        ('{\n"format": "recjax-plan/1",\n"tables": {,}}', r"my\.json:3: not valid JSON \(.*\).*recjax plan"),
        ("\ufeff{}", r"my\.json:1: not valid JSON \(.*BOM"),
        ("[]", "not a plan"),
        ("{}", "not a plan"),
        ('{"format": "recjax-plan/2", "tables": {}}', 'needs "format": "recjax-plan/1"'),
        ('{"format": "recjax-plan/1", "tables": []}', 'and "tables"'),
        ('{"format": "recjax-plan/1", "tables": {}, "table": {}}', r"my\.json: unknown key 'table'; the keys are"),
        ('{"format": "recjax-plan/1", "tables": {"t": 1, "t": 2}}', "the key 't' stands twice"),
        (
            '{"format": "recjax-plan/1", "tables": {"t": []}}',
            r"my\.json, table 't': needs a list of one segment .* or several",
        ),
        ('{"format": "recjax-plan/1", "tables": {"t": ["row_wise"]}}', "a list of one segment"),
        ('{"format": "recjax-plan/1", "tables": {"t": {"placement": "row_wise"}}}', "a list of one segment"),
        (
            '{"format": "recjax-plan/1", "tables": {"t": [{"placement":"grid"}, {}]}}',
            "t', segment 2: placement is None",
        ),
        (plan_text(placment="row_wise"), r"table 't': unknown key 'placment'; the keys are placement, rows, columns"),
        (plan_text(placement="twrw"), "'twrw'; choose one of row_wise, table_wise"),
        (plan_text(placement=None), "placement is None; choose one of row_wise, table_wise"),
        (plan_text(placement=["row_wise"]), "choose one of row_wise, table_wise"),
        (plan_text(rows="hot"), 'rows=.hot. is neither "all" nor "rest" nor a set: {"ids": .3, 17.}'),
        (plan_text(columns="0:8"), "columns='0:8' is neither .* nor two numbers"),
        (plan_text(owners=[0, -1]), r"owners=\[0, -1\] is not a list of devices, as in \[0, 2\], nor"),
        (plan_text(owners=3), "owners=3 is not a list of devices"),
        (plan_text(placement="table_wise", owners=-1), "owners=-1 is not the number of a device"),
        (plan_text(placement="table_wise", owners="0"), "owners='0' is not the number of a device"),
        (plan_text(placement="table_wise", owners=True), "owners=True is not the number of a device"),
        (plan_text(placement="table_row_wise", owners=-1), "owners=-1 is not the number of a host"),
        (plan_text(placement="grid", owners=1), "owners=1, but a grid segment is on all devices; leave it at"),
        (plan_text(tier="host"), "tier='host' is not built yet; leave it at 'device'"),
        (plan_text(exchange="int4"), "exchange='int4' is neither one of float32, bfloat16, float16, int8 nor an obj"),
        (plan_text(exchange={"forward": ["int8"]}), r"exchange=\{'forward': \['int8'\]\} is neither one of float32"),
        (plan_text(exchange={"back": "int8"}), r"exchange=\{'back': 'int8'\} is neither .* \"forward\", \"backward\""),
        (plan_text(placement="data_parallel", exchange="int8"), 'exchanges no rows, .* Leave out "exchange", or place'),
        (plan_text(why=5), "why=5 is not a text"),
    ],
)
def test_a_file_that_is_not_a_plan_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        Plan.from_json(text, "my.json")


def test_auto_replicates_up_to_64_kib():
    at = TableSpec("at", AUTO_REPLICATE_BYTES // 4 // 16, 16, SGD)
    over = TableSpec("over", at.rows + 1, 16, SGD)
    plan = make_plan("auto", (at, over))
    assert at.rows * at.dim * 4 == 65536
    assert [plan.tables[t][0].placement for t in ("at", "over")] == ["data_parallel", "row_wise"]
    assert plan.tables["at"][0].why == "65,536 bytes: small enough to copy everywhere"
    assert plan.tables["over"][0].why == "65,600 bytes: over 65,536, so its rows are spread"


@pytest.mark.parametrize("choice", PLACEMENTS)
def test_a_placement_for_all_tables(choice):
    tables = (TableSpec("a", 10, 4, SGD), TableSpec("b", 10**6, 4, SGD))
    plan = make_plan(choice, tables)
    assert [s.placement for segments in plan.tables.values() for s in segments] == [choice, choice]
    assert list(plan.tables) == ["a", "b"]


def test_a_plan_file(tmp_path):
    tables = (TableSpec("a", 10, 4, SGD), TableSpec("b", 10, 4, SGD))
    plan = Plan({"b": (Segment("row_wise", why="ü"),), "a": (Segment("data_parallel"),)})
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json(), encoding="utf-8")
    assert make_plan(str(path), tables) == plan
    with pytest.raises(ConfigError, match=r"plan\.json: places the tables a, b, but the model has a\. Write a new"):
        make_plan(str(path), tables[:1])
    with pytest.raises(ConfigError, match="places the tables a, b, but the model has a, b, c"):
        make_plan(str(path), (*tables, TableSpec("c", 10, 4, SGD)))


def test_a_plan_that_cannot_be_read(tmp_path):
    tables = (TableSpec("a", 10, 4, SGD),)
    for choice in ("rowwise", str(tmp_path / "missing.json"), str(tmp_path)):
        with pytest.raises(
            ConfigError, match="no plan file of that name, and it is not one of auto, row_wise, table_wise"
        ):
            make_plan(choice, tables)
    (tmp_path / "binary").write_bytes(b"\xff\xfe{")
    with pytest.raises(ConfigError, match=r"binary: cannot be read \(.*utf-8.*permissions"):
        make_plan(str(tmp_path / "binary"), tables)
    with pytest.raises(ConfigError, match=r"cannot be read \(.*File name too long"):
        make_plan("x" * 5000, tables)


def test_a_table_may_ask_for_its_own_placement(tmp_path):
    a, b = TableSpec("a", 10, 4, SGD), TableSpec("b", 10**6, 4, SGD)
    own = dataclasses.replace(b, placement="column_wise")
    plan = make_plan("auto", (a, own))
    assert [plan.tables[t][0].placement for t in ("a", "b")] == ["data_parallel", "column_wise"]
    path = tmp_path / "plan.json"
    path.write_text(make_plan("row_wise", (a, b)).to_json())
    same = dataclasses.replace(a, placement="row_wise")
    assert make_plan(str(path), (same, b)) == make_plan(str(path), (a, b))
    with pytest.raises(ConfigError, match="places table 'b' row_wise, but its own setting says column_wise"):
        make_plan(str(path), (a, own))
