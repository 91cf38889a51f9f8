"""Plan files and their refusals, and the plans that a name or a table's own setting makes."""

import dataclasses
import hashlib
import json
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import damage

from recjax.embedding.optim import RowWiseAdagrad, Sgd
from recjax.embedding.plan import AUTO_REPLICATE_BYTES, Plan, make_plan, self_contained
from recjax.embedding.segment import PLACEMENTS, Exchange, RowIds, Segment
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


def test_features_whose_rows_travel_stand_in_the_file():
    segment = Segment("table_wise", exchange=Exchange(kind="pooled"), rows_of=("a", "b"))
    plan = Plan({"t": (segment,)})
    text = plan.to_json()
    assert json.loads(text)["tables"]["t"][0]["rows_of"] == ["a", "b"]
    assert Plan.from_json(text) == plan
    assert "pooled but for rows of a, b" in plan._repr_html_()


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


SPLIT = """{
  "format": "recjax-plan/1",
  "tables": {
    "t": [
      {"rows": {"ids": [17, 3]}, "placement": "data_parallel"},
      {"rows": "rest", "columns": [0, 8], "placement": "table_wise", "owners": 0},
      {"rows": "rest", "columns": [8, 16], "placement": "row_wise", "owners": [2, 1], "exchange": "int8"}
    ]
  }
}"""
SPLIT_PLAN = Plan(
    {
        "t": (
            Segment("data_parallel", RowIds((3, 17))),
            Segment("table_wise", "rest", (0, 8), 0),
            Segment("row_wise", "rest", (8, 16), (2, 1), exchange=Exchange("int8", "int8")),
        )
    }
)


def test_segments_by_hand():
    assert Plan.from_json(SPLIT) == SPLIT_PLAN == Plan.from_json(SPLIT_PLAN.to_json())
    written = SPLIT_PLAN.to_json().splitlines()
    assert '          "ids": [3, 17]' in written  # numbers on one line, as people write them
    assert '        "columns": [8, 16],' in written
    assert '        "owners": [2, 1],' in written
    spaced = Plan({"t": (Segment("row_wise", why="[\n  1,\n  2\n]"),)})
    assert Plan.from_json(spaced.to_json()) == spaced


@pytest.fixture(params=["hot.txt", "hot.npy"])
def id_file(tmp_path, request):
    """A file that holds the ids 40, 3 and 17."""
    path = tmp_path / request.param
    if path.suffix == ".npy":
        np.save(path, np.array([40, 3, 17], np.int32))
    else:
        path.write_text("40\n3\n17\n")
    return path


def test_ids_may_stand_in_a_file(id_file, tmp_path, monkeypatch):
    segments = [
        {"placement": "data_parallel", "rows": {"ids": id_file.name}},
        {"placement": "row_wise", "rows": "rest"},
    ]
    plan_file = tmp_path / "plan.json"
    plan_file.write_text(json.dumps({"format": "recjax-plan/1", "tables": {"t": segments}}))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    tables = (TableSpec("t", 41, 4, SGD),)
    plan = make_plan(str(plan_file), tables)
    sha256 = hashlib.sha256(id_file.read_bytes()).hexdigest()
    assert plan.tables["t"][0].rows == RowIds((3, 17, 40), id_file.name, sha256)
    text = plan.to_json()
    assert json.loads(text)["tables"]["t"][0]["rows"] == {"ids": id_file.name, "sha256": sha256}
    assert Plan.from_json(text, folder=tmp_path) == plan

    kept = self_contained(plan_file)
    plan_file.write_text(text)  # with the hash of what was read
    id_file.write_bytes(b"3\n17\n" if id_file.suffix == ".txt" else id_file.read_bytes().replace(b"\x11", b"\x12"))
    with pytest.raises(ConfigError, match=f"{id_file.name} is not what it was .* {sha256!r}. Restore"):
        make_plan(str(plan_file), tables)
    assert Plan.from_json(kept.decode()) == plan.without_files()
    assert plan.without_files().tables["t"][0].rows == RowIds((3, 17, 40))


def test_a_plan_without_files_is_kept_as_it_is(tmp_path):
    (tmp_path / "plan.json").write_text(SPLIT)
    assert self_contained(tmp_path / "plan.json") == SPLIT.encode()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "hot.txt",
            None,
            r"my\.json, table 't': the ids in .*hot\.txt cannot be read: No such file .*\. Give",
        ),
        ("hot.txt", b"", "hot.txt holds no id"),
        ("hot.txt", b"3\n\n17\n", "line 2 is no id"),
        ("hot.txt", b"3\n-17\n", "line 2 is no id"),
        ("hot.txt", b"user\n3\n", "line 1 is no id"),
        ("hot.txt", b"9" * 5000, "line 1 is no id"),
        ("hot.txt", b"3\n\x1f17\n", "line 2 is no id"),  # which Python's strip takes for white space, and its int not
        ("hot.txt", "３".encode(), "line 1 is no id"),
        ("hot.txt", b"3\n17\n3\n", "hot.txt names an id twice"),
        ("hot.npy", b"3\n17\n", "cannot be read: it is a file of another kind"),
        ("hot.npy", b"\x93NUMPY", "hot.npy cannot be read"),
        ("hot.npy", damage.NPY_OF_PYTHON_2, "hot.npy cannot be read: NumPy cannot read it"),
        ("hot.npy", np.array([[3, 17]]), "it holds no one-dimensional array of integers"),
        ("hot.npy", np.array([3.0, 17.0]), "it holds no one-dimensional array of integers"),
        ("hot.npy", np.array([3, None]), "cannot be read: NumPy cannot read it"),
        ("hot.npy", np.array([3, -17]), "a number in hot.npy is no id"),
        (".", None, "it is no regular file"),
    ],
)
def test_files_without_ids_are_refused(tmp_path, name, content, message):
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    elif content is not None:
        np.save(tmp_path / name, content)
    with pytest.raises(ConfigError, match=message):
        Plan.from_json(plan_text(rows={"ids": name}), "my.json", tmp_path)


@pytest.mark.parametrize(
    "name", ["{}/secret.txt", "../secret.txt", "sub/../../secret.txt", "link.txt", "up/secret.txt"]
)
@pytest.mark.parametrize("content", ["hunter2\n", "3\n17\n"])
def test_files_of_ids_stay_inside_the_folder_of_the_plan(tmp_path, name, content):
    """Whoever wrote the plan may name any file; neither its content nor whether there is one is for him to learn."""
    folder = tmp_path / "plans"
    (folder / "sub").mkdir(parents=True)
    (tmp_path / "secret.txt").write_text(content)
    (folder / "link.txt").symlink_to(tmp_path / "secret.txt")
    (folder / "up").symlink_to(tmp_path, target_is_directory=True)
    with pytest.raises(ConfigError, match=r"table 't': the ids in .* not stay inside the plan file's folder") as told:
        Plan.from_json(plan_text(rows={"ids": name.format(tmp_path)}), "my.json", folder)
    assert not {"hunter2", "17"} & {*str(told.value).replace("'", " ").split()}
    with pytest.raises(ConfigError, match="does not stay inside"):
        Plan.from_json(plan_text(rows={"ids": "~/.profile"}), "my.json", folder)
    (tmp_path / "linked").symlink_to(folder, target_is_directory=True)  # the folder itself may be a link
    (folder / "sub/hot.txt").write_text("3\n17\n")
    plan = Plan.from_json(plan_text(rows={"ids": "sub/hot.txt"}), "my.json", tmp_path / "linked")
    assert plan.tables["t"][0].rows.ids == (3, 17)


@pytest.mark.parametrize("name", ["words.txt", "words.npy", "header.npy"])
def test_no_message_holds_what_a_file_of_ids_holds(tmp_path, name):
    (tmp_path / "words.txt").write_text("hunter2\n")
    (tmp_path / "words.npy").write_text("hunter2\n")
    (tmp_path / "header.npy").write_bytes(b"\x93NUMPY\x01\x00\x10\x00{'hunter2': 7}   \n")
    with pytest.raises(ConfigError, match=f"the ids in .*{name} cannot be read") as told:
        Plan.from_json(plan_text(rows={"ids": name}), "my.json", tmp_path)
    assert "hunter2" not in str(told.value)


def test_a_pipe_of_ids_is_refused(tmp_path):
    os.mkfifo(tmp_path / "hot.txt")
    with pytest.raises(ConfigError, match="it is no regular file"):
        Plan.from_json(plan_text(rows={"ids": "hot.txt"}), "my.json", tmp_path)


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
        (plan_text(rows={"ids": []}), "A set has at least one id"),
        (plan_text(rows={"ids": [3, "17"]}), "'17' in a set of rows is no id, which is an integer, 0 or more"),
        (plan_text(rows={"ids": [3, -1]}), "-1 in a set of rows is no id"),
        (plan_text(rows={"ids": [3, True]}), "True in a set of rows is no id"),
        (plan_text(rows={"ids": [3, 17, 3]}), "a set of rows names id 3 twice"),
        (plan_text(rows={"ids": [3], "sha256": "ab"}), 'nor a set: .*"FILE"}, with "sha256" if you like'),
        (plan_text(rows={"hot": [3]}), "rows={'hot': .3.} is neither"),
        (plan_text(rows=[3]), r"rows=\[3\] is neither"),
        (plan_text(columns=[0, 8, 16]), r"columns=\[0, 8, 16\] is neither"),
        (plan_text(columns=[0, 8.0]), r"columns=\[0, 8.0\] is neither"),
        (plan_text(columns=[-8, 8]), r"columns=\[-8, 8\] is neither"),
        (plan_text(owners=[]), r"owners=\[\] is not a list of devices"),
        (plan_text(placement="table_wise", owners=[0]), r"owners=\[0\] is not the number of a device"),
        (plan_text(placement="data_parallel", owners=[0, 1]), "a data_parallel segment is on all devices"),
        (plan_text(exchange={"kind": "int8"}), "exchange={'kind': 'int8'} is neither .* \"kind\" one of rows, pooled"),
        (plan_text(tier="host"), "tier='host' is not built yet; leave it at 'device'"),
        (plan_text(exchange="int4"), "exchange='int4' is neither one of float32, .*, float8_e5m2 nor an obj"),
        (plan_text(exchange={"forward": ["int8"]}), r"exchange=\{'forward': \['int8'\]\} is neither one of float32"),
        (plan_text(exchange={"back": "int8"}), r"exchange=\{'back': 'int8'\} is neither .* \"forward\", \"backward\""),
        (plan_text(placement="data_parallel", exchange="int8"), 'exchanges no rows, .* Leave out "exchange", or place'),
        (plan_text(why=5), "why=5 is not a text"),
        (plan_text(rows_of="a"), "rows_of='a' is not a list of names of features"),
        (plan_text(exchange={"kind": "pooled"}, rows_of=["a", "a"]), "is not a list of names of features"),
        (plan_text(rows_of=["a"]), '"rows_of" names features whose rows travel .*"kind": "pooled"'),
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
            ConfigError, match="no plan file of that name, and it is not one of auto, balanced, row_wise, table_wise"
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


def test_pieces_are_the_runs_and_not_a_plans(tmp_path):
    """So that a plan file, and the plan that a run folder has, goes with any number of them."""
    table, cut = TableSpec("t", 100_000, 16, SGD), Exchange("int8", "int8", "auto", 4)
    plan = make_plan("row_wise", (table,), cut)
    assert plan == make_plan("row_wise", (table,), Exchange("int8", "int8"))
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json())
    assert "pieces" not in path.read_text() and make_plan(str(path), (table,), cut) == plan
    path.write_text(plan.to_json().replace('"kind"', '"pieces": 4, "kind"'))
    with pytest.raises(ConfigError, match="neither one of float32"):
        make_plan(str(path), (table,))
    with pytest.raises(ConfigError, match="pieces is 0; it must be 1 to 8"):
        Exchange(pieces=0)


def test_settings_hold_for_every_segment_of_a_table(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(SPLIT)
    table = TableSpec("t", 100, 16, SGD)
    assert make_plan(str(path), (table,)) == SPLIT_PLAN
    with pytest.raises(ConfigError, match="places table 't' data_parallel, but its own setting says row_wise"):
        make_plan(str(path), (dataclasses.replace(table, placement="row_wise"),))
    with pytest.raises(ConfigError, match="exchanges rows of table 't' in float32 and .* says int8 and int8"):
        make_plan(str(path), (table,), Exchange("int8", "int8"))
    path.write_text(SPLIT.replace('"owners": 0', '"owners": 0, "exchange": "int8"'))
    make_plan(str(path), (table,), Exchange("int8", "int8"))
    with pytest.raises(ConfigError, match=r"plan\.json, table 't': columns \[8, 16\) of segment 3 go beyond the 12"):
        make_plan(str(path), (dataclasses.replace(table, dim=12),))
