"""From a table to scores of new rows: the same scores whatever the file's format, and what is wrong with rows."""

import csv
import gzip
import json

import numpy as np
import pyarrow as pa
import pytest
from support import tables
from support.commands import assert_refused, inside

import recjax
from recjax.data.storage.blocks import open_prepared
from recjax.serving import rows, table_rows
from recjax.serving.faults import RowFaults

pytestmark = [pytest.mark.light_compile, pytest.mark.few_programs, pytest.mark.shared_programs]

SETTINGS = ("mesh.devices=1", "mesh.platform=cpu", "train.batch_size=64", "train.epochs=2", "embedding.dim=4")


def new_rows(lists=True):
    """Rows with a user, a kind and a tag that training lacks, and without a label."""
    table = tables.clicks(40, seed=1, lists=lists).drop_columns(["clicked", "when"])
    kind = pa.array(["never seen", *table["kind"].to_pylist()[1:]])
    return table.set_column(table.schema.names.index("kind"), "kind", kind)


def as_json(table, path):
    text = "".join(json.dumps(row) + "\n" for row in table.to_pylist())
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.fixture(scope="module")
def described(tmp_path_factory):
    """What the prepared clicks say of their columns."""
    folder = tmp_path_factory.mktemp("described")
    recjax.prepare(tables.clicks(), label="clicked", out=folder / "out", columns="auto,when:skip,paid:weight")
    return open_prepared(folder / "out").about["table"]


def read(file, described, faults=None, carry=()):
    return list(rows.read(file, "table", None, faults or RowFaults(), carry, described))


def plain(parts):
    """Features of all rows by value, None where missing."""
    found = []
    for part in parts:
        n = part.chunk.rows
        columns = {}
        for name, coded in part.chunk.columns.items():
            entries = [[*coded.values.tolist(), None][code] for code in coded.codes]
            ends = np.cumsum([1] * n if coded.lengths is None else coded.lengths)
            bags = [
                entries[end - length : end]
                for end, length in zip(ends, [1] * n if coded.lengths is None else coded.lengths, strict=True)
            ]
            columns[name] = bags if coded.lengths is not None else [bag[0] for bag in bags]
        for i in range(n):
            dense = [None if x != x else x for x in part.chunk.dense[i].tolist()]
            found.append((int(part.numbers[i]), {name: values[i] for name, values in columns.items()}, dense))
    return found


@pytest.mark.parametrize("form", ["parquet", "feather", "jsonl", "jsonl.gz"])
def test_rows_of_every_format_are_the_same(described, tmp_path, form):
    """Against the rows as Python has them. The column of weights is no feature, so rows need none."""
    table = new_rows().drop_columns(["paid"])
    path = tmp_path / f"rows.{form}"
    (as_json if "jsonl" in form else tables.write)(table, path)
    found = plain(read(path, described))
    truth = table.to_pylist()
    assert [number for number, _, _ in found] == list(range(1, 41))
    for (_, features, dense), row in zip(found, truth, strict=True):
        assert features == {
            "user": row["user"].encode(),
            "item_id": row["item_id"],
            "kind": row["kind"] and row["kind"].encode(),
            "tags": row["tags"] or [],
        }
        assert dense == [row["price"], *row["vector"]]


def test_columns_that_are_handed_on(described, tmp_path):
    table = new_rows()
    for path in (tables.write(table, tmp_path / "r.parquet"), as_json(table, tmp_path / "r.jsonl")):
        (part,) = read(path, described, carry=("kind", "tags"))
        assert part.carried == {"kind": table["kind"].to_pylist(), "tags": table["tags"].to_pylist()}
        (part,) = read(path, described, carry=None)
        assert list(part.carried) == table.schema.names and part.carried["price"] == table["price"].to_pylist()


WRONG = {
    "item_id": ("x", "not an integer of 64 bits"),
    "price": ("dear", "not a finite number"),
    "user": ("a" * 2000, "no text"),
}


@pytest.mark.parametrize("form", ["parquet", "jsonl", "csv"])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_is_named_or_its_row_left_out(tmp_path, form, name):
    recjax.prepare(tables.clicks(lists=False), "clicked", tmp_path / "out", columns="user:id,item_id:id,price:dense")
    described = open_prepared(tmp_path / "out").about["table"]
    table, (value, what) = new_rows(lists=False), WRONG[name]
    texts = [None if v is None else str(v) for v in table[name].to_pylist()]
    table = table.set_column(table.schema.names.index(name), name, pa.array([*texts[:4], value, *texts[5:]]))
    path = tmp_path / f"r.{form}"
    (as_json if form == "jsonl" else tables.write)(table, path)
    with pytest.raises(Exception, match=rf"r.{form}:5: row 5: column '{name}' is .*{what}.*on_error=skip"):
        read(path, described)
    faults = RowFaults(skip=True)
    found = plain(read(path, described, faults))
    assert [number for number, _, _ in found] == [n for n in range(1, 41) if n != 5] and faults.count == 1
    assert [f["user"].decode() for _, f, _ in found] == [u for i, u in enumerate(table["user"].to_pylist()) if i != 4]


def test_rows_in_another_encoding(described, tmp_path):
    """Named, read by the encoding that is named, or left out; JSON is UTF-8 always."""
    table = new_rows(lists=False)
    table = table.set_column(table.schema.names.index("user"), "user", pa.array(["u01", "ü2", "u03", *["ü2"] * 37]))
    wrong = json.loads(json.dumps(described)) | {
        "columns": [each for each in described["columns"] if each["name"] in ("user", "price")]
    }
    path = tables.write(table, tmp_path / "r.csv")
    truth = plain(read(path, wrong))
    path.write_bytes(path.read_text("utf-8").encode("cp1252"))
    with pytest.raises(Exception, match=r"r.csv:2: row 2: column 'user' is b'.xfc2', no text .*data.encoding=cp1252"):
        read(path, wrong)
    assert [number for number, _, _ in plain(read(path, wrong, RowFaults(skip=True)))] == [1, 3]
    assert plain(list(table_rows.read(path, wrong, RowFaults(), encoding="cp1252"))) == truth
    lines = as_json(table, tmp_path / "r.jsonl")
    lines.write_bytes(json.dumps(table.to_pylist()[1], ensure_ascii=False).encode("cp1252") + b"\n")
    with pytest.raises(Exception, match="r.jsonl:1"):
        read(lines, wrong)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": ...}, "the key 'kind' is missing.*with null"),
        ({"kind": ["a"]}, "'kind' is .*not one value"),
        ({"kind": {"a": 1}}, "'kind' is .*not one value"),
        ({"tags": 5}, "'tags' is 5, not a list"),
        ({"tags": [[5]]}, "'tags' is .*not a list of values"),
        ({"tags": ["x"]}, "column 'tags' is .*an entry that is not an integer"),
        ({"vector": [1.0]}, "column 'vector' is .*not a list of 2 finite numbers"),
        ({"vector": [1.0, 1e39]}, "column 'vector' is .*not a list of 2 finite numbers, each a number of float32"),
        ({"price": -1e300}, r"column 'price' is '-1e\+300', not a number of float32 .3.4e38 at most.\. Correct"),
        ({"item_id": 2**63}, "column 'item_id' is .*not an integer of 64 bits"),
        ({"item_id": 1.5}, "column 'item_id' is .*not an integer of 64 bits"),
    ],
)
def test_wrong_objects(described, tmp_path, change, message):
    row = new_rows().to_pylist()[3] | change
    row = {name: value for name, value in row.items() if value is not ...}
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(Exception, match=rf"r.jsonl:1: .*{message}"):
        read(path, described)
    assert read(path, described, RowFaults(skip=True)) == []


def test_null_and_integers_as_pandas_writes_them(described, tmp_path):
    row = dict.fromkeys(new_rows().schema.names) | {"item_id": 5.0, "tags": "1|2"}
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(row) + "\n")
    ((_, features, dense),) = plain(read(path, described))
    assert features == {"user": None, "item_id": 5, "kind": None, "tags": [1, 2]} and dense == [None] * 3


def test_files_that_lack_a_column(described, tmp_path):
    path = tables.write(new_rows().rename_columns({"item_id": "itemid"}), tmp_path / "r.parquet")
    with pytest.raises(Exception, match="r.parquet has no column 'item_id'. Did you mean 'itemid'"):
        read(path, described)
    with pytest.raises(Exception, match="r.parquet has no column 'x'"):
        read(tables.write(new_rows(), path), described, carry=("x",))
    (tmp_path / "r.xlsx").write_text("")
    with pytest.raises(Exception, match="r.xlsx: rows of a table are read from Parquet"):
        list(table_rows.read(tmp_path / "r.xlsx", described, RowFaults()))


@pytest.mark.full
def test_from_a_file_to_scores_in_two_commands(tmp_path, monkeypatch):
    """And the run folder is good from another folder, when the file and the cache are gone."""
    monkeypatch.setenv("RECJAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    tables.write(tables.clicks(3000, lists=False), tmp_path / "clicks.csv")
    command = ("train", "table", "data.from=clicks.csv", "data.label=clicked", *SETTINGS)
    done = inside(*command, "--json")
    summary = done.result
    run = tmp_path / summary["out"]
    assert run.name.startswith("table-dcnv2-") and 0.55 < summary["eval"]["auc"] < 0.95
    assert 0.55 < summary["references"]["naive Bayes"] < 0.95
    assert "columns=auto takes the columns so:" in done.err
    assert inside(*command, "--json").result["out"] == summary["out"]
    tables.write(tables.clicks(600, seed=5, lists=False), tmp_path / "other.csv")
    assert inside("show", "table", "data.from=other.csv", "data.label=clicked", *SETTINGS[1:], "--json").status == 0

    table = new_rows(lists=False)
    scores = []
    for form in ("parquet", "csv", "jsonl"):
        (as_json if form == "jsonl" else tables.write)(table, tmp_path / f"new.{form}")
        done = inside("predict", run, "--input", f"new.{form}", "--out", "scores.csv", "--columns", "user", "--json")
        assert done.result["rows"] == 40
        scores.append((tmp_path / "scores.csv").read_text())
    assert scores[0] == scores[1] == scores[2]
    lines = list(csv.DictReader(scores[0].splitlines()))
    assert [line["user"] for line in lines] == table["user"].to_pylist()
    found = recjax.predict(run, table, tmp_path / "from_python.csv", columns="user")
    assert (tmp_path / "from_python.csv").read_text() == scores[0] and found["input"] == "the table"

    (tmp_path / "head.csv").write_text((tmp_path / "new.csv").read_text().partition("\n")[0] + "\n")
    assert_refused(inside("predict", run, "--input", "head.csv", "--out", "none.csv"), 3, r"head\.csv has no row")
    assert not (tmp_path / "none.csv").exists()

    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.chdir(other)
    assert inside("eval", run, "--json").result["auc"] == summary["eval"]["auc"]
    tables.write(tables.clicks(600, seed=5, lists=False), tmp_path / "clicks.csv")
    assert_refused(inside("eval", run), 3, "other vocabularies|other values|fingerprint")
    (tmp_path / "clicks.csv").unlink()
    assert_refused(inside("eval", run), 3, "clicks.csv does not exist")
    assert inside("predict", run, "--input", tmp_path / "new.csv", "--out", "s.csv", "--columns", "user").status == 0
    assert (other / "s.csv").read_text() == scores[0]


@pytest.mark.full
def test_rows_to_score_are_in_the_encoding_that_trained_or_in_one_that_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("RECJAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    for name, encoding in (("windows.csv", "cp1252"), ("utf8.csv", "utf-8")):
        path = tables.write(tables.clicks(600, lists=False), tmp_path / name)
        path.write_bytes(path.read_text("utf-8").encode(encoding))
    data = ("data.from=windows.csv", "data.label=clicked", "data.columns=user:id,kind:id,price:dense")
    assert_refused(inside("train", "table", *data, *SETTINGS, "--out", "run"), 3, "data.encoding=cp1252")
    done = inside("train", "table", *data, "data.encoding=cp1252", *SETTINGS, "--out", "run", "--json")
    assert done.status == 0, done.err
    for name, more in (("windows", ()), ("utf8", ("data.encoding=utf-8",))):
        command = ("predict", "run", "--input", f"{name}.csv", "--out", f"{name}.scores.csv", "--columns", "kind")
        assert inside(*command, *more).status == 0
    scores = (tmp_path / "windows.scores.csv").read_text()
    assert 'say ""é""' in scores and (tmp_path / "utf8.scores.csv").read_text() == scores
    aucs = [
        inside("eval", "run", "--input", f"{name}.csv", *more, "--json").result["auc"]
        for name, more in (("windows", ()), ("utf8", ("data.encoding=utf-8",)))
    ]
    assert aucs[0] == aucs[1]


@pytest.mark.full
def test_a_run_on_several_files_is_good_from_another_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("RECJAX_CACHE", str(tmp_path / "cache"))
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.chdir(home)
    for part in range(2):
        tables.write(tables.clicks(300, seed=part), home / f"part-{part}.parquet")
    tables.write(tables.clicks(200, seed=9), home / "last.parquet")
    data = ("data.from=part-*.parquet", "data.test=last.parquet", "data.label=clicked")
    done = inside("train", "table", *data, *SETTINGS, "--out", "run", "--json")
    assert done.result["eval"]["samples"] == 200
    monkeypatch.chdir(tmp_path)
    assert inside("eval", "home/run", "--json").result["auc"] == done.result["eval"]["auc"]


@pytest.mark.full
def test_in_python_with_lists_and_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recjax.prepare(tables.clicks(600), label="clicked", out="prepared", split="time", time="when")
    config = recjax.load("table", {"data.path": "prepared"}, *SETTINGS)
    summary = recjax.fit(config, "run")
    assert np.isfinite(summary["eval"]["auc"])
    assert recjax.predict("run", new_rows(), "scores.jsonl")["rows"] == 40
    assert inside("eval", "run", "--by", "kind", "--json").status == 0
