"""Tables from Python: whatever hands out Arrow batches, and dicts of arrays, become the data that a file would give."""

import datetime

import numpy as np
import pyarrow as pa
import pytest
from support import tables

import recjax
from recjax.data.arrow.spool import spool
from recjax.errors import ConfigError, DataError


class Stream:
    """The protocol alone, as any library may have it."""

    def __init__(self, table):
        self._table = table

    def __arrow_c_stream__(self, requested_schema=None):
        return self._table.__arrow_c_stream__(requested_schema)


def as_dict(table):
    """NumPy arrays; objects with None for text, NaN for numbers, and [n, 2] for the vector."""
    found = {name: table[name].to_numpy() for name in table.schema.names if name not in ("tags", "vector")}
    return found | {"tags": table["tags"].to_pylist(), "vector": np.array(table["vector"].to_pylist(), np.float32)}


def by_library(name):
    def convert(table):
        library = pytest.importorskip(name)
        if name == "pandas":
            return table.to_pandas()
        if name == "polars":
            return library.from_arrow(table)
        if name == "duckdb":
            clicks = table  # by whose name DuckDB finds it
            return library.sql("select * from clicks") if clicks else None
        return library.Dataset(table)

    return convert


MAKE = {
    "table": lambda table: table,
    "reader": lambda table: table.to_reader(max_chunksize=70),  # which can be read once
    "stream": Stream,
    "dict": as_dict,
    **{name: by_library(name) for name in ("pandas", "polars", "duckdb", "datasets")},
}


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    folder = tmp_path_factory.mktemp("truth")
    path = tables.write(tables.clicks(), folder / "t.parquet")
    return recjax.prepare(path, label="clicked", out=folder / "out")


@pytest.mark.parametrize("kind", MAKE)
def test_the_same_rows_are_the_same_data(truth, tmp_path, kind):
    made = recjax.prepare(MAKE[kind](tables.clicks()), label="clicked", out=tmp_path / "out")
    assert made == truth | {"path": str(tmp_path / "out")}
    assert [file.name for file in tmp_path.iterdir()] == ["out"]  # nothing of the file between is left


def test_settings_as_elsewhere_in_python(truth, tmp_path):
    table = tables.clicks()
    made = recjax.prepare(
        table,
        "clicked",
        tmp_path / "a",
        {"ids.min_count": 3},
        columns=["user:id", "price:dense"],
        split="time",
        time="when",
    )
    assert made["rows"] == {"train": 240, "validation": 30, "test": 30}
    apart = recjax.prepare(table.slice(0, 200), "clicked", tmp_path / "b", test=Stream(table.slice(200)))
    assert apart["rows"]["test"] == 100 and 0 < apart["rows"]["validation"] < 40
    with pytest.raises(DataError, match="already holds prepared data of other content"):
        recjax.prepare(table.slice(1), "clicked", tmp_path / "a")
    recjax.prepare(table.slice(1), "clicked", tmp_path / "a", overwrite=True)
    opened = recjax.load("table", {"data.path": tmp_path / "b"}).data.open()
    assert opened.fingerprint == apart["fingerprint"]
    assert opened.about["files"].keys() == {"the table", "the test table"}


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (5, DataError, "the table is of the type int, which hands out no Arrow batches"),
        (None, DataError, "the table is of the type NoneType"),
        ({"clicked": [0, 1], "x": [1]}, DataError, "the table is no table that Arrow takes"),
        ({"clicked": [0, 1], "x": [1, "a"]}, DataError, "the table is no table that Arrow takes"),
        ({"train": pa.table({"clicked": [0]})}, DataError, "a dict of tables .'train' is one.*validation= and test="),
        ({"clicked": [0, 2], "x": [1, 2]}, DataError, "the table row 2: the label 'clicked' is 2"),
        ({"clicked": [0, 1]}, ConfigError, "no column of the table is left as a feature"),
        ({"y": [0, 1]}, ConfigError, "the table has no column 'clicked'"),
        (pa.table([[0], [1]], names=["x", "x"]), DataError, "the table has two columns 'x'"),
        ({}, ConfigError, "Its columns are none"),
    ],
)
def test_what_is_no_table(tmp_path, data, error, message):
    with pytest.raises(error, match=message) as caught:
        recjax.prepare(data, label="clicked", out=tmp_path / "out")
    assert "\n" not in str(caught.value) and list(tmp_path.iterdir()) == []


def test_values_as_numpy_has_them(tmp_path):
    day = datetime.date(2026, 1, 1)
    data = {
        "text": np.array(["a", "bé"]),
        "bytes": np.array([b"a", b"b"]),
        "small": np.array([1, 2], np.uint8),
        "nan": np.array([np.nan, 1.5]),
        "half": np.array([0.5, 2], np.float16),
        "day": np.array([day, day], "M8[D]"),
        "masked": np.ma.masked_array([1, 2], [True, False]),
        "none": np.array(["x", None], object),
    }
    file = spool(data, tmp_path / "t.arrow", "the table")
    with pa.ipc.open_file(str(file.path)) as opened:
        rows = opened.read_all().to_pydict()
    assert rows == {
        "text": ["a", "bé"],
        "bytes": [b"a", b"b"],
        "small": [1, 2],
        "nan": [None, 1.5],
        "half": [0.5, 2.0],
        "day": [day, day],
        "masked": [None, 2],
        "none": ["x", None],
    }
