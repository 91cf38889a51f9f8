"""Finding and opening a dataset's files: what cannot be read is refused with its name and a remedy."""

import gzip
import hashlib

import pytest

from recjax.data.text.source_files import find_file, read_bytes, sha256
from recjax.errors import DataError


@pytest.mark.parametrize("zipped", [False, True])
def test_the_content_and_its_first_line(tmp_path, zipped):
    file = tmp_path / ("x.gz" if zipped else "x")
    data = b"\xef\xbb\xbfone\r\ntwo"
    file.write_bytes(gzip.compress(data) if zipped else data)
    assert read_bytes(file) == b"one\r\ntwo"
    assert read_bytes(file, first_line=True) == b"one\r\n"
    assert sha256(file) == hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.mark.parametrize("data", [b"", b"\n", b"\r\n\r\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n"])
def test_empty_files_are_refused(tmp_path, data):
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(DataError, match="x is empty. Download"):
        read_bytes(tmp_path / "x")


def test_damaged_gzip_files_are_refused(tmp_path):
    whole = gzip.compress(b"a line\n" * 1000)
    flipped = bytearray(whole)
    flipped[-6] ^= 1  # in the checksum
    for data in (whole[:-1], whole[:30], whole[:4], b"plain text\n", bytes(flipped)):
        (tmp_path / "x.gz").write_bytes(data)
        with pytest.raises(DataError, match="x.gz is no complete gzip file"):
            read_bytes(tmp_path / "x.gz")


@pytest.mark.parametrize("read", [read_bytes, sha256])
def test_unreadable_files_are_refused(tmp_path, read):
    with pytest.raises(DataError, match="gone does not exist.*--from"):
        read(tmp_path / "gone")
    with pytest.raises(DataError, match="cannot be read .Is a directory"):
        read(tmp_path)


def test_find_takes_the_first_name_and_prefers_the_plain_file(tmp_path):
    with pytest.raises(DataError, match="has neither x nor x.gz nor y nor y.gz.*--from"):
        find_file(tmp_path, "x", "y")
    with pytest.raises(DataError, match="is not a folder"):
        find_file(tmp_path / "gone", "x")
    (tmp_path / "y").touch()
    assert find_file(tmp_path, "x", "y") == tmp_path / "y"
    (tmp_path / "x.gz").touch()
    assert find_file(tmp_path, "x", "y") == tmp_path / "x.gz"
    (tmp_path / "x").mkdir()
    with pytest.raises(DataError, match="x is a folder where a file should be"):
        find_file(tmp_path, "x", "y")
