"""Files of tables: which ones a path means, what CSV may look like, and what cannot be read."""

import bz2
import gzip

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.orc as orc
import pyarrow.parquet as parquet
import pytest

from recjax.data.arrow import scan
from recjax.errors import ConfigError, DataError

TABLE = pa.table({"a": pa.array([1, 2, None]), "b": ["x", "é", None], "c": [[1], [], None]})


def rows(path, columns=None, delimiter=""):
    found = []
    for file in scan.find(path, delimiter):
        names = columns or scan.schema(file).names
        for batch in scan.batches(file, names):
            assert batch.schema.names == names
            found += [tuple(row.values()) for row in batch.to_pylist()]
    return found


def written(tmp_path, content, name="t.csv"):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize("name", ["t.parquet", "t.pq", "t.orc", "t.feather", "t.arrow", "stream.arrow"])
def test_formats_that_know_their_types(tmp_path, name):
    path = tmp_path / name
    if path.suffix in (".parquet", ".pq"):
        parquet.write_table(TABLE, path, row_group_size=2)
    elif name == "t.orc":
        orc.write_table(TABLE, path)
    elif name == "t.feather":
        feather.write_feather(TABLE, path)
    else:  # a file, and a stream as HF datasets write it
        with (pa.ipc.new_stream if name.startswith("stream") else pa.ipc.new_file)(path, TABLE.schema) as file:
            file.write_table(TABLE, 2)
    assert rows(path) == [(1, "x", [1]), (2, "é", []), (None, None, None)]
    assert rows(path, ["b", "a"]) == [("x", 1), ("é", 2), (None, None)]
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"t.\w+|stream.arrow.* cannot be read"):
        rows(path)


@pytest.mark.parametrize(
    ("content", "truth"),
    [
        ("a,b\n1,x\n", [(b"1", b"x")]),
        ("a,b\n1,x", [(b"1", b"x")]),
        ("\ufeffa,b\r\n1,x\r\n\r\n2,y\r\n", [(b"1", b"x"), (b"2", b"y")]),
        ('"a",b\n"1, ""2""","x\ny"\n', [(b'1, "2"', b"x\ny")]),
        ("a;b\n1,5;x\n", [(b"1,5", b"x")]),
        ("a\tb\n1,5\t x\n", [(b"1,5", b" x")]),
        ("a|b\n|\n", [(b"", b"")]),
        ("a,b\n007,NA\n,\n", [(b"007", b"NA"), (b"", b"")]),
        ("a,b\n", []),
        (",b\n0,x\n", [(b"0", b"x")]),
    ],
)
def test_csv_as_it_comes(tmp_path, content, truth):
    """Nothing is converted yet: text, numbers and nulls are told apart when the whole column is known."""
    assert rows(written(tmp_path, content)) == truth


def test_packed_csv(tmp_path):
    for suffix, pack in (
        (".gz", gzip.compress),
        (".bz2", bz2.compress),
        (".zst", lambda b: pa.compress(b, "zstd", True)),
    ):
        path = written(tmp_path, pack(b"a,b\n1,x\n"), f"t.csv{suffix}")
        assert rows(path) == [(b"1", b"x")]
    path = written(tmp_path, gzip.compress(b"a,b\n" + b"1,x\n" * 99999)[:-30], "cut.csv.gz")
    with pytest.raises(DataError, match=r"cut.csv.gz cannot be read"):
        rows(path)
    assert rows(written(tmp_path, "a:b\n1:2", "colons.csv"), delimiter=":") == [(b"1", b"2")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.csv", "", "t.csv is empty. CSV has a line that names its columns"),
        ("t.csv", "a,b\n1,2\n3\n4,5\n", r"t.csv:3: the line has 1 field\(s\), but the header 2: '3'"),
        ("t.csv", "a,b\n1,2\n3,4,5\n", r"t.csv:3: the line has 3 field\(s\)"),
        ("t.csv", "a,b,a\n1,2,3\n", "two columns 'a'"),
        ("t.csv", 'a,b\n1,"x\n2,y\n', "column 'b' of the last row ends with a line end, .* a double quote"),
        ("t.csv", 'a,b\n"1,x\n2,y\n', "t.csv"),
        ("t.csv", b"a\xff,b\n1,2\n", r"t.csv:1: the line is no text in utf-8 .*encoding=cp1252"),
        ("t.parquet", "a,b\n1,2\n", "t.parquet cannot be read as Parquet"),
        ("t.parquet", "", "t.parquet cannot be read as Parquet"),
        ("t.arrow", "a,b\n1,2\n", "t.arrow cannot be read as Arrow"),
        ("t.feather", "", "t.feather cannot be read as Arrow"),
        ("t.orc", "a,b\n1,2\n", "t.orc cannot be read.*Not an ORC file"),
        ("t.csv.gz", "a,b\n1,2\n", "t.csv.gz cannot be read"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, name, content, message):
    path = written(tmp_path, content, name)
    with pytest.raises(DataError, match=message) as error:
        rows(path)
    assert "\n" not in str(error.value)


def test_which_files_a_path_means(tmp_path):
    folder = tmp_path / "data"
    for name in ("b.csv", "a.csv", "in/c.csv", ".hidden.csv", "_SUCCESS", "_x.csv", "notes.txt"):
        written(folder if (folder / name).parent.mkdir(parents=True, exist_ok=True) else folder, f"n\n{name}\n", name)
    assert rows(folder) == [(b"a.csv",), (b"b.csv",), (b"in/c.csv",)]
    assert rows(f"{folder}/[ab].csv") == [(b"a.csv",), (b"b.csv",)]
    assert rows(f"{folder}/**/c.csv") == [(b"in/c.csv",)]
    bracketed = written(tmp_path, "n\n1\n", "[x].csv")  # a name that is also a pattern
    assert rows(bracketed) == [(b"1",)]


def test_paths_that_mean_no_table(tmp_path):
    for path, error, message in (
        (tmp_path / "absent.csv", DataError, "absent.csv does not exist"),
        (f"{tmp_path}/*.csv", DataError, r"\*.csv does not exist"),
        (tmp_path, DataError, "holds no table"),
        ("/", ConfigError, "^/ means all folders of this machine"),
        ("/**/none.csv", ConfigError, "means all folders of this machine"),
        (f"{tmp_path}{'/..' * len(tmp_path.parts)}/*/*/*.csv", ConfigError, "means all folders of this machine"),
        ("/*/none-*.csv", DataError, "does not exist"),
        (written(tmp_path, "x", "t.xlsx"), ConfigError, "t.xlsx: a table is read from Parquet"),
        (written(tmp_path, "x", "t.parquet.gz"), ConfigError, "t.parquet.gz: a table is read from Parquet"),
    ):
        with pytest.raises(error, match=message):
            scan.find(path)
    written(tmp_path, "n\n1\n", "a.csv")
    written(tmp_path, "", "a.parquet")
    with pytest.raises(DataError, match="several formats"):
        scan.find(tmp_path)
    (tmp_path / "parts" / "day=1").mkdir(parents=True)
    written(tmp_path / "parts" / "day=1", "n\n1\n", "a.csv")
    with pytest.raises(DataError, match="day=1/a.csv: the name of its folder holds values of a column"):
        scan.find(tmp_path / "parts")
