"""Files of parts: what was written comes back, and damage is named."""

import numpy as np
import pytest

from recjax.data.prepare import part_file
from recjax.data.prepare.chunk import Coded
from recjax.data.prepare.coding import CodedChunk

ROWS = 40


@pytest.fixture
def chunk():
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 3, ROWS).astype(np.int32)
    columns = {
        "word": Coded(np.array([b"a", b"bc"]), rng.integers(0, 3, ROWS).astype(np.uint8), None),
        "bag": Coded(np.arange(300), rng.integers(0, 300, lengths.sum()).astype(np.uint16), lengths),
    }
    labels = rng.integers(0, 2, ROWS).astype(np.float32)
    return CodedChunk(labels, rng.normal(size=(ROWS, 2)), columns, rng.integers(0, 3, ROWS).astype(np.uint8), None)


def values(chunk, keep):
    """The values of each row in plain Python, None where missing."""
    words, bag = chunk.columns["word"], chunk.columns["bag"]
    ends = np.cumsum(bag.lengths)
    word = [*words.values.tolist(), None]
    entries = [*bag.values.tolist(), None]
    return [
        (word[words.codes[i]], [entries[c] for c in bag.codes[ends[i] - bag.lengths[i] : ends[i]]], *chunk.dense[i])
        for i in np.flatnonzero(keep)
    ]


def test_rows_of_each_split_and_counts_come_back(tmp_path, chunk):
    with (tmp_path / "file").open("wb") as stream:
        part_file.save(stream, chunk)
    for file in (tmp_path / "file", (tmp_path / "file").read_bytes()):
        with part_file.opened(file) as arrays:
            for split in range(3):
                found = part_file.rows(arrays, split, ["word", "bag"])
                keep = chunk.split == split
                assert values(found, np.ones(keep.sum(), bool)) == values(chunk, keep)
                np.testing.assert_array_equal(found.labels, chunk.labels[keep], strict=True)
            of_train = [row[0] for row in values(chunk, chunk.split == 0)]
            assert [c.tolist() for c in part_file.train_counts(arrays, 0)] == [
                [b"a", b"bc"],
                [of_train.count(b"a"), of_train.count(b"bc")],
            ]


def test_rows_of_a_split_that_was_forgotten_can_still_be_read(tmp_path, chunk):
    file = tmp_path / "file"
    with file.open("wb") as stream:
        part_file.save(stream, chunk)
    content = file.read_bytes()
    with part_file.opened(file) as arrays:
        spans = [arrays.span(f".{split}") for split in range(3)]
        of_train = [array.tobytes() for name, array in arrays.items() if name.endswith(".0")]
    for split in (0, 1, 2, 7):
        part_file.forget(file, split)
    assert file.read_bytes() == content
    assert 0 < spans[0][0] < spans[0][1] <= spans[1][0] < spans[1][1] <= spans[2][0] < spans[2][1] <= len(content)
    start, stop = spans[0]
    assert content[start:stop].startswith(of_train[0]) and content[start:stop].endswith(of_train[-1])


@pytest.mark.parametrize(
    "dtype, entries, stored",
    [
        (np.float64, [3, np.nan, -0.0, -(2.0**24)], np.float32),  # float32 holds them
        (np.float64, [3, np.nan, 2.0**24 + 1], np.float64),
        (np.float64, [1e300], np.float64),
        (np.float32, [0.5, np.nan], np.float32),
    ],
)
def test_dense_columns_keep_their_bits_and_type(tmp_path, dtype, entries, stored):
    dense = np.array(entries, dtype)[:, None]
    rows = len(dense)
    chunk = CodedChunk(np.zeros(rows, np.float32), dense, {}, np.zeros(rows, np.uint8), None)
    with (tmp_path / "file").open("wb") as stream:
        part_file.save(stream, chunk)
    with part_file.opened(tmp_path / "file") as arrays:
        found = part_file.rows(arrays, 0, []).dense
        assert {array.dtype for name, array in arrays.items() if not name.startswith("labels")} == {np.dtype(stored)}
    assert found.dtype == dtype and found.tobytes() == dense.tobytes()


def test_any_changed_byte_is_noticed(tmp_path, chunk):
    file = tmp_path / "file"
    with file.open("wb") as stream:
        part_file.save(stream, chunk)
    content = file.read_bytes()
    with part_file.opened(content) as arrays:
        truth = {name: array.tobytes() for name, array in arrays.items()}
    for at in range(0, len(content), 7):
        damaged = bytearray(content)
        damaged[at] ^= 16
        try:
            with part_file.opened(bytes(damaged)) as arrays:
                assert {name: array.tobytes() for name, array in arrays.items()} == truth  # between two arrays
                assert not content[at]
        except part_file.DamagedPartError:
            pass
    for cut in (0, 5, 40, len(content) - 1):
        file.write_bytes(content[:cut])
        with pytest.raises(part_file.DamagedPartError), part_file.opened(file):
            pass
