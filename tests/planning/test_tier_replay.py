"""Replays of batches: a trace worked by hand, and a cache in plain Python."""

from __future__ import annotations

import numpy as np
import pytest

from recjax.data.batch import Bags, Batch
from recjax.embedding.bind import bind
from recjax.embedding.layout import BoundPlan
from recjax.embedding.optim import Sgd
from recjax.embedding.plan import make_plan
from recjax.embedding.row_order import RowOrder
from recjax.embedding.spec import FeatureSpec, TableSpec
from recjax.planning.tier_replay import Part, homes_of, replay
from recjax.tiers.caches import with_caches
from recjax.tiers.directory import CacheTooSmallError


def cached(rows: int, slots: int, devices: int = 1, bag: int | None = 1) -> BoundPlan:
    """Two tables of so many rows each, in one group, with as many slots on each device; a row takes 16 bytes."""
    tables = tuple(TableSpec(name, rows, 4, Sgd(0.1)) for name in "ab")
    features = tuple(FeatureSpec(name, name, bag, "sum", False, name) for name in "ab")
    bound = bind(make_plan("row_wise", tables), tables, features, devices)
    return with_caches(bound, 16 * slots, 4)


def test_a_trace_by_hand() -> None:
    """Three slots, one batch in sight, and memory for two records before the disk. See the comments for each step."""
    bound = cached(4, 3)
    (group,) = bound.cached
    # leaves:                       0    2         3    4    1    2    0    3    4
    trace = [0, 1, 2, 3, 4, 1, 2, 0, 3, 4, 5, 6, 1]
    # to memory, a batch later:              0    2         3    4    1    2    0    3
    # to the disk for it:                                   0    2    3    4    1    2
    # 1 comes back last: it is on the disk alone. Rows 0 to 3 are table a's, 7 is never named.
    batches = [{group.name: [np.array([row], np.int32)]} for row in trace]
    found = replay(bound, batches, len(trace), 1, {group.name: (2, 64)})
    names = ("hits", "misses", "first", "leaves", "reads", "writes")
    assert [found.total(name) for name in names] == [1, 12, 7, 9, 1, 6]
    assert found.counts[5].tolist() == [1, *[0] * 9]
    assert (found.hit_rate(), found.hit_rate(6)) == (1 / 13, 0.0)
    assert found.parts == {"a": Part(1, 1, 2, 0), "b": Part(2, 1, 0, 1)}
    # A record of 64 bytes takes 128 on the disk. Places there: 0, 2, 3, 4 are the first ones, then comes 1. Of all six
    # writes, each in a step of its own, those of 0 and 1 begin a unit, and the others are into one that has records.
    assert found.counts[-1].tolist() == [0, 1, 0, 1, 1, 2, 1024, 1, 1, 512]  # row 2 is written beside 0, 3 and 4
    traffic = ("pieces_read", "bytes_read", "pieces_written", "bytes_written")
    assert [found.total(name) for name in traffic] == [1 + 4, 5 * 512, 6, 6 * 512]
    # In units of 4 KiB all are in one; where a record takes two units or more, nothing is read for a write.
    for record, unit, expected in ((64, 4096, [1 + 5, 6 * 4096, 6, 6 * 4096]), (600, 512, [1, 1024, 6, 6 * 1024])):
        other = replay(bound, batches, len(trace), 1, {group.name: (2, record)}, unit)
        assert [other.total(name) for name in traffic] == expected
        assert [other.total(name) for name in names] == [found.total(name) for name in names]
    in_memory = replay(bound, batches, len(trace), 1)
    assert [in_memory.total(name) for name in names] == [1, 12, 7, 9, 0, 0]
    assert in_memory.parts == {"a": Part(1, 3, 0, 0), "b": Part(2, 1, 0, 1)}


def test_hits_are_those_of_a_cache_in_plain_python() -> None:
    """Those of two tables on two devices; jagged bags; rows out of sight leave least recently used first."""
    bound, steps, ahead = cached(300, 90, 2, None), 60, 3
    rng, order = np.random.default_rng(0), RowOrder(300)
    named: list[set[tuple[str, int]]] = []
    batches = []
    for _ in range(steps):
        ids = {name: (300 * rng.random(24) ** 4).astype(np.int32) for name in "ab"}
        bags = {name: Bags(of, np.full(12, 2, np.int32)) for name, of in ids.items()}
        batches.append(Batch(np.zeros((12, 0), np.float32), bags, np.zeros(12, np.float32), np.ones(12, np.float32)))
        named.append({(name, int(row)) for name, of in ids.items() for row in of})
    found = replay(bound, [homes_of(bound, batch) for batch in batches], steps, ahead)

    def owner(row: tuple[str, int]) -> int:
        position = int(order.position(np.array([row[1]], np.int32))[0])
        segment = next(s for group in bound.cached for s in group.segments if s.spec.name == row[0])
        return int(segment.split.owner_and_offset(np.array([position]))[0][0])

    owners = {row: owner(row) for row in set().union(*named)}
    hits = 0
    for device in range(2):
        held: set[tuple[str, int]] = set()
        used: dict[tuple[str, int], int] = {}
        for now in range(steps):
            window = [{row for row in rows if owners[row] == device} for rows in named[now : now + 1 + ahead]]
            hits += len(window[0] & held)
            for number, rows in enumerate(window, now):
                used |= dict.fromkeys(rows, number)
            could = sorted(held - window[0], key=used.__getitem__)
            held |= window[0]
            held -= set(could[: max(0, len(held) - 90)])
    assert 0.3 < found.hit_rate() < 0.9
    assert found.total("hits") + found.total("misses") == sum(map(len, named))
    assert abs(found.total("hits") - hits) <= 0.01 * found.total("hits")  # of rows used equally long ago any may leave
    assert sum(p.device for p in found.parts.values()) == 180
    assert sum(p.device + p.dram + p.untouched for p in found.parts.values()) == 600


def test_a_cache_that_two_batches_do_not_fit_into_is_told() -> None:
    bound = cached(4, 2)
    (group,) = bound.cached
    batches = [{group.name: [np.array(rows, np.int32)]} for rows in ([0, 1], [0, 2], [1, 3])]
    with pytest.raises(CacheTooSmallError):
        replay(bound, batches, 3, 1)
