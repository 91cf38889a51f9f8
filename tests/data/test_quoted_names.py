"""Columns whose names hold what separates: what recjax prints is accepted when it is pasted into a shell."""

import re
import shlex

import numpy as np
import pyarrow as pa
import pytest
from support import tables
from support.commands import assert_refused, inside

import recjax
from recjax.data.datasets.own_table import Table, open_raw, prepare_table
from recjax.data.storage.blocks import open_prepared
from recjax.errors import ConfigError

NAMES = ("a,b", "x:jagged", 'say "hi", you', "(open", "it's $HOME", "list(a,b)", "[0]", "p*q", "n>=2", " edge ")


def strange(rows=200):
    rng = np.random.default_rng(0)
    columns = {name: pa.array([f"w{i}" for i in rng.integers(0, 9, rows)]) for name in NAMES}
    columns["stars, of five"] = pa.array([str(i) for i in 1 + np.arange(rows) % 5])
    return pa.table(columns)


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("RECJAX_CACHE", str(tmp_path / "cache"))
    return tables.write(strange(), tmp_path / "strange.csv")


def pasted(text, after):
    """The words that a shell makes of the end of a line; the hint is the first."""
    return shlex.split(text[text.index(after) + len(after) :].splitlines()[0])[0]


def test_the_hint_is_accepted_when_it_is_pasted(file, tmp_path):
    command = ("data", "prepare", "table", "--from", file, 'label="stars, of five":number')
    first = inside(*command, "--out", tmp_path / "first")
    assert first.status == 0, first.err
    hint = pasted(first.err, "start from ")
    assert hint.startswith("columns=")
    again = inside(*command, hint, "--out", tmp_path / "again")
    assert again.status == 0, again.err
    sources = [open_prepared(tmp_path / name) for name in ("first", "again")]
    assert [feature.name for feature in sources[0].schema.features] == list(NAMES)
    assert sources[0].fingerprint == sources[1].fingerprint


def test_the_hint_of_train_is_accepted_by_train_and_kept_in_its_config(file, tmp_path):
    first = recjax.load("table", f"data.from={file}", 'data.label="stars, of five":number')
    found = inside("data", "info", "table", f"from={file}", 'label="stars, of five":number')
    columns = pasted(found.err, "start from ")
    again = recjax.override(first, f"data.{columns}")
    assert again.data.open().fingerprint == first.data.open().fingerprint
    assert recjax.override(first, {"data.columns": list(again.data.columns)}) == again


def test_python_is_told_what_python_reads(file, tmp_path, capsys):
    recjax.prepare(strange(), '"stars, of five":number', tmp_path / "first")
    (hint,) = re.findall(r"start from columns=(\".*\")$", capsys.readouterr().err, re.MULTILINE)
    columns = re.sub(r"\\(.)", r"\1", hint[1:-1])
    recjax.prepare(strange(), '"stars, of five":number', tmp_path / "again", columns=columns)
    sources = [open_prepared(tmp_path / name) for name in ("first", "again")]
    assert sources[0].fingerprint == sources[1].fingerprint


def test_a_column_that_cannot_be_as_it_was_asked_is_named_as_a_shell_takes_it(file, tmp_path):
    command = ("data", "prepare", "table", "--from", file, 'label="stars, of five":number', "--out", tmp_path / "out")
    refused = assert_refused(inside(*command, 'columns=auto,"a,b":id:bucket=3'), 3, "column 'a,b' holds text, which")
    instead = pasted(refused.replace(".", " "), "Give it as ")
    assert instead == '"a,b":id'
    assert inside(*command, f"columns=auto,{instead}").status == 0


def test_a_column_that_may_have_been_meant_as_numbers_is_named_as_a_shell_takes_it(tmp_path):
    """What the warning tells to do is done: left out are the rows of the word, or each number is an id."""
    prices = [f"{i}.25" for i in range(60)]
    path = tables.write(pa.table({"a,b": [*prices, "soon"], "y": ["0", "1"] * 30 + ["0"]}), tmp_path / "t.csv")
    command = ("data", "prepare", "table", "--from", path, "label=y")
    warned = inside(*command, "--out", tmp_path / "out")
    assert warned.status == 0
    (warning,) = [line for line in warned.err.splitlines() if line.startswith("warning: a,b is text")]
    where, dense, ids = (shlex.split(hint)[0] for hint in re.findall(r"'(?:where|columns)=.*?'", warning))
    told = ['where="a,b"!=VALUE', 'columns=auto,"a,b":dense', 'columns=auto,"a,b":id']
    assert [where, dense, ids] == told
    done = inside(*command, where.replace("VALUE", "soon"), dense, "--out", tmp_path / "dense")
    assert done.status == 0 and open_prepared(tmp_path / "dense").schema.dense == ("a,b",)
    done = inside(*command, ids, "--out", tmp_path / "ids")
    assert done.status == 0 and [each.name for each in open_prepared(tmp_path / "ids").schema.features] == ["a,b"]


def test_a_column_of_unlike_types_is_left_out_as_the_refusal_tells(tmp_path):
    (tmp_path / "in").mkdir()
    for name, values in (("a", ["v", "w"] * 4), ("b", [1, 2] * 4)):
        tables.write(pa.table({"a,b": values, "c": ["x"] * 8, "y": [0, 1] * 4}), tmp_path / f"in/{name}.parquet")
    command = ("data", "prepare", "table", "--from", tmp_path / "in", "label=y", "--out", tmp_path / "out")
    refused = assert_refused(inside(*command, 'columns=c:id,"a,b":id'), 3, "column 'a,b' holds text in .*a.parquet")
    instead = pasted(refused.removesuffix("."), "or leave it out: ")
    assert instead == '"a,b":skip'
    assert inside(*command, f"columns=c:id,{instead}").status == 0


def test_a_value_that_a_condition_cannot_compare_is_left_out_as_the_refusal_tells(tmp_path):
    table = {"a,b": ["1", "2", "3", "cheap"] * 5, "c": ["x", "z"] * 10, "y": ["0", "0", "1", "0"] * 5}
    path = tables.write(pa.table(table), tmp_path / "t.csv")
    command = ("data", "prepare", "table", "--from", path, "label=y", "columns=c:id", "--out", tmp_path / "out")
    refused = assert_refused(inside(*command, 'where="a,b">1'), 3, "'cheap', not a number that the condition")
    instead = pasted(refused.removesuffix("."), "such as ")
    assert instead == 'where="a,b"!=VALUE,"a,b">1'
    assert inside(*command, instead.replace("VALUE", "cheap"), "--json").result["rows"]["train"] > 0


def test_labels_conditions_and_crosses(file, tmp_path):
    """The first condition keeps one value of nine; the label's threshold is on a column with a comma."""
    config = Table(
        label='"stars, of five":threshold=4,"a,b":class',
        columns=('"x:jagged":id', '"p*q":id', '"p*q"*"x:jagged":cross'),
        where=('"n>=2"="w3"|w4', "(open!=w1"),
    )
    source = prepare_table(config, open_raw(config, file), tmp_path / "out")
    assert source.about["table"]["columns"][-1]["sources"] == ["p*q", "x:jagged"]
    table = strange().to_pylist()
    rows = [row for row in table if row["n>=2"] in ("w3", "w4") and row["(open"] != "w1"]
    assert 0 < len(rows) == sum(source.row_counts(split).sum() for split in ("train", "validation", "test"))
    assert [label.name for label in source.schema.labels] == ["stars, of five", "a,b"]
    (chunk,) = open_raw(config, file).chunks(0)
    truth = [row["stars, of five"] >= "4" for row, at in zip(rows, chunk.split, strict=True) if at == 0]
    np.testing.assert_array_equal(source.read("train", 0).labels[:, 0], truth)


def test_a_single_label_with_a_comma(file, tmp_path):
    command = ("data", "prepare", "table", "--from", file, "--out", tmp_path / "out")
    assert_refused(inside(*command, "label=stars, of five"), 2, "label: .* has no column 'stars'")
    assert inside(*command, 'label="stars, of five"', "threshold=3").status == 0
    assert open_prepared(tmp_path / "out").about["label"] == "stars, of five >= 3"


@pytest.mark.parametrize(
    ("columns", "status", "pattern"),
    [
        ('"a,b:id', 2, "a double quote opens before 'a,b:id' and is not closed"),
        ('"a,b"', 2, "is not COLUMN:ROLE"),
        ("hist:list(,age)", 2, "each once: hist:list"),
        ("a,b:id", 2, "'a' is not COLUMN:ROLE .* A name with a comma or colon stands in double quotes"),
    ],
)
def test_what_is_refused(file, tmp_path, columns, status, pattern):
    command = ("data", "prepare", "table", "--from", file, "label=x", "--out", tmp_path / "out")
    assert_refused(inside(*command, f"columns={columns}"), status, pattern)


def test_names_with_colons_need_no_quotes_as_before():
    columns = ("x:jagged:id", "a:b:dense:log1p", 'y"z:skip', "f(x:id")
    assert list(open_asked(columns)) == ["x:jagged", "a:b", 'y"z', "f(x"]
    with pytest.raises(ConfigError, match="It is there twice"):
        open_asked(('"x:jagged":id', "x:jagged:id"))


def open_asked(columns):
    from recjax.data.arrow import roles

    return roles.parse(columns)[1]
