"""Presence of items, against counts by brute force and a case worked by hand."""

from __future__ import annotations

import collections

import numpy as np
import pytest
from scipy.stats import binom
from support.zipf import law

from recjax.data.batch import Bags, Batch
from recjax.data.presence import count_presence, describe, presence_of, seek, to_text
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


def test_the_next_batch_by_the_law_of_the_ids() -> None:
    """Items in more than m of n batches take what the binomial law says of another batch, and so do new ones."""
    n, B, V = 40, 256, 4000
    config = ZipfStream(rows=(V,), ids_per_bag=(2,), exponent=1.2, train_rows=(n + 60) * B, distinct_blocks=10**6)
    looks, stream = 60, config.open()
    blocks = [stream.read("train", k) for k in range(len(stream.row_counts("train")))]
    ids = np.concatenate([block.bags["sparse_0"].ids for block in blocks])
    bags = [Bags(ids[k * B : (k + 1) * B]) for k in range(n + looks)]
    zeros = np.zeros(B, np.float32)
    given = [Batch(np.zeros((B, 0), np.float32), {"a": one}, zeros, zeros) for one in bags]
    features = [("a", "t")]
    counted = count_presence(given[:n], {"t": V}, features, B)
    found = [describe(seek(counted, one, features))["next"] for one in given[n:]]
    p_V = law(V, 1.2)
    q_V = 1 - (1 - p_V) ** (2 * B)
    for at, least in enumerate((38, 32, 20, 8, 2, 0)):
        line = [one["in"][at] for one in found]
        assert {of["more_than"] for of in line} == {least}
        present_V = binom.sf(least, n, q_V)
        assert np.mean([of["accesses"] for of in line]) == pytest.approx((p_V * present_V).sum(), abs=0.02)
        assert np.mean([of["distinct"] for of in line]) == pytest.approx((q_V * present_V).sum() / q_V.sum(), abs=0.02)
        share = present_V.sum() / (1 - (1 - q_V) ** n).sum()
        assert line[0]["items"] == pytest.approx(share, rel=0.15, abs=0.002)
    unseen_V = (1 - q_V) ** n
    assert np.mean([one["unseen"]["accesses"] for one in found]) == pytest.approx((p_V * unseen_V).sum(), abs=0.01)
    distinct = (q_V * unseen_V).sum() / q_V.sum()
    assert np.mean([one["unseen"]["distinct"] for one in found]) == pytest.approx(distinct, abs=0.02)


def test_the_next_batch_by_hand() -> None:
    """Ids 0 0 1, 0 2 2, 0 3 4, then 0 2 9: item 0 is in more than two batches, 2 in one, and 9 in none."""

    def one(ids: list[int]) -> Batch:
        zeros = np.zeros(3, np.float32)
        return Batch(np.zeros((3, 0), np.float32), {"a": Bags(np.array(ids)[:, None])}, zeros, zeros)

    features = [("a", "t")]
    counted = count_presence([one([0, 0, 1]), one([0, 2, 2]), one([0, 3, 4])], {"t": 10}, features, 3)
    told = describe(seek(counted, one([0, 2, 9]), features))
    assert told["next"]["in"][0] == {"more_than": 2, "items": 0.2, "accesses": pytest.approx(1 / 3), "distinct": 1 / 3}
    assert told["next"]["in"][-1]["accesses"] == pytest.approx(2 / 3)
    assert told["next"]["unseen"] == {"accesses": pytest.approx(1 / 3), "distinct": pytest.approx(1 / 3)}
    assert "in more than" in to_text(told)
    assert describe(counted)["next"] is None
