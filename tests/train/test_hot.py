"""The contract for hot rows: a copy on every device, with any optimizer, pooling and placement of the rest.

The batches, clipping and schedule of support/contract.py; compared with the dense oracle. Tables are shared by several
features, one table has no hot row, others 1, a tenth, most, and all.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
from support.contract import OPTIONS, V, problem_of
from support.problems import Placed, Problem, Result, by_row, compare, run_oracle, run_sharded, trainer_of

from recjax.comms.compiled import collectives
from recjax.embedding.optim import Adam, RowWiseAdagrad, Sgd
from recjax.embedding.plan import Exchange, Plan, RowIds, Segment
from recjax.embedding.spec import TableSpec
from recjax.utils.lazy_arrays import load

D = 4
POOLED = Exchange(kind="pooled")
OPTIMIZERS: dict[str, Any] = {
    "adagrad": RowWiseAdagrad(0.2, l2=0.01, weight_decay=0.1),
    "momentum": Sgd(0.5, momentum=0.9),
    "every_row": Adam(0.05, l2=0.01, every_row=True),
}
FEATURES: dict[str, tuple[str, str, Any]] = {  # table, data feature, pooling
    "one": ("adagrad", "one", "sum"),
    "mean": ("adagrad", "jagged", "mean"),
    "weighted": ("momentum", "three", "sum"),
    "sequence": ("momentum", "jagged_weighted", "none"),
    "every row": ("every_row", "jagged", "sum"),
}
SETS = [(0, 3, 30), (0,), tuple(range(V)), (), tuple(range(V - 9))]

pytestmark = pytest.mark.light_compile


def hot_plan(devices: int, first: int, pooled: bool = False) -> Plan:
    """Hot sets of all sizes, the rest in any way; `first` says which table has which."""
    left, right, some = (0, 2), (2, D), tuple(dict.fromkeys((devices - 1, 0)))
    rests = [
        (Segment("row_wise", "rest"),),
        (Segment("table_wise", "rest", left), Segment("row_wise", "rest", right, some)),
        (Segment("column_wise", "rest", exchange=POOLED if pooled else Exchange()),),
        (Segment("table_wise", "rest", exchange=POOLED if pooled else Exchange()),),
        (Segment("table_row_wise", "rest"),),
    ]
    tables = {}
    for number, name in enumerate(OPTIMIZERS):
        ids, rest = SETS[(number + first) % 5], rests[(number + 2 * first) % 5]
        found = (Segment("hot", RowIds(ids)),) if ids else ()
        tables[name] = found + (rest if len(ids) < V else ())
        if not ids:
            tables[name] = tuple(dataclasses.replace(segment, rows="all") for segment in rest)
    return Plan(tables)


@functools.cache
def make() -> Problem:
    tables = tuple(TableSpec(name, V, D, optimizer) for name, optimizer in OPTIMIZERS.items())
    return problem_of(tables, FEATURES)


@functools.cache
def oracle() -> Result:
    return run_oracle(make(), np.float64)


@pytest.mark.full
@pytest.mark.parametrize(
    ("devices", "first", "how"),
    [
        (1, 0, {}),
        (3, 2, {"dedup": False, "accumulate": 3, "pooled": True}),
        (8, 4, {"hosts": 2, "replicas": 2, "pooled": True}),
    ],
    ids=["one", "three", "replicas"],
)
def test_it_equals_the_oracle(devices: int, first: int, how: dict[str, Any]) -> None:
    problem, own = make(), dict(how)
    plan = hot_plan(devices // how.get("replicas", 1), first, own.pop("pooled", False))
    if parts := own.pop("accumulate", 0):
        problem = dataclasses.replace(problem, options=dataclasses.replace(OPTIONS, accumulate=parts))
    with jax.enable_x64(True):
        result = run_sharded(problem, devices, plan, np.float64, **own)
        compare(result, oracle(), loss_rtol=1e-9, atol=1e-9)


@pytest.mark.full
def test_two_runs_are_equal_to_the_bit_and_resume_elsewhere_with_other_hot_rows() -> None:
    problem = make()
    with jax.enable_x64(True):
        first = Placed.of(problem, trainer_of(problem, 2, hot_plan(2, 1), np.float64))
        half, again = (load(first.trainer.export(first.steps(first.trainer.init_state(), last=2))) for _ in range(2))
        assert jax.tree.map(np.ndarray.tobytes, half) == jax.tree.map(np.ndarray.tobytes, again)
        placed = Placed.of(problem, trainer_of(problem, 4, hot_plan(4, 3), np.float64, hosts=2))
        state, losses = placed.trainer.restore(half, 2), []
        for inputs in placed.inputs[2:]:
            state, metrics = placed.trainer.train_step(state, inputs)
            losses.append(float(metrics["loss"]))
        truth = dataclasses.replace(oracle(), losses=oracle().losses[2:])
        compare(Result(losses, *by_row(placed.trainer, state)), truth, loss_rtol=1e-9, atol=1e-9)


@pytest.mark.full
def test_slots_of_hot_rows_are_spread_and_rows_copied() -> None:
    """By the shapes of each device's shards, and the collectives of the compiled step: no all-reduce of a table."""
    placed = Placed.of(make(), trainer_of(make(), 2, hot_plan(2, 0)))
    state = placed.trainer.init_state()
    for group in placed.trainer.bound.hot:
        (rows,) = {shard.data.shape for shard in state.tables[group.name].addressable_shards}
        assert rows == (group.rows, D)
        for slot in state.slots[group.name].values():
            assert {len(shard.data) for shard in slot.addressable_shards} == {group.rows // 2}
    # One of each kind for each group: what an all-reduce would send, in two halves with the update between them.
    kinds = ("reduce-scatter", "all-gather")
    found = [(c.phase, c.kind) for c in collectives(placed.compiled.as_text()) if c.kind in kinds]
    assert collections.Counter(found) == {("grad_exchange", "reduce-scatter"): 3, ("row_exchange", "all-gather"): 3}
