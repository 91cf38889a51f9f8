"""Criteo text as it comes: with or without labels, however its lines end, and what is wrong with a malformed one."""

import gzip

import numpy as np
import pytest

from recjax.data.criteo_text import CATEGORIES
from recjax.errors import DataError
from recjax.serving import rows


def line(number):
    integers = [str(number), "-2", *[""] * 11]
    return "\t".join([str(number % 2), *integers, f"{number:08x}", "0000beef", "", *["a1"] * 23])


def bare(text):
    return "\n".join(line.partition("\t")[2] for line in text.split("\n"))


def content(file):
    """All rows as one: dense, keys and missing of all columns."""
    chunks = list(rows.criteo(file))
    assert {name for chunk in chunks for name in chunk.columns} == set(CATEGORIES)
    keys = np.concatenate([np.stack([chunk.columns[n].keys for n in CATEGORIES]) for chunk in chunks], axis=1)
    missing = np.concatenate([np.stack([chunk.columns[n].missing for n in CATEGORIES]) for chunk in chunks], axis=1)
    return np.concatenate([chunk.dense for chunk in chunks]), keys, missing


@pytest.mark.parametrize("piece", [64, 997, 1 << 21])
def test_the_same_rows_in_every_form(tmp_path, monkeypatch, piece):
    monkeypatch.setattr(rows, "_PIECE_BYTES", piece)
    text = "\n".join(line(number) for number in range(50))
    dense, keys, missing = None, None, None
    for name, data in {
        "plain.txt": (text + "\n").encode(),
        "open.txt": text.encode(),
        "windows.txt": text.replace("\n", "\r\n").encode(),
        "bom.txt": b"\xef\xbb\xbf" + text.encode(),
        "bare.txt": bare(text).encode(),
        "bare_bom.txt": b"\xef\xbb\xbf" + bare(text).replace("\n", "\r\n").encode(),
        "zipped.txt.gz": gzip.compress(bare(text + "\n").removesuffix("\n").encode()),
    }.items():
        (tmp_path / name).write_bytes(data)
        found = content(tmp_path / name)
        if dense is None:
            dense, keys, missing = found
            assert keys[0].tolist() == list(range(50)) and set(keys[1]) == {0xBEEF} and set(keys[3]) == {0xA1}
            assert dense[:, 0].tolist() == list(range(50)) and set(dense[:, 1]) == {-2} and np.isnan(dense[:, 2]).all()
            assert missing[2].all() and not missing[[0, 1, 3]].any()
        for ours, theirs in zip(found, (dense, keys, missing), strict=True):
            np.testing.assert_array_equal(ours, theirs, err_msg=name)


@pytest.mark.parametrize("piece", [64, 1 << 21])
@pytest.mark.parametrize("labels", [True, False])
@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        (lambda line: line + "\t", "the line has {one_more} field(s) instead of {fields}, as line 1 has them"),
        (lambda line: "", "the line has {empty} field(s) instead of {fields}"),
        (lambda line: line.replace("\t-2\t", "\t-x\t"), "I2 (column {I2}) is '-x', not an integer"),
        (lambda line: line.replace("beef", "beeg"), "C2 (column {C2}) is '0000beeg', not up to 8 hexadecimal digits"),
    ],
    ids=["too many fields", "empty line", "no integer", "no category"],
)
def test_a_malformed_line_is_named(tmp_path, monkeypatch, piece, labels, change, pattern):
    monkeypatch.setattr(rows, "_PIECE_BYTES", piece)
    lines = [line(number) if labels else bare(line(number)) for number in range(9)]
    lines[6] = change(lines[6])
    file = tmp_path / "rows.txt"
    file.write_text("\n".join(lines) + "\n")
    numbers = {"fields": 40, "one_more": 41, "empty": 1, "I2": 3, "C2": 16}
    wanted = pattern.format(**{name: n - (not labels and name != "empty") for name, n in numbers.items()})
    with pytest.raises(DataError) as caught:
        list(rows.criteo(file))
    assert f"{file}:7: {wanted}" in str(caught.value)


def test_a_wrong_label_is_named(tmp_path):
    file = tmp_path / "rows.txt"
    file.write_text(line(0) + "\n2" + line(0)[1:])
    with pytest.raises(DataError, match=r"rows\.txt:2: the label \(column 1\) is '2'"):
        list(rows.criteo(file))
