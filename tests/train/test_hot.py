"""Where hot rows lie, and what travels for them. That they change no number is shown in test_contract.py."""

from __future__ import annotations

import collections
import functools
from typing import Any

import jax
import numpy as np
import pytest
from support.contract import V, problem_of
from support.problems import Placed, Problem, trainer_of

from recjax.embedding.optim import Adam, RowWiseAdagrad, Sgd
from recjax.embedding.plan import Plan
from recjax.embedding.segment import RowIds, Segment
from recjax.embedding.spec import TableSpec
from recjax.planning.compiled_collectives import collectives, members

D = 4
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
SETS = [(0, 3, 30), (0,), tuple(range(V))]

pytestmark = pytest.mark.light_compile


def hot_plan(placement: str) -> Plan:
    """Hot rows, beside which all others lie in some way."""
    left, right = (0, 2), (2, D)
    rests = [
        (Segment("row_wise", "rest"),),
        (Segment("table_wise", "rest", left), Segment("row_wise", "rest", right, (1, 0))),
        (Segment("column_wise", "rest"),),
    ]
    return Plan(
        {
            name: (Segment(placement, RowIds(ids)), *(rest if len(ids) < V else ()))
            for name, ids, rest in zip(OPTIMIZERS, SETS, rests, strict=True)
        }
    )


@functools.cache
def make() -> Problem:
    tables = tuple(TableSpec(name, V, D, optimizer) for name, optimizer in OPTIMIZERS.items())
    return problem_of(tables, FEATURES)


@pytest.mark.full
def test_slots_of_hot_rows_are_spread_and_rows_copied() -> None:
    """By the shapes of each device's shards, and the collectives of the compiled step: no all-reduce of a table."""
    placed = Placed.of(make(), trainer_of(make(), 2, hot_plan("hot")))
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


@pytest.mark.full
def test_devices_of_a_host_hold_a_copy_together() -> None:
    """On two hosts of two: by the shards, and by the groups and bytes of the collectives of the compiled step."""
    placed = Placed.of(make(), trainer_of(make(), 4, hot_plan("hot_per_host"), hosts=2))
    bound, state = placed.trainer.bound, placed.trainer.init_state()
    whole = [[0, 1], [2, 3]], [[0, 2], [1, 3]]  # inside hosts, and across them
    least: collections.Counter[Any] = collections.Counter()
    for group in bound.hot:
        R = group.rows
        shards = {s.device.id: np.asarray(s.data) for s in state.tables[group.name].addressable_shards}
        assert {shard.shape for shard in shards.values()} == {(R // 2, D)}
        assert all((shards[n] == shards[n + 2]).all() for n in (0, 1))
        for slot in state.slots[group.name].values():
            starts = {s.device.id: s.index[0].start or 0 for s in slot.addressable_shards}
            assert starts == {0: 0, 2: R // 4, 1: R // 2, 3: R // 4 * 3}
        least += collections.Counter(
            [
                ("row_exchange", "all-gather", "inside", R * D * 4),
                ("grad_exchange", "reduce-scatter", "inside", R // 2 * (D + 1) * 4),
                ("grad_exchange", "reduce-scatter", "across", R // 4 * (D + 1) * 4),
                ("row_exchange", "all-gather", "across", R // 2 * D * 4),
            ]
        )
    found = collections.Counter(
        (c.phase, c.kind, ("inside", "across")[whole.index(members(c.groups, 4))], c.result_bytes)
        for c in collectives(placed.compiled.as_text())
        if c.kind in ("reduce-scatter", "all-gather") and c.phase != "id_exchange"
    )
    assert found == least
    arrays = jax.tree.leaves((state.tables, state.slots))
    held = sum(s.data.nbytes for x in arrays for s in x.addressable_shards if s.device.id == 0)
    assert held == bound.buffer_bytes(4)
