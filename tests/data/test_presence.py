"""Presence of items, against counts by brute force and a case worked by hand."""

from __future__ import annotations

import collections

import numpy as np
import pytest

from recjax.data.batch import Bags, Batch
from recjax.data.presence import count_presence, describe, presence_of, to_text
from recjax.data.synthetic.stream import ZipfStream
from recjax.errors import ConfigError


def batch(seed: int, size: int = 20) -> Batch:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 4, size)
    bags = {
        "a": Bags(rng.integers(0, 9, (size, 2))),
        "b": Bags(rng.zipf(1.5, int(lengths.sum())) % 50, lengths),
        "c": Bags(rng.integers(0, 9, (size, 1))),
    }
    zeros = np.zeros(size, np.float32)
    return Batch(np.zeros((size, 0), np.float32), bags, zeros, zeros)


def test_counts_are_those_of_brute_force() -> None:
    """Shares of 7 samples of 20, the last shorter; features a and c share a table."""
    found = count_presence(map(batch, range(5)), {"t": 9, "u": 50}, [("a", "t"), ("b", "u"), ("c", "t")], 20, 3)
    for table, features in (("t", "ac"), ("u", "b")):
        present, named = collections.Counter[int](), collections.Counter[int]()
        for one in map(batch, range(5)):
            shares: set[tuple[int, int]] = set()
            for bags in (one.bags[name] for name in features):
                for sample, id in zip(bags.samples().tolist(), bags.ids.ravel().tolist(), strict=True):
                    shares.add((sample // 7, id))
                    named[id] += 1
            present.update(id for _, id in shares)
        items = found.tables[table]
        assert dict(zip(items.ids_U.tolist(), items.present_U.tolist(), strict=True)) == present
        assert dict(zip(items.ids_U.tolist(), items.found_U.tolist(), strict=True)) == named
        np.testing.assert_allclose(found.probability(table), [present[id] / 15 for id in sorted(present)])
        np.testing.assert_allclose(found.occurrences(table), [named[id] / 5 for id in sorted(named)])


def test_by_hand() -> None:
    """Ids 0 0 1, 0 2 2, 0 3 4: item 0 is in all three batches and takes 4 of 9 look-ups."""

    def one(ids: list[int]) -> Batch:
        zeros = np.zeros(3, np.float32)
        return Batch(np.zeros((3, 0), np.float32), {"a": Bags(np.array(ids)[:, None])}, zeros, zeros)

    given = [one([0, 0, 1]), one([0, 2, 2]), one([0, 3, 4])]
    found = describe(count_presence(given, {"t": 7}, [("a", "t")], 3))
    assert found["histogram"] == {"1": 4, "3": 1}
    assert found["accesses"] == {"1": 1.0, "3": pytest.approx(4 / 9)}
    assert found["all"]["items_for"] == [2, 5, 5] and found["all"]["items"] == 5 and found["all"]["ids"] == 9
    assert found["new"] == pytest.approx(2 / 3)  # of the third batch; of the second it is a half
    assert "66.67%" in to_text(found)


def test_of_a_source() -> None:
    source = ZipfStream(rows=(30, 200), train_rows=400).open()
    one, same = (describe(presence_of(source, 3, 100, seed=seed)) for seed in (1, 1))
    assert one == same != describe(presence_of(source, 3, 100, seed=2))
    assert one["batches"] == 3 and describe(presence_of(source, 9, 100))["batches"] == 4  # that is all there are
    with pytest.raises(ConfigError, match="--batches is 0"):
        presence_of(source, 0, 100)
