"""Frames of other libraries hold the same table as a Parquet file: one fingerprint, whatever handed it over.

Each library's test is skipped where it is not installed: pandas, polars, duckdb, datasets (of Hugging Face).
"""

import contextlib
import datetime
import decimal
import os

import numpy as np
import pyarrow as pa
import pytest
from support import tables
from support.commands import arrays, assert_same_arrays

import recjax
from recjax.data.prepare.encoder import open_encoder
from recjax.errors import ConfigError, DataError

pytestmark = pytest.mark.light_compile

OPTIONS = {"columns": "auto,when:skip"}
ROWS = int(os.environ.get("RECJAX_TEST_ROWS", "2000"))  # 100000 as well, by hand


def of_pandas(table, path):
    return pytest.importorskip("pandas").read_parquet(path, dtype_backend="numpy_nullable")


def of_pandas_arrow(table, path):
    return pytest.importorskip("pandas").read_parquet(path, dtype_backend="pyarrow")


def of_pandas_plain(table, path):
    """Integers stay integers, missing numbers are NaN, texts are objects."""
    pytest.importorskip("pandas")
    return table.to_pandas()


def of_polars(table, path):
    return pytest.importorskip("polars").read_parquet(path)


def of_polars_lazy(table, path):
    return pytest.importorskip("polars").scan_parquet(path).collect()


def of_duckdb(table, path):
    return pytest.importorskip("duckdb").sql(f"select * from '{path}'")


def of_duckdb_arrow(table, path):
    return pytest.importorskip("duckdb").sql(f"select * from '{path}'").to_arrow_reader(500)


def of_datasets(table, path):
    return pytest.importorskip("datasets").Dataset(table)


def of_pyarrow(table, path):
    return table


def of_reader(table, path):
    return table.to_reader(max_chunksize=300)


def of_arrays(table, path):
    return {
        name: table[name].to_numpy() if name in ("item_id", "price") else table[name].to_pylist()
        for name in table.column_names
    }


SOURCES = [
    of_pandas,
    of_pandas_arrow,
    of_pandas_plain,
    of_polars,
    of_polars_lazy,
    of_duckdb,
    of_duckdb_arrow,
    of_datasets,
    of_pyarrow,
    of_reader,
    of_arrays,
]


@pytest.fixture(scope="module")
def table():
    return tables.clicks(ROWS)


@pytest.fixture(scope="module")
def file(table, tmp_path_factory):
    return tables.write(table, tmp_path_factory.mktemp("file") / "clicks.parquet")


@pytest.fixture(scope="module")
def truth(file):
    return recjax.prepare(file, "clicked", file.parent / "truth", OPTIONS)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.__name__.removeprefix("of_"))
def test_one_fingerprint(table, file, truth, source, tmp_path):
    found = recjax.prepare(source(table, file), "clicked", tmp_path / "data", OPTIONS)
    assert found["fingerprint"] == truth["fingerprint"]
    assert found["rows"] == truth["rows"]


def weights_of(given, folder):
    """Prepares and trains; every array of the checkpoint, and the measures."""
    options = {"split": "random:0.8,0.1,0.1", "columns": "user:id,kind:id,item_id:id,price:dense"}
    recjax.prepare(given, "clicked", folder / "data", options)
    config = recjax.load("table", {"data.path": str(folder / "data")}, TRAINED)
    measures = recjax.fit(config, folder / "run")["eval"]
    return arrays(folder / "run", 3), measures


TRAINED = {
    "model": "dcnv2",
    "model.top": "4-1",
    "model.bottom": "4",
    "embedding.dim": 4,
    "train.steps": 3,
    "train.batch_size": 64,
    "mesh.devices": 1,
    "small.below_rows": 0,
}


@pytest.mark.full
def test_one_trained_model_bit_for_bit(tmp_path):
    """From the same rows as Parquet, CSV, Feather and every frame that is installed."""
    plain = tables.clicks(400, lists=False)
    path = tables.write(plain, tmp_path / "t.parquet")
    given = {
        "parquet": path,
        "csv": tables.write(plain, tmp_path / "t.csv"),
        "feather": tables.write(plain, tmp_path / "t.feather"),
    }
    for source in (of_pandas, of_pandas_plain, of_polars, of_duckdb, of_datasets, of_arrays):
        with contextlib.suppress(pytest.skip.Exception):
            given[source.__name__] = source(plain, path)
    found = {name: weights_of(rows, tmp_path / name) for name, rows in given.items()}
    truth, measures = found.pop("parquet")
    assert np.isfinite(measures["auc"]) and any(name.startswith("/tables") for name in truth)
    for own, others in found.values():
        assert_same_arrays(own, truth)
        assert others == measures


# Values as they come from databases and spreadsheets: what each of them is read as stands beside it.
UTC = datetime.UTC
BERLIN = datetime.timezone(datetime.timedelta(hours=1))


def small(**columns):
    """A table of six rows with a label and one ordinary feature."""
    return pa.table({"y": [0, 1, 0, 1, 1, 0], "user": ["a", "b", "a", "c", "b", "a"], **columns})


@pytest.mark.parametrize(
    ("odd", "plain", "role"),
    [
        (pa.array([2**63 - 1, -(2**63), 0, 5, 5, 5]), [str(n) for n in (2**63 - 1, -(2**63), 0, 5, 5, 5)], "id"),
        (pa.array([2**64 - 1, 0, 1, 1, 1, 1], pa.uint64()), [str(n) for n in (2**64 - 1, 0, 1, 1, 1, 1)], "id"),
        (pa.array([True, False, None, True, True, False]), [1, 0, None, 1, 1, 0], "id"),
        (pa.array(["x", "", None, "é", "x", "NA"]), ["x", None, None, "é", "x", "NA"], "id"),
        (pa.array(["x", None, "y", "x", "y", "x"]).dictionary_encode(), ["x", None, "y", "x", "y", "x"], "id"),
        (pa.array([decimal.Decimal("1.10"), None] * 3), [1.1, None] * 3, "dense"),
        (pa.array([1.5, float("nan"), None, 2.0, 2.0, 2.0]), [1.5, None, None, 2.0, 2.0, 2.0], "dense"),
        (pa.array([np.float16(1.5)] * 3 + [np.float16(2)] * 3), [1.5] * 3 + [2.0] * 3, "dense"),
        (pa.array([[1, 2], [], None, [2], [1, None], [2]]), [[1, 2], [], [], [2], [1, None], [2]], "jagged"),
        (pa.array([["a"], ["b", "a"], [], [], [], ["b"]]), [["a"], ["b", "a"], None, None, None, ["b"]], "jagged"),
        (pa.array([7] * 6), [7.0] * 6, "dense"),
        (
            pa.array([datetime.datetime(2026, 1, 1, 12, tzinfo=BERLIN)] * 6).cast(pa.timestamp("us", "+01:00")),
            pa.array([datetime.datetime(2026, 1, 1, 11, tzinfo=UTC)] * 6).cast(pa.timestamp("ns", "UTC")),
            "dense",
        ),
        (
            pa.array([datetime.date(2026, 1, i + 1) for i in range(6)]),
            pa.array([datetime.datetime(2026, 1, i + 1) for i in range(6)], pa.timestamp("s")),
            "dense",
        ),
    ],
    ids=[
        "int64",
        "uint64",
        "boolean",
        "empty text",
        "dictionary",
        "decimal",
        "nan",
        "half",
        "lists",
        "lists of text",
        "one value",
        "time zones",
        "dates",
    ],
)
def test_odd_values_are_what_they_stand_for(odd, plain, role, tmp_path):
    options = {"columns": f"user:id,odd:{role}", "missing_indicators": True}
    given = small(odd=odd)
    found = recjax.prepare(given, "y", tmp_path / "odd", options, test=given.slice(0, 2), validation=given.slice(0, 1))
    if role == "id":  # of other types they are other values: those of the vocabulary tell
        (values,) = (map_.vocabulary.values.tolist() for map_ in open_encoder(tmp_path / "odd").maps[1:])
        texts = [value.decode() if isinstance(value, bytes) else str(value) for value in values]
        assert sorted(texts) == sorted({str(value) for value in plain if value is not None})
        return
    given = small(odd=plain)
    same = recjax.prepare(given, "y", tmp_path / "plain", options, test=given.slice(0, 2), validation=given.slice(0, 1))
    assert found["fingerprint"] == same["fingerprint"]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (small()[:0], "has no rows"),
        (
            small(y2=[1, 0, None, 1, 0, 1]).drop_columns("y").rename_columns(["user", "y"]),
            "row 3: the label 'y' is missing",
        ),
        (small().set_column(0, "y", pa.array([0, 1, float("nan"), 1, 0, 1])), "row 3: the label 'y' is missing"),
        (small().set_column(0, "y", pa.array([1] * 6)), "y.*(only|all)"),
        (pa.table([[0, 1], [1, 0], ["a", "b"]], ["y", "user", "user"]), "two columns 'user'"),
    ],
    ids=["no rows", "null label", "NaN label", "one label", "twice"],
)
def test_what_no_table_can_be_used_for(table, message, tmp_path):
    with pytest.raises(DataError, match=message):
        recjax.prepare(table, "y", tmp_path / "out", columns="user:id")
    assert not (tmp_path / "out").exists()


def test_labels_may_be_a_list(tmp_path):
    table = small(z=[1, 0, 1, 1, 0, 0])
    several = recjax.prepare(table, ["y", "z"], tmp_path / "several", columns="user:id")
    as_text = recjax.prepare(table, "y,z", tmp_path / "text", columns="user:id")
    assert several["fingerprint"] == as_text["fingerprint"]
    for wrong in ([], 3, [3], None):
        with pytest.raises(ConfigError, match="needs the name of a column as label"):
            recjax.prepare(table, wrong, tmp_path / "wrong")
