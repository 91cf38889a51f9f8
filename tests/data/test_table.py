"""Delimited files: harmless differences make none, every fault is named with file, line and field, none is lost."""

import csv
import gzip
import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recjax.data.text.fields import Faults
from recjax.data.text.table import Form, read_rows
from recjax.errors import DataError

PLAIN = Form(("a", "b"), "\t")
COLONS = Form(("a", "b"), "::")
HEADED = Form(("a", "b"), header=("A", "B"), quotes=True)
FORMS = {"plain": PLAIN, "colons": COLONS, "headed": HEADED}


def lines_of(form, *rows):
    """The bytes of a file of these rows."""
    head = [form.header] if form.header else []
    return "".join(form.delimiter.join(row) + "\n" for row in [*head, *rows]).encode(form.encoding)


def read(tmp_path, data, form, name="x.dat", skip=False):
    """All rows as (line, a, b), and what was left out."""
    (tmp_path / name).write_bytes(data)
    faults = Faults(skip)
    found = []
    for rows in read_rows(tmp_path / name, form, faults):
        a, b = rows.text("a"), rows.text("b")
        found += [row for row, ok in zip(zip(rows.lines.tolist(), a.tolist(), b.tolist()), rows.ok) if ok]  # noqa: B905
    return found, faults.drain()


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        lambda data: data,
        lambda data: data.removesuffix(b"\n"),
        lambda data: data.replace(b"\n", b"\r\n"),
        lambda data: b"\xef\xbb\xbf" + data,
        lambda data: b"\xef\xbb\xbf" + data.replace(b"\n", b"\r\n").removesuffix(b"\r\n"),
    ],
    ids=["as is", "no last line end", "CRLF", "BOM", "all"],
)
def test_line_ends_byte_order_mark_and_gzip_make_no_difference(tmp_path, form, zipped, change):
    data = change(lines_of(form, ("1", "é"), ("3", "x y")))
    found = read(tmp_path, gzip.compress(data) if zipped else data, form, "x.gz" if zipped else "x")
    first = 2 if form.header else 1
    assert found == ([(first, b"1", "é".encode()), (first + 1, b"3", b"x y")], {})


def test_quotes_hold_delimiters_and_quotes(tmp_path):
    data = b'A,B\n1,"Wanted, Dead or ""Alive"""\n"2",an"d\n'
    assert read(tmp_path, data, HEADED)[0] == [(2, b"1", b'Wanted, Dead or "Alive"'), (3, b"2", b'an"d')]
    assert read(tmp_path, b'1\t"x\n2\ty"\n', PLAIN)[0] == [(1, b"1", b'"x'), (2, b"2", b'y"')]


def test_the_header_decides_the_order_and_other_columns_are_ignored(tmp_path):
    assert read(tmp_path, b'B, C ,"A"\n1,2,3\n', HEADED)[0] == [(2, b"3", b"1")]
    for head in (b"A,b", b"A", b"A,B,B", b"1,2"):
        with pytest.raises(DataError, match=r"x.dat:1: the first line must name A, B, each once; for (A, )?B that is"):
            read(tmp_path, head + b"\n1,2\n", HEADED)


def test_other_encodings(tmp_path):
    form = Form(("a", "b"), "|", encoding="latin-1")
    assert read(tmp_path, lines_of(form, ("1", "Misérables")), form)[0] == [(1, b"1", "Misérables".encode())]


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_wrong_number_of_fields_is_named_with_its_line_or_counted(tmp_path, form):
    data = lines_of(form, ("1", "2"), ("3",), ("5", "6"), ("7", "8", "9"), ("0", "1"))
    first = 2 if form.header else 1
    with pytest.raises(DataError, match=rf"x.dat:{first + 1}: the line has 1 field\(s\) instead of 2: '3'.*Mend"):
        read(tmp_path, data, form)
    found, skipped = read(tmp_path, data, form, skip=True)
    assert [row[0] for row in found] == [first, first + 2, first + 4]
    assert skipped == {"number of fields": 2}


def test_lines_are_counted_across_pieces(tmp_path):
    """Pieces have 8 MiB."""
    rows = [("x",) if i % 7 == 3 else (str(i), "y" * (i % 5 * 20_000)) for i in range(500)]
    found, skipped = read(tmp_path, lines_of(PLAIN, *rows), PLAIN, skip=True)
    assert found == [(i + 1, row[0].encode(), row[1].encode()) for i, row in enumerate(rows) if len(row) == 2]
    assert skipped == {"number of fields": sum(len(row) == 1 for row in rows)}


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'A,B\n1,"2\n3,4\n5,6\n', "x.dat:2: a double quote is opened"),  # to the end of the file
        (b'A,B\n1,2\n3,"4\n5",6\n7,8\n', "x.dat:3: a double quote is opened"),  # would give a row of another width
        (b'A,B\n1,"2\n3,4"\n5,6\n', "x.dat:2: a double quote is opened"),  # would give a row that looks right
        (b'A,B\n1,"2\n', "x.dat:2: a double quote is opened"),
    ],
)
def test_an_open_quote_is_never_skipped_for_it_swallows_lines(tmp_path, data, message, skip):
    with pytest.raises(DataError, match=message):
        read(tmp_path, data, HEADED, skip=skip)


def test_what_cannot_be_cut_into_fields(tmp_path):
    long = ("x" * 20_000_000, "y")
    with pytest.raises(DataError, match="x.dat cannot be cut into fields .*a line of more than"):
        read(tmp_path, lines_of(PLAIN, ("1", "2"), long, ("3", "4")), PLAIN)
    with pytest.raises(DataError, match=r"x.dat:2: the line has 1 field"):  # comes first, and has a line
        read(tmp_path, lines_of(PLAIN, ("1", "2"), ("3",), long, ("3", "4")), PLAIN)


def test_a_control_character_that_would_act_as_delimiter_is_refused(tmp_path):
    with pytest.raises(DataError, match="x.dat:2: the control character 0x1f"):
        read(tmp_path, b"a::b\nc\x1fd\n", COLONS)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("data", [b"", b"\xef\xbb\xbf"])
def test_empty_files_are_refused(tmp_path, form, data):
    with pytest.raises(DataError, match="x.dat is empty. Download"):
        read(tmp_path, data, form)


def test_a_header_alone_has_no_rows(tmp_path):
    assert read(tmp_path, b"A,B\n", HEADED) == ([], {})
    assert read(tmp_path, b"A,B", HEADED) == ([], {})


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_unreadable_files_are_refused(tmp_path, form):
    whole = gzip.compress(lines_of(form, *[("1", "2")] * 100_000))
    flipped = bytearray(whole)
    flipped[-6] ^= 1  # in the checksum
    for data in (whole[:-1], whole[:-100], whole[:30], b"plain text\n", bytes(flipped)):
        with pytest.raises(DataError, match="x.gz is no complete gzip file"):
            read(tmp_path, data, form, "x.gz")
    with pytest.raises(DataError, match="gone does not exist"):
        next(read_rows(tmp_path / "gone", form, Faults()))
    with pytest.raises(DataError, match="cannot be read"):
        next(read_rows(tmp_path, form, Faults()))


@pytest.mark.parametrize("skip", [False, True])
def test_text_that_is_not_utf8_or_holds_nul(tmp_path, skip):
    data = b"1\t\xc3\xa9\n2\t\xe9\n3\tx\0\n4\ty\n"
    if skip:
        assert read(tmp_path, data, PLAIN, skip=True) == ([(1, b"1", b"\xc3\xa9"), (4, b"4", b"y")], {"b": 2})
    else:
        with pytest.raises(DataError, match=r"x.dat:2: b \(field 2\) is '\\\\xe9', which is not UTF-8"):
            read(tmp_path, b"1\t\xc3\xa9\n2\t\xe9\n", PLAIN)
        with pytest.raises(DataError, match=r"x.dat:1: b \(field 2\) is 'x\\x00', with a NUL byte"):
            read(tmp_path, b"3\tx\0\n", PLAIN)


def one_field(tmp_path, texts, get):
    """What `get` makes of a file with a line for each text: values, which are ok, and what was left out."""
    (tmp_path / "x.dat").write_bytes("".join(f"{text}\t\n" for text in texts).encode())
    faults = Faults(skip=True)
    [rows] = read_rows(tmp_path / "x.dat", PLAIN, faults)
    return get(rows), rows.ok.tolist(), faults.drain()


@pytest.mark.parametrize(
    "bad", ["", "x", "1.5", "+1", " 1", "1 ", "1_0", "0x10", "1e3", "٨", "9" * 19, "-6", "11", "--1"]
)
def test_whole_numbers(tmp_path, bad):
    values, ok, counts = one_field(tmp_path, ["-5", "007", bad, "10"], lambda rows: rows.integers("a", -5, 10))
    assert ok == [True, True, False, True] and counts == {"a": 1}
    assert values.dtype == np.int64 and values[ok].tolist() == [-5, 7, 10]
    with pytest.raises(
        DataError, match=r"x.dat:3: a \(field 1\) is .*, not a whole number from -5 to 10. Mend the line"
    ):
        next(read_rows(tmp_path / "x.dat", PLAIN, Faults())).integers("a", -5, 10)


@pytest.mark.parametrize("bad", ["", "x", "nan", "inf", "1e99", " 1", "1_0", "0x1", "5.1", "-0.1", "1.5.2", "."])
def test_numbers(tmp_path, bad):
    values, ok, counts = one_field(tmp_path, ["0.5", "5", bad, "25e-1"], lambda rows: rows.numbers("a", 0, 5))
    assert ok == [True, True, False, True] and counts == {"a": 1}
    assert values[ok].tolist() == [0.5, 5, 2.5]


@pytest.mark.parametrize("bad", ["", "0123456", "012345678", "0123456g", "-1234567", "0x123456"])
def test_hexadecimals(tmp_path, bad):
    texts = ["00000000", "ffffffff", bad, "1fBE01fe"]
    values, ok, counts = one_field(tmp_path, texts, lambda rows: rows.hexadecimals("a"))
    assert ok == [True, True, False, True] and counts == {"a": 1}
    assert values[ok].tolist() == [0, 2**32 - 1, 0x1FBE01FE]


def test_missing_fields(tmp_path):
    def get(rows):
        missing = rows.missing("a", "NULL")
        return missing.tolist(), rows.integers("a").tolist()

    values, ok, _ = one_field(tmp_path, ["", "NULL", "7", "null"], get)
    assert values == ([True, True, False, False], [0, 0, 7, 0]) and ok == [True, True, True, False]


FIELD = st.text(st.characters(codec="utf-8", exclude_characters="\r\n\0"), max_size=8)


@given(st.lists(st.tuples(FIELD, FIELD), min_size=1, max_size=20), st.booleans(), st.sampled_from(["\n", "\r\n"]))
def test_whatever_the_csv_module_writes_reads_back(tmp_path_factory, rows, zipped, end):
    out = io.StringIO()
    csv.writer(out, lineterminator=end, quoting=csv.QUOTE_ALL).writerows([HEADED.header, *rows])
    data = out.getvalue().encode()
    folder = tmp_path_factory.mktemp("csv")
    found, _ = read(folder, gzip.compress(data) if zipped else data, HEADED, "x.gz" if zipped else "x")
    assert found == [(i, a.encode(), b.encode()) for i, (a, b) in enumerate(rows, 2)]


@given(st.lists(st.integers(-(10**18) + 1, 10**18 - 1), min_size=1, max_size=20))
def test_whole_numbers_read_back(tmp_path_factory, numbers):
    folder = tmp_path_factory.mktemp("numbers")
    values, ok, _ = one_field(folder, numbers, lambda rows: rows.integers("a", -(10**18), 10**18))
    assert values.tolist() == numbers and all(ok)


@given(st.binary(max_size=60), st.sampled_from(list(FORMS.values())), st.booleans())
def test_any_bytes_are_read_or_refused(tmp_path_factory, data, form, skip):
    """Nothing but rows and DataError comes out, and every line is a row or counted."""
    head = lines_of(form) if form.header else b""
    folder = tmp_path_factory.mktemp("any")
    try:
        found, skipped = read(folder, head + data, form, skip=skip)
    except DataError:
        return
    ends = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    lines = ends.count(b"\n") + (not ends.endswith(b"\n") and bool(ends))
    assert len(found) + sum(skipped.values()) == lines
