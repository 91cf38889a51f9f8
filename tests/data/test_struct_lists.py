"""Lists of structures, and lists that belong together, from every format that can hold them; and mistakes."""

import json
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pyarrow.orc
import pyarrow.parquet
import pytest

from recjax.data.arrow import scan
from recjax.data.batch import ElementGroup
from recjax.data.datasets.own_table import Table, prepare_files
from recjax.errors import ConfigError, DataError

ROWS: list[dict[str, Any]] = [
    {"y": 0, "hist": [{"item": 5, "kind": "a"}, {"item": 6, "kind": None}]},
    {"y": 1, "hist": []},
    {"y": 0, "hist": None},
    {"y": 1, "hist": [{"item": 5, "kind": "b"}]},
]
APART = [{"y": row["y"], **{k: [e[k] for e in row["hist"] or []] for k in ("item", "kind")}} for row in ROWS]
CONFIG = Table(label="y", columns=("hist:list(item,kind)",), split="random:1,0,0")


def write(rows, path):
    table = pa.Table.from_pylist(rows)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path)
    elif path.suffix == ".orc":
        pyarrow.orc.write_table(table, path)
    elif path.suffix == ".feather":
        pyarrow.feather.write_feather(table, path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("ending", ["parquet", "orc", "feather", "jsonl", "ndjson"])
@pytest.mark.parametrize("rows", [ROWS, APART])
def test_groups_by_hand(tmp_path, ending, rows):
    source = prepare_files(CONFIG, write(rows, tmp_path / f"t.{ending}"), tmp_path / "out")
    names = ("hist.item", "hist.kind") if rows is ROWS else ("item", "kind")
    assert source.schema.groups == (ElementGroup("hist", names, ("", "")),)
    block = source.read("train", 0)
    item, kind = (block.bags[name] for name in names)
    assert item.lengths.tolist() == kind.lengths.tolist() == [2, 0, 0, 1]
    assert item.ids.tolist() == [1, 2, 1]  # 5 is more frequent than 6
    a, missing, b = kind.ids.tolist()
    assert len({a, missing, b}) == 3 and missing == 1  # which has a row of its own


def test_columns_in_any_order_and_number(tmp_path):
    rows = [row | {"x": [n, n]} for n, row in enumerate(ROWS)]
    (file,) = scan.find(write(rows, tmp_path / "t.parquet"))
    assert scan.schema(file).names == ["y", "hist.item", "hist.kind", "x"]
    (batch,) = scan.batches(file, ["x", "hist.kind", "y"])
    expected = {"x": [[n, n] for n in range(4)], "hist.kind": [["a", None], [], None, ["b"]], "y": [0, 1, 0, 1]}
    assert batch.to_pydict() == expected


@pytest.mark.parametrize(
    ("columns", "table", "error", "words"),
    [
        (
            ["hist:list(item,kind)"],
            [*APART, {"y": 0, "item": [1, 2], "kind": ["a"]}],
            DataError,
            r"t.parquet row 5: column 'kind' is \['a'\], a list of another length than that of 'item', which hist:list",
        ),
        (["hist:list(item,when)"], ROWS, ConfigError, r"has no column 'hist.when'.* Its columns are 'y', 'hist.item'"),
        (["hist:list(item)", "item:jagged"], APART, ConfigError, r"'item' is there twice: in hist:list\(...\), and by"),
        (["hist:list(y)"], APART, ConfigError, r"hist:list\(...\) has nothing but labels"),
    ],
)
def test_mistakes(tmp_path, columns, table, error, words):
    config = Table(label="y", columns=tuple(columns), split=CONFIG.split)
    with pytest.raises(error, match=words):
        prepare_files(config, write(table, tmp_path / "t.parquet"), tmp_path / "out")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"y": 1, "hist": [', r"t.jsonl:5: the line is no JSON \(.*\): '\{\"y\": 1, \"hist\": \[' ?"),
        ("[1, 2]", r"t.jsonl:5: the line is \[1, 2\], not an object"),
        ('{"y": 1, "hist": 3}', r"t.jsonl cannot be read as JSON Lines \(.*hist.*Write each field with values of one"),
    ],
)
def test_mistakes_in_json_lines(tmp_path, line, words):
    path = write(ROWS, tmp_path / "t.jsonl")
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(DataError, match=words):
        prepare_files(CONFIG, path, tmp_path / "out")


def test_a_field_that_comes_late(tmp_path, monkeypatch):
    monkeypatch.setattr(scan, "_BLOCK_BYTES", 64)
    path = write([{"y": n % 2, "x": n} for n in range(20)] + [{"y": 1, "late": 3}], tmp_path / "t.jsonl")
    with pytest.raises(DataError, match=r"t.jsonl:21: the field 'late' is not in the first rows of the file"):
        prepare_files(Table(label="y", columns=("x:id",)), path, tmp_path / "out")
