"""Pieces of files against str.splitlines, for every size of piece."""

import gzip
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recjax.data.text.chunks import pieces, scan
from recjax.errors import DataError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("files")


@given(
    lines=st.lists(st.text("ab", max_size=5), min_size=1, max_size=30).filter(lambda lines: lines[-1]),
    size=st.integers(9, 80),
    end=st.booleans(),
    windows=st.booleans(),
    mark=st.booleans(),
    zipped=st.booleans(),
)
def test_every_line_is_in_the_piece_in_which_it_begins(folder, lines, size, end, windows, mark, zipped):
    newline = "\r\n" if windows else "\n"
    data = (b"\xef\xbb\xbf" if mark else b"") + (newline.join(lines) + newline * end).encode()
    path = folder / ("f.gz" if zipped else "f")
    path.write_bytes(gzip.compress(data) if zipped else data)
    file = scan(path, size)
    assert file.lines == len(lines)
    begins = [sum(len(line) + len(newline) for line in lines[:i]) + 3 * mark * (i > 0) for i in range(len(lines))]
    truth = [[] for _ in range((max(0, len(data) - size + 1) + size - 1) // size + 1)]
    for begin, line in zip(begins, lines, strict=True):
        truth[begin // size].append(line)
    found = [piece.decode().split("\n")[:-1] for piece in pieces(file, 0)]
    assert found == truth
    assert list(file.first_lines) == [sum(map(len, truth[:i])) for i in range(len(truth))]
    assert all(piece.endswith(b"\n") for piece in pieces(file, 0) if piece)
    for start in range(len(truth) + 1):
        assert list(pieces(file, start)) == list(pieces(file, 0))[start:]


def test_a_line_longer_than_a_piece(folder):
    path = folder / "long"
    path.write_bytes(b"a\nb\n" + b"x" * 50 + b"\n")
    with pytest.raises(DataError, match=r"long:3: the line is longer than 16 bytes"):
        list(pieces(scan(path, 16), 0))


def test_files_that_cannot_be_read(folder):
    (folder / "empty").write_bytes(b"")
    (folder / "empty.gz").write_bytes(gzip.compress(b""))
    (folder / "zipped").write_bytes(gzip.compress(b"a\n"))
    (folder / "cut.gz").write_bytes(gzip.compress(os.urandom(1000))[:-20])
    (folder / "wrong.gz").write_bytes(b"a\n")
    (folder / "folder").mkdir()
    for name, message in {
        "empty": "empty is empty",
        "empty.gz": "empty.gz is empty",
        "zipped": "is gzipped, but its name does not end in .gz",
        "cut.gz": "is no complete gzip file",
        "wrong.gz": "is no complete gzip file",
        "folder": r"cannot be read \(Is a directory\)",
        "absent": "does not exist",
    }.items():
        with pytest.raises(DataError, match=message):
            scan(folder / name, 16)
