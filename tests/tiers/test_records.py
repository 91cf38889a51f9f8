"""Records on disk: what is read is what was written, or is named; and the cache is a clock."""

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recjax.tiers.records import CachedRows, CorruptRecordError, RecordFile, RecordWriter, components, record_bytes


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

    def open_(file):
        made.append(RecordFile(file))
        return made[-1]

    yield open_
    for each in made:
        each.close()


@pytest.mark.parametrize(
    ("rows", "row_bytes", "bytes_"), [(1000, 40, 64), (700, 128, 256), (9, 4088, 4096), (20, 5000, 8192), (1, 1, 64)]
)
def test_every_row_comes_back(tmp_path, opened, rows, row_bytes, bytes_):
    made = written(tmp_path / "records", rows, row_bytes)
    file = opened(tmp_path / "records")
    assert record_bytes(row_bytes) == bytes_ and file.records == rows
    assert (tmp_path / "records").stat().st_size == 4096 + -(-rows * bytes_ // 4096) * 4096
    rng = np.random.default_rng(2)
    for numbers in (np.arange(rows), rng.integers(0, rows, 3), rng.permutation(rows), np.zeros(0, np.int64)):
        np.testing.assert_array_equal(file.read(numbers), made[numbers])
    before = file.blocks_read
    file.read(np.zeros(50, np.int64))
    assert file.blocks_read - before == max(1, bytes_ // 4096), "a block that many rows lie in is read once"


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


def test_tables_that_share_a_feature_go_together():
    lookups = [("u", "U"), ("u", "u.linear"), ("i", "I"), ("j", "I"), ("k", "K"), ("j", "j.linear"), ("m", "M")]
    groups = components(lookups, ["U", "u.linear", "I", "j.linear", "M"])
    assert sorted(groups) == [(["i", "j"], ["I", "j.linear"]), (["m"], ["M"]), (["u"], ["U", "u.linear"])]
    assert components(lookups, []) == []
