"""Rows on the host of tables that are split by columns: the bits of a training with all rows on the devices."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from support.cached_training import STEPS, V, bits, ends, in_order, make, trained
from support.problems import trainer_of

from recjax.embedding.bind import bind
from recjax.embedding.optim import Sgd
from recjax.embedding.plan import Plan
from recjax.embedding.segment import Exchange, RowIds, Segment
from recjax.embedding.spec import FeatureSpec, TableSpec
from recjax.planning.tier_replay import homes_of, replay
from recjax.tiers.caches import with_caches
from recjax.utils.lazy_arrays import load

pytestmark = [pytest.mark.light_compile, pytest.mark.few_programs]

POOLED = Exchange(kind="pooled")


def in_two(first: Any, second: Any, **more: Any) -> tuple[Segment, Segment]:
    """Columns 0 and 1 to 3 of a table, each with owners of its own."""
    return tuple(
        Segment("table_wise" if isinstance(owners, int) else "row_wise", columns=columns, owners=owners, **more)
        for columns, owners in (((0, 1), first), ((1, 4), second))
    )  # type: ignore[return-value]


HOT = Segment("hot", RowIds(tuple(range(3, 60, 7))))
# Devices, hosts, and the segments of the tables in turn.
HOW: dict[str, tuple[int, int, tuple[Any, ...]]] = {
    "one device": (1, 1, (in_two(0, 0), (Segment("column_wise"),))),
    "two devices": (2, 1, ((Segment("column_wise"),), in_two(0, 1))),
    "three devices, which do not divide the columns": (3, 1, ((Segment("column_wise"),), in_two((0, 2), (1, 2)))),
    "two hosts": (8, 2, ((Segment("grid"),), (Segment("column_wise"),), in_two((1, 2, 5), (0, 3, 7)))),
    "pooled vectors": (2, 1, (in_two(0, 1, exchange=POOLED), (Segment("column_wise", exchange=POOLED),))),
    "beside hot rows": (4, 2, ((HOT, *in_two(0, 3, rows="rest")), (HOT, Segment("grid", "rest")))),
}


def problem_and_plan(how: str) -> tuple[Any, int, int, Plan]:
    """One table of an optimizer with means over rows, which columns share, and others."""
    devices, hosts, segments = HOW[how]
    names = ("adagrad", "momentum", "elements")[: len(segments)]
    return make(names), devices, hosts, Plan(dict(zip(names, segments, strict=True)))


@pytest.mark.full
@pytest.mark.parametrize("how", HOW)
def test_bits_are_those_of_rows_on_the_devices(how: str, tmp_path: Any) -> None:
    problem, devices, hosts, plan = problem_and_plan(how)
    trainer = trainer_of(problem, devices, plan, hosts=hosts, cache_bytes=4_000, dram_bytes=9_000, disk=str(tmp_path))
    assert {group.name for group in trainer.bound.cached} == {g.name for g in trainer.bound.groups if g.spread}
    assert any(not segment.whole_rows for group in trainer.bound.cached for segment in group.segments) or any(
        group.sharding.column_parts > 1 for group in trainer.bound.cached
    )
    state = trainer.init_state()
    assert ends(problem, trainer, state) == ends(problem, trainer_of(problem, devices, plan, hosts=hosts))
    assert state.host.tier is not None
    counts = state.host.tier.figures()
    told = replay(trainer.bound, [homes_of(trainer.bound, batch) for batch in problem.batches], 21, 4)
    assert (told.total("hits"), told.total("misses")) == (counts["hits"], counts["misses"])
    assert counts["disk_rows"] > 0


@pytest.mark.full
@pytest.mark.parametrize("how", ["two devices", "beside hot rows"])
def test_a_checkpoint_goes_on_under_any_plan(how: str) -> None:
    """Written rows, of all of their columns, become whole tables, row-wise caches and columns of other devices."""
    problem, devices, hosts, plan = problem_and_plan(how)
    trainer = trainer_of(problem, devices, plan, hosts=hosts, cache_bytes=4_000)
    state, _ = trained(problem, trainer, trainer.init_state(), 0, 25)
    middle, saved = load(trainer.export(state)), load(trainer.checkpoint(state))
    assert all(0 < len(of["rows"]) == len(of["positions"]) < V for of in saved["written"].values())
    others = [trainer, trainer_of(problem, 1, "row_wise", cache_bytes=9_500), trainer_of(problem, 2, "column_wise")]
    for other in others:
        for arrays in (middle, saved):
            again = other.restore(arrays, 25)
            assert bits(other.export(again)) == jax.tree.map(np.ndarray.tobytes, middle)
            if other.bound.cached and arrays is saved:
                assert in_order(load(other.checkpoint(again))) == in_order(saved)
    then = trainer.restore(saved, 25)
    left, losses = trained(problem, trainer, then, 25, STEPS)
    whole = trainer_of(problem, devices, plan, hosts=hosts)
    right, wanted = trained(problem, whole, whole.restore(saved, 25), 25, STEPS)
    assert losses == wanted
    assert bits(trainer.export(left)) == bits(whole.export(right))


def test_columns_of_one_table_are_all_in_caches_or_none() -> None:
    """A group that would fit is a cache of all of its rows, where another holds more columns of the same rows."""
    tables = (
        TableSpec("few", 100, 4, Sgd(0.1)),
        TableSpec("many", 9_000, 3, Sgd(0.1)),
        TableSpec("apart", 50, 8, Sgd(0.1)),
    )
    features = tuple(FeatureSpec(t.name, t.name, 1) for t in tables)
    plan = Plan({"few": in_two(0, 0), "many": (Segment("row_wise"),), "apart": (Segment("row_wise"),)})
    bound = bind(plan, tables, features, 1)
    assert [group.rows for group in bound.groups] == [100, 9_100, 50]
    cached = with_caches(bound, 12_000, 4)
    assert [(group.rows < group.homes, group.homes) for group in cached.groups] == [
        (False, 100),
        (True, 9_100),
        (False, 0),
    ]
    assert cached.groups[0].rows == 100
    assert with_caches(bound, 10**6, 4) == bound
