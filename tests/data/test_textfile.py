"""Strict reading of text files: harmless differences make none, and every fault is named with its place."""

import gzip

import pytest

from recjax.data.textfile import find, read_lines
from recjax.errors import DataError


@pytest.mark.parametrize(
    "data",
    [
        b"a::b\nc\xc3\xa9\n",
        b"a::b\nc\xc3\xa9",
        b"a::b\r\nc\xc3\xa9\r\n",
        b"\xef\xbb\xbfa::b\nc\xc3\xa9\n",
        b"\xef\xbb\xbfa::b\r\nc\xc3\xa9",
    ],
)
@pytest.mark.parametrize("zipped", [False, True])
def test_line_ends_and_byte_order_mark_make_no_difference(tmp_path, data, zipped):
    file = tmp_path / ("x.dat.gz" if zipped else "x.dat")
    file.write_bytes(gzip.compress(data) if zipped else data)
    assert read_lines(file) == ["a::b", "cé"]


def test_only_newlines_end_lines(tmp_path):
    (tmp_path / "x").write_bytes("a\x0bb\x85c\u2028d\re\n\nf\n".encode())
    assert read_lines(tmp_path / "x") == ["a\x0bb\x85c\u2028d\re", "", "f"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "x.dat is empty"),
        (b"\n", "x.dat is empty"),
        (b"\xef\xbb\xbf", "x.dat is empty"),
        (b"one\ntwo\nth\xffree\n", r"x.dat:3: byte 3 of the line \(0xff\) is not UTF-8"),
        (b"\xe9t\xe9\n", r"x.dat:1: byte 1 of the line \(0xe9\)"),
        (b"end\xc3", r"x.dat:1: byte 4 of the line \(0xc3\)"),
    ],
)
def test_what_is_no_text_is_refused_with_its_place(tmp_path, data, message):
    (tmp_path / "x.dat").write_bytes(data)
    with pytest.raises(DataError, match=message):
        read_lines(tmp_path / "x.dat")


def test_damaged_gzip_files_are_refused(tmp_path):
    whole = gzip.compress(b"a line\n" * 1000)
    flipped = bytearray(whole)
    flipped[-6] ^= 1  # in the checksum
    for data in (whole[:-1], whole[:30], whole[:4], b"plain text\n", bytes(flipped)):
        (tmp_path / "x.gz").write_bytes(data)
        with pytest.raises(DataError, match="x.gz is no complete gzip file"):
            read_lines(tmp_path / "x.gz")


def test_unreadable_files_are_refused(tmp_path, monkeypatch):
    with pytest.raises(DataError, match="gone does not exist"):
        read_lines(tmp_path / "gone")
    with pytest.raises(DataError, match="cannot be read .Is a directory"):
        read_lines(tmp_path)


def test_find_prefers_the_plain_file(tmp_path):
    with pytest.raises(DataError, match="has neither x nor x.gz.*--from"):
        find(tmp_path, "x")
    with pytest.raises(DataError, match="is not a folder"):
        find(tmp_path / "gone", "x")
    (tmp_path / "x.gz").touch()
    assert find(tmp_path, "x") == tmp_path / "x.gz"
    (tmp_path / "x").touch()
    assert find(tmp_path, "x") == tmp_path / "x"
