"""The closed form of hits against a cache in plain Python, and by hand; nodes by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from recjax.data.source import mean_ids
from recjax.data.synthetic.clicks import Synthetic
from recjax.data.synthetic.stream import ZipfStream
from recjax.embedding.optim import Sgd
from recjax.embedding.spec import FeatureSpec, TableSpec
from recjax.lab.predict.nodes import Need, Node, Table, bounds, compared, fewest
from recjax.planning.tier_model import Classes, cache, table_classes, without_first

SEES_ALL = 10**6


def drawn(classes: Classes, steps: int) -> list[set[int]]:
    """Batches that name each row by chance."""
    rng = np.random.default_rng(1)
    q = np.repeat(classes.q_K, classes.rows_K.astype(int))
    return [set(np.flatnonzero(rng.random(len(q)) < q).tolist()) for _ in range(steps)]


def counted(batches: list[set[int]], slots: int, ahead: int, warm: int) -> tuple[float, float]:
    """(hit rate after `warm` batches, misses of all) of a cache that looks at every row."""
    cached: set[int] = set()
    used: dict[int, int] = {}
    hits = misses = before = 0
    for now, batch in enumerate(batches[: len(batches) - (0 if ahead == SEES_ALL else ahead)]):
        window = batches[now : now + 1 + ahead]
        before += len(batch - cached)
        if now >= warm:
            hits, misses = hits + len(batch & cached), misses + len(batch - cached)
        following: dict[int, int] = {}
        for number, later in enumerate(window):
            for row in later:
                following.setdefault(row, number)
        used |= dict.fromkeys(batch, now)
        come = batch - cached
        order = sorted(cached - batch, key=lambda row: (-following.get(row, len(batches)), used[row]))
        cached = (cached | come) - set(order[: max(0, len(cached | come) - slots)])
    return hits / (hits + misses), before


def test_rows_named_most_are_left_out() -> None:
    left = without_first(Classes(np.array([3.0, 2.0, 5.0]), np.array([0.1, 0.5, 0.2])), 4)
    assert {q: rows for rows, q in zip(left.rows_K.tolist(), left.q_K.tolist(), strict=True) if rows} == {
        0.2: 3,
        0.1: 3,
    }
    assert left.rows == 6


CLASSES = Classes(np.array([24.0, 160.0, 1200.0]), np.array([0.8, 0.15, 0.01]))


@pytest.mark.parametrize(("slots", "ahead"), [(160, 0), (160, 4), (480, 4), (480, SEES_ALL), (160, SEES_ALL)])
def test_hits_are_those_of_a_cache_in_plain_python(slots: int, ahead: int) -> None:
    """LRU, a window of 4 batches, and Belady, who sees the end."""
    batches = drawn(CLASSES, 400)
    rate, _ = counted(batches, slots, ahead, 150)
    told = cache(CLASSES, slots, math.inf if ahead == SEES_ALL else ahead)
    assert abs(1 - told.misses / told.classes.named - rate) < 0.01
    assert told.rows_of(CLASSES) == pytest.approx(slots, rel=1e-6)


def test_misses_of_a_run_from_an_empty_cache() -> None:
    batches = drawn(CLASSES, 60)
    _, misses = counted(batches, 800, 4, 0)
    assert cache(CLASSES, 800, 4).misses_of(56) == pytest.approx(misses, rel=0.03)


def test_a_cache_by_hand() -> None:
    """Of 100 rows, each in half of the batches, half are there: 1 - 2^-G = 0.5 for G = 1, LRU. 50 come in a batch."""
    even = Classes(np.array([100.0]), np.array([0.5]))
    half = cache(even, 50, 0)
    assert (half.within, half.classes.named, half.misses) == pytest.approx((1.0, 50.0, 25.0))
    assert half.misses_of(1) == pytest.approx(50) and half.misses_of(3) == pytest.approx(100)
    whole = cache(even, 100, 0)
    assert (whole.misses, whole.misses_of(10)) == pytest.approx((0.0, 100 * (1 - 2**-10)))
    # Those of the last batch leave for the next: 25 do, a quarter of the rows. The last two batches' are 43.75.
    assert half.behind(43.75) == pytest.approx(3.0) and half.reads(43.75) == pytest.approx(50 / 8)
    assert half.behind(100) == math.inf


class Unread:
    def __call__(self) -> Any:
        raise AssertionError("a law needs no samples")


def test_laws_of_synthetic_data_are_those_of_their_ids() -> None:
    """Named rows of a batch of 4,096 by the law, and as they are drawn; a table above and one below the classes."""
    for data in (ZipfStream(rows=(300, 60_000), ids_per_bag=(2, 1)), Synthetic(rows=(300, 60_000), ids_per_bag=(2, 0))):
        source = data.open()
        blocks = [source.read("train", n) for n in range(3)]
        for feature in source.schema.features:
            table = TableSpec("t", feature.rows, 4, Sgd(0.1))
            spec = FeatureSpec(feature.name, "t", feature.bag, mean_ids=mean_ids(source).get(feature.name))
            law = table_classes(source, table, [spec], 4096, Unread())
            named = [np.unique(block.bags[feature.name].ids) for block in blocks]
            assert law.rows == feature.rows
            assert law.named == pytest.approx(np.mean([len(ids) for ids in named]), rel=0.02)
            assert law.touched(3) == pytest.approx(len(np.unique(np.concatenate(named))), rel=0.02)


GPU = Node("by hand", device_bytes=100.0, device_rate=1000.0, link_rate=100.0, dram_bytes=300.0)


def test_nodes_by_hand() -> None:
    """1,000 rows of 2 bytes: 20 nodes of 100 bytes. Ten rows a step are named, always the same."""
    always = Classes(np.array([10.0, 990.0]), np.array([1 - 1e-12, 1e-9]))
    need = Need("x", [Table(always, 2.0, 15.0)], steps_per_s=10.0)
    found = compared(need, GPU)
    assert (found["without"]["nodes"], found["without"]["bound_by"]) == (20, "bytes")
    assert (found["with"]["nodes"], found["with"]["bound_by"]) == (7, "bytes")  # 2,000 bytes in 300 of host memory each
    assert found["times"] == pytest.approx(20 / 7)
    # 15 ids read and 10 rows read and written, of 2 bytes each, ten times a second: 700 bytes/s of 20 x 1,000.
    assert bounds(need, GPU, 20, False)["device bandwidth"] == pytest.approx(700 / 20_000)
    assert fewest(Need("x", need.tables, 1010.0), GPU, True)["nodes"] == 71
    # Rows that never come back cross the link: 100 of 2 bytes, ten times a second, of 100 bytes/s.
    cold = Classes(np.array([1000.0, 10.0]), np.array([0.1, 1 - 1e-12]))
    few = Node("small", 30.0, 1e9, 100.0, 1e9)
    used = bounds(Need("x", [Table(cold, 2.0, 110.0)], 10.0, 0.0), few, 1, True)
    assert 0.9 * 20 < used["link"] <= 20 and used["bytes"] < 1
    assert fewest(Need("x", [Table(cold, 2.0, 110.0)], 10.0), few, True)["bound_by"] == "link"
