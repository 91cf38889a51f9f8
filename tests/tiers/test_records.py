"""Records on disk: what is read is what was written, or is named."""

import os
import re
import tracemalloc

import numpy as np
import pytest
from support.records import head, written

from recjax.tiers import records
from recjax.tiers.records import UNITS, CorruptRecordError, RecordFile, read_together, record_bytes
from recjax.tiers.row_cache import CachedRows
from recjax.tiers.transfers import Transfers


@pytest.fixture(params=["queue", "threads"])
def opened(request):
    """Opens files of records, to be read in one of both ways."""
    made, reads = [], Transfers()
    reads.queued = request.param == "queue"

    def open_(file, rows, row_bytes, unit=512, **whose):
        made.append(RecordFile(file, head(rows, row_bytes, **whose), reads, unit))
        return made[-1]

    yield open_
    for each in made:
        each.close()
    reads.close()


@pytest.mark.parametrize(
    ("rows", "row_bytes", "bytes_"), [(1000, 40, 64), (700, 128, 256), (9, 4088, 4096), (20, 5000, 8192), (1, 1, 64)]
)
@pytest.mark.parametrize("unit", UNITS)
def test_every_row_comes_back(tmp_path, opened, rows, row_bytes, bytes_, unit):
    made = written(tmp_path / "records", rows, row_bytes)
    file = opened(tmp_path / "records", rows, row_bytes, unit)
    assert file.unit in (unit, 4096)  # of disks that cannot be asked for less
    assert record_bytes(row_bytes) == bytes_ and file.records == rows
    assert (tmp_path / "records").stat().st_size == 4096 + -(-rows * bytes_ // 4096) * 4096
    rng = np.random.default_rng(2)
    for numbers in (np.arange(rows), rng.integers(0, rows, 3), rng.permutation(rows), np.zeros(0, np.int64)):
        np.testing.assert_array_equal(file.read(numbers), made[numbers])
    before = file.units_read
    file.read(np.zeros(50, np.int64))
    assert file.units_read - before == max(1, bytes_ // file.unit), "a unit that many rows lie in is read once"


def test_reading_takes_little_memory_beside_the_rows(tmp_path, opened, monkeypatch):
    made = written(tmp_path / "records", 20_000, 40)
    file = opened(tmp_path / "records", 20_000, 40)
    monkeypatch.setattr(records, "_PART_BYTES", 2**15)
    numbers = np.random.default_rng(4).permutation(20_000)
    tracemalloc.start()
    found = file.read(numbers)
    beside = tracemalloc.get_traced_memory()[1] - found.nbytes - numbers.nbytes
    tracemalloc.stop()
    np.testing.assert_array_equal(found, made[numbers])
    assert beside < 500_000


def test_any_damage_is_named_and_not_given_out(tmp_path, opened):
    """Every bit of one record; two records in each other's place; and a file that was cut off."""
    made = written(tmp_path / "records", 100, 50)
    whole = (tmp_path / "records").read_bytes()
    at, others = 4096 + 64 * 37, np.delete(np.arange(100), 37)
    for bit in range(64 * 8):
        damaged = bytearray(whole)
        damaged[at + bit // 8] ^= 1 << bit % 8
        (tmp_path / "records").write_bytes(damaged)
        file = opened(tmp_path / "records", 100, 50)
        with pytest.raises(CorruptRecordError, match=r"record 37 of .*records is damaged"):
            file.read(np.arange(100))
        if bit % 64 == 0:
            np.testing.assert_array_equal(file.read(others), made[others])
    swapped = bytearray(whole)
    swapped[at : at + 64], swapped[at + 64 : at + 128] = whole[at + 64 : at + 128], whole[at : at + 64]
    (tmp_path / "records").write_bytes(swapped)
    with pytest.raises(CorruptRecordError, match="record 37 .* and so do 1 more of 100"):
        opened(tmp_path / "records", 100, 50).read(np.arange(100))
    (tmp_path / "records").write_bytes(whole)
    file = opened(tmp_path / "records", 100, 50)
    os.truncate(tmp_path / "records", 4096 + 64 * 30)
    with pytest.raises(CorruptRecordError, match="cut off"):
        file.read(np.array([99]))
    assert len(os.listdir("/proc/self/fd")) < 2000


def test_a_file_of_another_head_or_size_is_refused_when_it_is_opened(tmp_path, opened):
    """Every bit of what its first block says; a block of spaces or brackets; another number of rows; and its end."""
    file = tmp_path / "records"
    written(file, 100, 50)
    whole = file.read_bytes()
    said = len(whole[:4096].rstrip())
    blocks = [b"[" * 4096, b" " * 4096, b"1" * 4096, b"\xff" * 4096, whole[:4095] + b"\0", b""]
    for bit in range(8 * said):
        block = bytearray(whole[:4096])
        block[bit // 8] ^= 1 << bit % 8
        blocks.append(bytes(block))
    for block in blocks:
        file.write_bytes(block + whole[4096:] if block else b"")
        with pytest.raises(CorruptRecordError, match=re.escape(f"{file} ")) as raised:
            opened(file, 100, 50)
        assert "\n" not in str(raised.value)
    for content in (whole[:-1], whole + b"\0", whole[:4096]):
        file.write_bytes(content)
        with pytest.raises(CorruptRecordError, match=rf"has {len(content):,} bytes instead of 12,288"):
            opened(file, 100, 50)
    file.write_bytes(whole)
    for sizes in ((99, 50), (100, 51)):
        with pytest.raises(CorruptRecordError, match="no file of records, or its first block is damaged"):
            opened(file, *sizes)
    with pytest.raises(CorruptRecordError, match="belongs to another export. Copy the whole export"):
        opened(file, 100, 50, owner="there")
    with pytest.raises(CorruptRecordError, match="holds rows of the table 't' instead of 'u'"):
        opened(file, 100, 50, table="u")
    file.write_bytes(whole.replace(records.FORMAT.encode(), b"recjax-records/1"))
    with pytest.raises(CorruptRecordError, match="is of the format recjax-records/1, .*Export the model again"):
        opened(file, 100, 50)


@pytest.mark.parametrize("whose", [{"owner": "there"}, {"table": "u"}])
def test_records_of_another_file_are_not_given_out(tmp_path, opened, whose):
    """As a copy over an older file leaves them that broke off: the first block and some rows are new."""
    made = written(tmp_path / "new", 100, 50)
    older = records.RecordWriter(tmp_path / "old", head(100, 50, **whose))
    older.write(np.arange(100), made)  # the same rows
    older.close()
    mixed = bytearray((tmp_path / "old").read_bytes())
    mixed[: 4096 + 64 * 60] = (tmp_path / "new").read_bytes()[: 4096 + 64 * 60]
    (tmp_path / "mixed").write_bytes(mixed)
    file = opened(tmp_path / "mixed", 100, 50)
    np.testing.assert_array_equal(file.read(np.arange(60)), made[:60])
    for number in range(60, 100):
        with pytest.raises(CorruptRecordError, match=rf"record {number} of .*mixed is damaged, or of another file"):
            file.read(np.array([number]))


def test_of_a_thousand_damaged_records_none_is_given_out(tmp_path, opened):
    made = written(tmp_path / "records", 4000, 56)
    content = np.fromfile(tmp_path / "records", np.uint8)
    rng = np.random.default_rng(3)
    damaged = np.sort(rng.permutation(4000)[:1000])
    content[4096 + 64 * damaged + rng.integers(0, 64, 1000)] ^= rng.integers(1, 256, 1000).astype(np.uint8)
    content.tofile(tmp_path / "records")
    cache = CachedRows({"t": opened(tmp_path / "records", 4000, 56)}, read_together, 4000 * 61)
    named = []
    for record in damaged.tolist():
        try:
            cache.rows({"t": np.array([record])})
        except CorruptRecordError as error:
            named.append(int(str(error).split()[1]))
    assert named == damaged.tolist()
    intact = np.delete(np.arange(4000), damaged)
    for _ in range(2):
        np.testing.assert_array_equal(cache.rows({"t": intact})["t"], made[intact])
    assert (cache.hits, cache.misses) == ({"t": 3000}, {"t": 3000})


@pytest.mark.parametrize("unit", UNITS)
def test_files_are_read_together(tmp_path, opened, unit):
    """Rows of files that are alike, and of one with longer ones; a unit is read once, whoever asks; damage is named."""
    names = {"a": 40, "b": 40, "c": 700}
    made = {name: written(tmp_path / name, 300, size, seed, name) for seed, (name, size) in enumerate(names.items())}
    files = {name: opened(tmp_path / name, 300, size, unit, table=name) for name, size in names.items()}
    rng = np.random.default_rng(0)
    of, numbers, others = rng.integers(0, 2, 200), rng.integers(0, 300, 200), rng.integers(0, 300, 50)
    asked = [(of, numbers, [files["a"], files["b"]]), (np.zeros(50, int), others, [files["c"]])]
    short, long = read_together(asked)
    np.testing.assert_array_equal(short, np.stack([made["a"], made["b"]])[of, numbers])
    np.testing.assert_array_equal(long, made["c"][others])
    per = files["a"].unit // 64
    for place, name in enumerate("ab"):
        assert files[name].units_read == len({number // per for number in numbers[of == place].tolist()})
    assert read_together([]) == []
    content = bytearray((tmp_path / "b").read_bytes())
    content[4096 + 64 * 7] ^= 1
    (tmp_path / "b").write_bytes(content)
    files["d"] = opened(tmp_path / "b", 300, 40, unit, table="b")
    with pytest.raises(CorruptRecordError, match="record 7 of .*b is damaged, or .*: its checksum differs. Copy"):
        read_together([(np.array([0, 1]), np.array([7, 7]), [files["a"], files["d"]]), asked[1]])


def test_cells_that_follow_each_other_are_pieces() -> None:
    """Pieces have at most so many bytes; a cell is a record, or a unit of several."""
    assert records.Cells.of(1024, 512) == records.Cells(1, 1024)
    assert records.Cells.of(128, 512) == records.Cells(4, 512)
    cells, numbers = records.Cells(1, 1024), np.array([0, 1, 2, 5, 6, 9])
    assert cells.firsts(numbers, 2048).tolist() == [0, 2, 3, 5]
    assert cells.firsts(numbers, 512).tolist() == [0, 1, 2, 3, 4, 5]
    assert cells.firsts(numbers[:0], 512).tolist() == []
    held = np.zeros((6, 1024), np.uint8)
    assert (cells.pieces(np.array([0, 3, 5]), 7, numbers, held) - [0, 0, 0, held.ctypes.data]).tolist() == [
        [7, 4096, 3072, 0],
        [7, 4096 + 5 * 1024, 2048, 3072],
        [7, 4096 + 9 * 1024, 1024, 5120],
    ]


def test_checksums_are_those_of_the_formula() -> None:
    """Worked with whole numbers of any length."""
    payload = np.random.default_rng(0).integers(0, 256, (20, 40), np.uint8)
    odd = [int(each) for each in records._odd(11)]
    for number, row in enumerate(payload):
        words = [int.from_bytes(row[4 * n : 4 * n + 4].tobytes(), "little") for n in range(10)]
        seed = head(1, 1, owner=str(number)).seed
        expected = (sum(map(int.__mul__, words, odd[1:])) + (7 * number + 1) * odd[0] + seed) % 2**64
        assert int(records.checksums(payload[number : number + 1], np.array([7 * number]), seed)[0]) == expected
