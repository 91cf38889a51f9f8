"""Records on disk: what is read is what was written, or is named; and the cache is a clock."""

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
    file, cache = opened(tmp_path / "records"), CachedRows(opened(tmp_path / "records"), 4000 * 61)
    named = []
    for record in range(4000):
        try:
            np.testing.assert_array_equal(cache.rows(np.array([record]))[0], made[record])
        except CorruptRecordError as error:
            named.append(int(str(error).split()[1]))
    assert named == damaged.tolist()
    intact = np.delete(np.arange(4000), damaged)
    np.testing.assert_array_equal(file.read(intact), made[intact])
    assert cache.misses == 3000, "what is damaged does not enter the cache"


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

    def ask(self, numbers):
        hits = [n for n in numbers if n in self.rows]
        for n in hits:
            self.used[self.rows.index(n)] = True
        chosen = []
        for _ in [n for n in numbers if n not in hits][: len(self.rows)]:
            while self.used[self.hand] or self.hand in chosen:
                self.used[self.hand] = False
                self.hand = (self.hand + 1) % len(self.rows)
            chosen.append(self.hand)
            self.hand = (self.hand + 1) % len(self.rows)
        for slot, n in zip(chosen, [n for n in numbers if n not in hits], strict=False):
            self.rows[slot], self.used[slot] = n, False
        return len(hits)


@settings(max_examples=60)
@given(
    st.integers(1, 70),
    st.lists(st.lists(st.integers(0, 59), unique=True, min_size=1, max_size=30), min_size=1, max_size=25),
)
def test_the_cache_is_a_clock(table, size, asked):
    made, file = table
    cache = CachedRows(file, size * 25)
    clock = Clock(min(size, 60))
    for numbers in asked:
        before = cache.hits
        np.testing.assert_array_equal(cache.rows(np.array(numbers)), made[numbers])
        assert cache.hits - before == clock.ask(numbers)
    assert cache.hits + cache.misses == sum(map(len, asked))
    kept = {n for n in clock.rows if n is not None}
    assert kept == set(np.flatnonzero(cache._slot_of >= 0).tolist())
