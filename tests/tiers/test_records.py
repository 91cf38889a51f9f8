"""Records on disk: what is read is what was written, or is named; and the cache is a clock."""

import os
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recjax.tiers import records
from recjax.tiers.records import UNITS, CachedRows, CorruptRecordError, RecordFile, RecordWriter, record_bytes


def written(file, rows, row_bytes, seed=0):
    made = np.random.default_rng(seed).integers(0, 256, (rows, row_bytes), np.uint8)
    writer = RecordWriter(file, rows, row_bytes)
    order = np.random.default_rng(1).permutation(rows)
    for part in np.array_split(order, 3):
        writer.write(part, made[part])
    writer.close()
    return made


@pytest.fixture
def opened(tmp_path):
    made = []

    def open_(file, unit=512):
        made.append(RecordFile(file, unit))
        return made[-1]

    yield open_
    for each in made:
        each.close()


@pytest.mark.parametrize(
    ("rows", "row_bytes", "bytes_"), [(1000, 40, 64), (700, 128, 256), (9, 4088, 4096), (20, 5000, 8192), (1, 1, 64)]
)
@pytest.mark.parametrize("unit", UNITS)
def test_every_row_comes_back(tmp_path, opened, rows, row_bytes, bytes_, unit):
    made = written(tmp_path / "records", rows, row_bytes)
    file = opened(tmp_path / "records", unit)
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
    file = opened(tmp_path / "records")
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
        file = opened(tmp_path / "records")
        with pytest.raises(CorruptRecordError, match=r"record 37 of .*records is damaged"):
            file.read(np.arange(100))
        if bit % 64 == 0:
            np.testing.assert_array_equal(file.read(others), made[others])
    swapped = bytearray(whole)
    swapped[at : at + 64], swapped[at + 64 : at + 128] = whole[at + 64 : at + 128], whole[at : at + 64]
    (tmp_path / "records").write_bytes(swapped)
    with pytest.raises(CorruptRecordError, match="record 37 .* and so do 1 more of 100"):
        opened(tmp_path / "records").read(np.arange(100))
    (tmp_path / "records").write_bytes(whole[: 4096 + 64 * 30])
    with pytest.raises(CorruptRecordError, match="cut off"):
        opened(tmp_path / "records").read(np.array([99]))
    for head in (b"", b"[" + whole[1:], whole.replace(b'"row_bytes": 50', b'"row_bytes": 90')):
        (tmp_path / "records").write_bytes(head)
        with pytest.raises(CorruptRecordError, match="no file of records"):
            opened(tmp_path / "records")
    assert len(os.listdir("/proc/self/fd")) < 2000


def test_of_a_thousand_damaged_records_none_is_given_out(tmp_path, opened):
    made = written(tmp_path / "records", 4000, 56)
    content = np.fromfile(tmp_path / "records", np.uint8)
    rng = np.random.default_rng(3)
    damaged = np.sort(rng.permutation(4000)[:1000])
    content[4096 + 64 * damaged + rng.integers(0, 64, 1000)] ^= rng.integers(1, 256, 1000).astype(np.uint8)
    content.tofile(tmp_path / "records")
    cache = CachedRows(opened(tmp_path / "records"), 4000 * 61)
    named = []
    for record in damaged.tolist():
        try:
            cache.rows(np.array([record]))
        except CorruptRecordError as error:
            named.append(int(str(error).split()[1]))
    assert named == damaged.tolist()
    intact = np.delete(np.arange(4000), damaged)
    for _ in range(2):
        np.testing.assert_array_equal(cache.rows(intact), made[intact])
    assert (cache.hits, cache.misses) == (3000, 3000)


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    folder = tmp_path_factory.mktemp("table")
    made = written(folder / "records", 60, 20)
    file = RecordFile(folder / "records")
    yield made, file
    file.close()


class Clock:
    """The algorithm as it is told, slot by slot."""

    def __init__(self, size):
        self.rows, self.used, self.hand = [None] * size, [False] * size, 0

    def mark(self, number):
        if number in self.rows:
            self.used[self.rows.index(number)] = True
        return number in self.rows

    def enter(self, number):
        while self.used[self.hand]:
            self.used[self.hand] = False
            self.hand = (self.hand + 1) % len(self.rows)
        self.rows[self.hand] = number
        self.hand = (self.hand + 1) % len(self.rows)


@settings(max_examples=40)
@given(
    st.integers(1, 70),
    st.lists(st.lists(st.integers(0, 59), unique=True, min_size=1, max_size=30), min_size=1, max_size=25),
)
def test_each_set_of_the_cache_is_a_clock(table, size, asked):
    made, file = table
    cache = CachedRows(file, size * 25, 16)
    sets = cache.set_of(np.arange(60)).tolist()
    count, ways = (4, 16) if size >= 60 else (1, size) if size < 32 else (size // 16, size // (size // 16))
    assert cache.room == count * ways and set(sets) <= set(range(count))
    clocks = [Clock(ways) for _ in range(count)]
    for numbers in asked:
        before = cache.hits
        np.testing.assert_array_equal(cache.rows(np.array(numbers)), made[numbers])
        hits = [n for n in numbers if clocks[sets[n]].mark(n)]
        for n in numbers:
            if n not in hits:
                clocks[sets[n]].enter(n)
        assert cache.hits - before == len(hits)
    assert cache.hits + cache.misses == sum(map(len, asked))
    kept = {n for clock in clocks for n in clock.rows if n is not None}
    assert kept == set(cache._row_of[cache._row_of >= 0].tolist())
