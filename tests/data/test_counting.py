"""Sorted runs against collections.Counter, with limits so small that everything is spilled and merged in slices."""

import collections

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recjax.data.prepare import counting
from recjax.data.prepare.counting import Counter


@pytest.mark.parametrize("dtype", ["uint32", "int64", "uint64", "S3"])
@given(
    batches=st.lists(st.dictionaries(st.integers(0, 40), st.integers(0, 5), max_size=20), max_size=12),
    min_count=st.integers(1, 6),
    limit=st.integers(1, 60),
    piece=st.integers(1, 30),
)
def test_sums_are_those_of_one_count(tmp_path_factory, dtype, batches, min_count, limit, piece):
    counter = Counter(tmp_path_factory.mktemp("runs"), limit)
    truth = collections.Counter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counting, "_SLICE", piece)
        for batch in batches:
            values = np.array([f"{value:03}" if dtype == "S3" else value for value in sorted(batch)], dtype)
            counter.add(values, np.array([batch[value] for value in sorted(batch)], np.int64))
            truth.update(batch)
        values, counts = counter.total(min_count)
    expected = sorted((value, count) for value, count in truth.items() if count >= min_count and count > 0)
    assert counts.tolist() == [count for _, count in expected]
    assert [int(value) for value in values.tolist()] == [value for value, _ in expected]


def test_what_exceeds_the_memory_goes_to_the_disk(tmp_path):
    counter = Counter(tmp_path, memory_entries=100)
    for start in range(0, 1000, 50):
        counter.add(np.arange(start, start + 60, dtype=np.uint32), np.ones(60, np.int64))
    assert len(list(tmp_path.glob("run*.values.npy"))) > 5
    values, counts = counter.total()
    assert values.tolist() == list(range(1010)) and counts.sum() == 20 * 60


def test_counts_beyond_32_bits(tmp_path):
    counter = Counter(tmp_path)
    for _ in range(3):
        counter.add(np.array([7], np.uint32), np.array([2**32], np.int64))
    assert counter.total()[1].tolist() == [3 * 2**32]
