"""Hot rows that change places with others: the tables that leave the devices stay the same, to the bit."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from support.contract import Net, V
from support.problems import Problem, trainer_of

from recjax.config.train import DenseSgd
from recjax.embedding.hot_rows import homes_of_hot_rows, make_swap
from recjax.embedding.optim import Adam, PartialRowWiseAdam, Sgd
from recjax.embedding.plan import Plan
from recjax.embedding.segment import RowIds, Segment
from recjax.embedding.spec import FeatureSpec, TableSpec
from recjax.utils.lazy_arrays import load

pytestmark = pytest.mark.light_compile

D = 4
TABLES = (
    TableSpec("columns", V, D, PartialRowWiseAdam()),
    TableSpec("grid", V, D, Adam()),
    TableSpec("narrow", V, D, Sgd(momentum=0.9), dtype="bfloat16", rounding="nearest"),
)
RESTS: list[tuple[Segment, ...]] = [
    (Segment("table_wise", "rest", (0, 3)), Segment("row_wise", "rest", (3, D), owners=(1, 0))),
    (Segment("grid", "rest"),),
    (Segment("column_wise", "rest"),),
]
SETS = [((0, 3, 30), (1, 3, 29)), ((7,), (0,)), (tuple(range(9)), tuple(range(9, 18)))]


def plan(nth: int, placement: str) -> Plan:
    return Plan(
        {
            table.name: (Segment(placement, RowIds(sets[nth])), *rest)
            for table, rest, sets in zip(TABLES, RESTS, SETS, strict=True)
        }
    )


@pytest.mark.full
@pytest.mark.parametrize(
    ("devices", "placement", "how"),
    [
        (8, "hot", {"replicas": 2, "independent": True}),
        (4, "hot", {"lines": True}),
        (8, "hot_per_host", {"replicas": 2, "independent": True}),
    ],
)
def test_tables_stay_as_they_are(devices: int, placement: str, how: dict[str, Any]) -> None:
    """On two hosts of two devices, in two replica groups that hold values of their own; and in lines, as on a TPU."""
    features = tuple(FeatureSpec(t.name, t.name, 1, "sum") for t in TABLES)
    problem = Problem([], 8, TABLES, features, Net(), 2, DenseSgd(0.1).build())
    before, after = (trainer_of(problem, devices, plan(nth, placement), hosts=2, **how) for nth in (0, 1))
    assert any(group.lines for group in before.bound.groups) == ("lines" in how)
    saved, rng = load(before.export(before.init_state())), np.random.default_rng(0)
    given = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(x.dtype), saved)
    state = before.restore(given, 0)
    for group in before.bound.hot:  # so that what the rest has in their places is another
        name = group.name
        state.tables[name] = state.tables[name][::-1]
        state.slots[name] = {slot: x + 1 for slot, x in state.slots[name].items()}
    given = load(before.export(state))
    swap = make_swap(before.bound, before.mesh)
    tables, slots = swap(state.tables, state.slots, homes_of_hot_rows(before.bound), homes_of_hot_rows(after.bound))
    moved = load(after.export(dataclasses.replace(state, tables=tables, slots=slots)))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8)), moved, given)
    for group in before.bound.hot:  # equal on all devices of a replica group that hold the same rows
        shards = {str(s.index): np.asarray(s.data) for s in tables[group.name].addressable_shards}
        for shard in tables[group.name].addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), shards[str(shard.index)])
