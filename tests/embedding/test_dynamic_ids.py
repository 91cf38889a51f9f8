"""Rows that are given to keys: against plain dicts, and against tables whose ids are numbers of rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from recjax.embedding.dynamic import id_map
from recjax.embedding.dynamic.id_map import IdMap
from recjax.embedding.dynamic.key_index import ABSENT, KeyIndex, distinct_keys
from recjax.embedding.spec import DynamicIds

# Few of them, so that they come again; the extremes; and some whose search begins at one cell.
SAME_CELL = [(n << 40) * pow(0x9E3779B97F4A7C15, -1, 1 << 64) % 2**64 for n in range(9)]
KEYS = st.sampled_from([*range(-3, 12), 2**63 - 1, -(2**63), *(k - 2**64 if k >= 2**63 else k for k in SAME_CELL)])


class Oracle:
    """The rules of `id_map` with dicts, key by key."""

    def __init__(self, options: DynamicIds) -> None:
        self.options, self.batch = options, 0
        self.row: dict[int, int] = {}
        self.last: dict[int, int] = {}  # of a row
        self.times: dict[int, int] = {}  # of a row
        self.waiting: dict[int, tuple[int, int]] = {}  # key -> last, times
        self.counts = dict.fromkeys(id_map.COUNTS, 0)

    def advance(self, keys: list[int]) -> tuple[list[int], list[tuple[int, int]]]:
        options, capacity = self.options, self.options.capacity
        self.batch += 1
        seen: dict[int, int] = {}
        for key in keys:
            seen[key] = seen.get(key, 0) + 1
        counted = options.admit_after > 1 or options.evict == "frequency"
        for key in seen.keys() & self.row.keys():
            self.last[self.row[key]] = self.batch
            self.times[self.row[key]] += seen[key]
        new = {key: n + self.waiting.get(key, (0, 0))[1] for key, n in seen.items() if key not in self.row}
        qualified = [key for key, n in new.items() if n >= options.admit_after]
        if options.evict == "frequency":
            qualified.sort(key=lambda key: -new[key])
        given_rows = []
        for key in qualified:
            if len(self.row) < capacity:
                at = len(self.row)
            else:
                others = {row: k for k, row in self.row.items() if self.last[row] < self.batch}
                frequency = options.evict == "frequency"
                at = min(others, key=lambda r: (self.times[r] * frequency, self.last[r], r), default=-1)
                if at < 0 or (frequency and self.times[at] >= new[key]):
                    self.counts["turned_away"] += 1
                    continue
                del self.row[others[at]]
                self.counts["evicted"] += 1
            self.row[key], self.last[at], self.times[at] = at, self.batch, new[key]
            self.counts["admitted"] += 1
            given_rows.append((at, key))
        if counted:
            for key, n in new.items():
                self.waiting.pop(key, None)
                if key not in self.row:
                    self.waiting[key] = (self.batch, n)
            most = options.waiting or capacity
            if len(self.waiting) > most:
                oldest = sorted(self.waiting, key=lambda key: (self.waiting[key][0], key))
                for key in oldest[: len(oldest) - (most - most // 4)]:
                    del self.waiting[key]
                    self.counts["forgotten"] += 1
        rows = [self.row.get(key, capacity) for key in keys]
        self.counts["ids"] += len(keys)
        self.counts["unknown_ids"] += rows.count(capacity)
        return rows, given_rows


def check(options: DynamicIds, batches: list[list[int]], again: int) -> None:
    """Compares batch by batch; before batch `again` the map is saved, and another one goes on."""
    oracle, found = Oracle(options), IdMap(options)
    for number, keys in enumerate(batches):
        if number == again:
            state, found = found.state(), IdMap(options)
            found.load(state)
            assert all(np.array_equal(array, state[name]) for name, array in found.state().items())
        rows, given_rows = oracle.advance(keys)
        rows_L, admitted = found.advance(np.array(keys, np.int64))
        assert rows_L.tolist() == rows
        assert list(zip(admitted.rows_K.tolist(), admitted.keys_K.tolist(), strict=True)) == given_rows
        assert found.counts == oracle.counts
        assert (found.held, found.waiting) == (len(oracle.row), len(oracle.waiting))
        asked = [*range(-3, 12), *keys]
        assert found.find(np.array(asked)).tolist() == [oracle.row.get(key, options.capacity) for key in asked]


OPTIONS = st.builds(
    DynamicIds, st.integers(1, 6), st.integers(1, 3), st.sampled_from(["age", "frequency"]), st.integers(0, 5)
)


@given(OPTIONS, st.lists(st.lists(KEYS, max_size=12), max_size=12), st.integers(0, 12))
@example(DynamicIds(2, 1, "frequency"), [[1] * 5 + [2], [2] + [3] * 6], 12)  # key 2 is named, and named least
def test_keys_get_rows_as_dicts_say(options: DynamicIds, batches: list[list[int]], again: int) -> None:
    check(options, batches, again)


@pytest.mark.parametrize("evict", ["age", "frequency"])
def test_many_keys_get_rows_as_dicts_say(evict: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(id_map, "_LEAST_LOW", 8)
    rng = np.random.default_rng(0)
    batches = [(rng.zipf(1.3, 60) % 900 + number * 3).tolist() for number in range(80)]
    check(DynamicIds(200, 2, evict, 50), batches, 40)


@given(st.lists(st.lists(KEYS, unique=True, max_size=20), max_size=8))
def test_an_index_finds_what_a_dict_finds(turns: list[list[int]]) -> None:
    index, truth = KeyIndex(), dict[int, int]()
    for keys in turns:
        asked = np.array([*keys, *keys, 5, -1], np.int64)
        assert index.find(asked).tolist() == [truth.get(key, ABSENT) for key in asked.tolist()]
        there, new = [k for k in keys if k in truth], [k for k in keys if k not in truth]
        index.remove(np.array(there, np.int64))
        for key in there:
            del truth[key]
        start = max(truth.values(), default=-1) + 1
        truth |= {key: start + n for n, key in enumerate(new)}
        index.add(np.array(new, np.int64), np.arange(start, start + len(new), dtype=np.int32))
        assert len(index) == len(truth)


@given(st.lists(KEYS, max_size=30))
def test_equal_keys_are_brought_together(keys: list[int]) -> None:
    first_U, number_L = distinct_keys(np.array(keys, np.int64))
    order = list(dict.fromkeys(keys))
    assert first_U.tolist() == [keys.index(key) for key in order]
    assert number_L.tolist() == [order.index(key) for key in keys]
