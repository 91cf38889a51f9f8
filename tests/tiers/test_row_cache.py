"""The cache of rows on disk: what it gives are the rows, and each of its sets is a clock."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.records import head, written

from recjax.tiers.records import CorruptRecordError, RecordFile, read_together
from recjax.tiers.row_cache import CachedRows
from recjax.tiers.transfers import Transfers

NAMES = ("a", "b", "c")  # the last one with longer rows


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """Rows of three tables, and their files."""
    folder, reads = tmp_path_factory.mktemp("tables"), Transfers()
    sizes = {"a": 20, "b": 20, "c": 30}
    made = {name: written(folder / name, 60, sizes[name], seed, name) for seed, name in enumerate(NAMES)}
    files = {name: RecordFile(folder / name, head(60, sizes[name], name), reads) for name in NAMES}
    yield made, files
    for file in files.values():
        file.close()
    reads.close()


class Clock:
    """The algorithm slot by slot."""

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


ASKED = st.lists(
    st.lists(st.lists(st.integers(0, 59), unique=True, max_size=30), min_size=3, max_size=3), min_size=1, max_size=25
)


@settings(max_examples=40)
@given(st.integers(1, 70), ASKED)
def test_each_set_of_the_cache_is_a_clock(tables, size, asked):
    """Counts are of each table for itself, though all are asked together; some calls leave a table out."""
    made, files = tables
    cache = CachedRows(files, read_together, size * 25, 16)
    clocks, sets, hits = {}, {}, dict.fromkeys(NAMES, 0)
    for name in NAMES:
        (group,) = (group for group in cache._groups if name in group.files)
        slots = min(60, size * 25 // (made[name].shape[1] + 5))
        if not slots:
            assert cache.room[name] == 0
            continue
        sets[name] = group.set_of(np.full(60, group.places[name]), np.arange(60)).tolist()
        count = 4 if slots == 60 else max(1, slots // 16)
        assert cache.room[name] == (64 if slots == 60 else slots // count * count)
        assert len(set(sets[name])) <= count
        clocks[name] = {at: Clock(cache.room[name] // count) for at in set(sets[name])}
    assert not set(sets["a"]) & set(sets["b"])  # which lie in one array
    for lists in asked:
        numbers = {name: np.array(x) for name, x in zip(NAMES, lists, strict=True) if x}
        found = cache.rows(numbers)
        assert found.keys() == numbers.keys()
        for name, rows in found.items():
            np.testing.assert_array_equal(rows, made[name][numbers[name]])
            if name not in clocks:
                continue
            wanted, own = numbers[name].tolist(), clocks[name]
            there = [n for n in wanted if own[sets[name][n]].mark(n)]
            hits[name] += len(there)
            for n in wanted:
                if n not in there:
                    own[sets[name][n]].enter(n)
    assert cache.hits == hits
    for place, name in enumerate(NAMES):
        assert cache.hits[name] + cache.misses[name] == sum(len(lists[place]) for lists in asked)


def test_without_room_every_row_is_read(tables):
    made, files = tables
    cache = CachedRows(files, read_together, 24)
    for _ in range(2):
        np.testing.assert_array_equal(cache.rows({"b": np.array([3, 59])})["b"], made["b"][[3, 59]])
    assert (cache.room["b"], cache.hits["b"], cache.misses["b"]) == (0, 0, 4)
    cache.resize(60 * 25)
    for _ in range(2):
        np.testing.assert_array_equal(cache.rows({"b": np.arange(60)})["b"], made["b"])
    assert (cache.room["b"], cache.hits["b"], cache.misses["b"]) == (64, 60, 60)


def test_what_could_not_be_read_does_not_enter(tables):
    """Nor does what was read with it: the next one who asks gets the same error, or the row."""
    made, files = tables

    def fails(asked):
        raise CorruptRecordError("record 5")

    cache = CachedRows(files, fails, 60 * 25)
    for _ in range(2):
        with pytest.raises(CorruptRecordError):
            cache.rows({"a": np.array([5]), "b": np.array([6])})
    cache._read = read_together
    np.testing.assert_array_equal(cache.rows({"b": np.array([6])})["b"], made["b"][[6]])
    assert (cache.hits["b"], cache.misses["b"]) == (0, 1)
