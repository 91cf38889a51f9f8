"""Text in other encodings: it reads as the same text in UTF-8, or the first row that does not is named."""

import re

import pyarrow as pa
import pytest
from support import tables
from support.commands import assert_refused, inside

from recjax.data.arrow import scan
from recjax.data.datasets.options import check_options, options_of
from recjax.data.datasets.own_table import Table, open_raw, prepare_table
from recjax.data.storage.blocks import open_prepared
from recjax.errors import ConfigError, DataError

pytestmark = [pytest.mark.light_compile, pytest.mark.few_programs, pytest.mark.shared_programs]

CITIES = ["Köln", "München", "Düren"]


def rows(cities, count=300):
    """CSV text, with a column of lists."""
    lines = [f"{cities[i % 3]},{cities[i % 2]}|{cities[1]},{i % 7}.5,{i % 2}" for i in range(count)]
    return "\r\n".join(["stadt;namen;preis;klick".replace(";", ","), *lines, ""])


def prepare(path, out, *options):
    return inside("data", "prepare", "table", "--from", path, "--out", out, "label=klick", *options)


def contents(folder):
    """All files but the description, which names the source."""
    return {
        path.relative_to(folder): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "recjax.json"
    }


@pytest.mark.parametrize(
    ("encoding", "cities"),
    [
        ("cp1252", CITIES),
        ("latin-1", CITIES),
        ("ISO-8859-15", CITIES),
        ("utf-16", CITIES),
        ("utf-8-sig", CITIES),
        ("shift_jis", ["東京", "大阪", "京都"]),
        ("gb18030", ["北京", "上海", "€"]),
        ("cp1251", ["Москва", "Казань", "Омск"]),
    ],
)
def test_the_same_text_in_another_encoding_is_the_same_data(tmp_path, encoding, cities):
    columns = "columns=auto,namen:jagged,stadt:id"
    (tmp_path / "utf8.csv").write_bytes(rows(cities).encode())
    (tmp_path / "other.csv").write_bytes(rows(cities).encode(encoding))
    assert prepare(tmp_path / "utf8.csv", tmp_path / "truth", columns).status == 0
    done = prepare(tmp_path / "other.csv", tmp_path / "out", columns, f"encoding={encoding}")
    assert done.status == 0, done.err
    assert contents(tmp_path / "out") == contents(tmp_path / "truth")
    (tmp_path / "none.csv").write_bytes(rows(cities).encode(encoding))
    if encoding != "utf-8-sig":  # whose mark is left out anyway
        assert_refused(prepare(tmp_path / "none.csv", tmp_path / "none", columns), 3, "none.csv")


def test_characters_that_a_block_cuts(tmp_path):
    """Each is two bytes, and the header makes their places odd: some lie on both sides of any cut."""
    text = "x,y\n" + "é" * 3_000_001 + ",1\n" + "ü" * 3_000_001 + ",2\n"
    (tmp_path / "t.csv").write_bytes(text.encode("utf-16-le"))
    (file,) = scan.find(tmp_path / "t.csv", encoding="utf-16-le")
    read = [value.decode() for batch in scan.batches(file, ["x"]) for value in batch["x"].to_pylist()]
    assert read == ["é" * 3_000_001, "ü" * 3_000_001]


@pytest.mark.parametrize("columns", ["columns=auto", "columns=stadt:id,preis:dense", "columns=namen:jagged"])
def test_the_first_row_in_another_encoding_is_named(tmp_path, columns):
    path = tmp_path / "t.csv"
    path.write_bytes(rows(CITIES).encode("cp1252"))
    name, value = ("namen", "b'K.xf6ln.*'") if "namen" in columns else ("stadt", "b'K.xf6ln'")
    done = prepare(path, tmp_path / "out", columns)
    assert_refused(done, 3, rf"t.csv row 1: column '{name}' is {value}.*UTF-8.*encoding=cp1252.*{name}:skip")
    assert not (tmp_path / "out").exists()


def test_a_column_that_is_left_out_may_be_in_any_encoding(tmp_path):
    path = tmp_path / "t.csv"
    path.write_bytes(rows(CITIES).encode("cp1252"))
    assert prepare(path, tmp_path / "out", "columns=auto,stadt:skip,namen:skip").status == 0


def test_bytes_in_the_last_of_many_rows(tmp_path):
    lines = ["stadt,klick", *(f"a{i % 9},{i % 2}" for i in range(150_000))]
    (tmp_path / "t.csv").write_bytes("\n".join(lines).encode() + b"\nK\xf6ln,1\n")
    assert_refused(prepare(tmp_path / "t.csv", tmp_path / "out"), 3, "t.csv row 150,001: column 'stadt' is b'K.xf6ln'")


@pytest.mark.parametrize("form", ["parquet", "orc"])
@pytest.mark.parametrize("kind", [pa.binary(), pa.string()])
def test_bytes_in_formats_that_know_their_types(tmp_path, form, kind):
    """Of strings, too, which a writer has not looked at."""
    words = pa.array([b"a", b"b", b"K\xf6ln"] * 100)
    if kind == pa.string():
        words = pa.StringArray.from_buffers(len(words), *words.buffers()[1:])
    path = tables.write(
        pa.table({"stadt": words, "preis": [0.5, 1.5, 2.5] * 100, "klick": [0, 1] * 150}), tmp_path / f"t.{form}"
    )
    for columns in ("columns=auto", "columns=stadt:id"):
        refused = assert_refused(
            prepare(path, tmp_path / "out", columns), 3, "row 3: column 'stadt' is b'K.xf6ln', no text"
        )
        assert "encoding=" not in refused
    assert prepare(path, tmp_path / "out", "columns=auto,stadt:skip").status == 0
    refused = assert_refused(
        prepare(path, tmp_path / "other", "encoding=cp1252"), 2, "encoding=cp1252 is of CSV", f"t.{form}"
    )


@pytest.mark.parametrize(
    ("name", "hint"),
    [("cp1253x", "cp1253"), ("lattin-1", "latin-1"), ("rot13", ""), ("bz2", ""), ("", ""), ("a\0b", "")],
)
def test_encodings_that_there_are_not(name, hint):
    with pytest.raises(ConfigError, match=re.escape(f"encoding: there is no encoding {name!r}.")) as error:
        Table(encoding=name)
    assert (f"Did you mean {hint}?" in str(error.value)) == bool(hint) and "cp1252" in str(error.value)


def test_a_line_that_an_encoding_cannot_read_is_named(tmp_path):
    path = tmp_path / "t.csv"
    path.write_bytes("x,klick\na,1\nb,0\n".encode("cp1252") + b"\x81,1\n")  # which cp1252 leaves out
    done = prepare(path, tmp_path / "out", "encoding=cp1252")
    assert_refused(done, 3, "t.csv:4: the line is no text in cp1252.*0x81")
    path.write_bytes("größe,klick\n1,1\n".encode("cp1252"))
    assert_refused(prepare(path, tmp_path / "out"), 3, "t.csv:1: the line is no text in utf-8.*encoding=cp1252")


def test_a_condition_on_text_in_another_encoding_is_refused(tmp_path):
    """It would leave out rows that hold the value, in other bytes."""
    path = tmp_path / "t.csv"
    path.write_bytes(rows(CITIES).encode("cp1252"))
    common = ("columns=preis:dense", "where=stadt=Köln|München")
    assert_refused(prepare(path, tmp_path / "out", *common), 3, "row 1: column 'stadt' is b'K.*encoding=cp1252")
    assert prepare(path, tmp_path / "out", *common, "encoding=cp1252").status == 0
    counts = [open_prepared(tmp_path / "out").row_counts(split).sum() for split in ("train", "validation", "test")]
    assert sum(counts) == 200
    assert prepare(path, tmp_path / "ascii", "columns=preis:dense", "where=stadt!=Bonn").status == 0


def test_the_encoding_is_an_option_of_the_data_by_one_name(tmp_path):
    assert "encoding" not in options_of(Table(label="klick")), "data from before it came have the same options"
    assert options_of(Table(encoding="UTF8")) == options_of(Table())
    assert Table(encoding="latin1") == Table(encoding="ISO_8859-1") != Table(encoding="cp1252")
    path = tmp_path / "t.csv"
    path.write_bytes(rows(CITIES).encode("cp1252"))
    config = Table(label="klick", encoding="cp1252")
    source = prepare_table(config, open_raw(config, path), tmp_path / "out")
    check_options(config, source)
    with pytest.raises(DataError, match="were prepared with encoding=cp1252, but the config says utf-8"):
        check_options(Table(label="klick"), source)
