"""The contract for hot rows: a copy on every device or host, with any optimizer, pooling and placement of the rest.

The batches, clipping and schedule of support/contract.py; compared with the dense oracle. Tables are shared by several
features, one table has no hot row, others 1, a tenth, most, and all; in the middle others take the places of these.
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
from support.problems import Placed, Problem, Result, by_row, compare, run_oracle, trainer_of

from recjax.embedding.hot_rows import homes_of_hot_rows, make_swap
from recjax.embedding.optim import Adam, RowWiseAdagrad, Sgd
from recjax.embedding.plan import Plan
from recjax.embedding.routing.capacity import grow
from recjax.embedding.segment import Exchange, RowIds, Segment
from recjax.embedding.spec import TableSpec
from recjax.planning.compiled_collectives import collectives, members
from recjax.train.routers import InFlight, StepInputs
from recjax.train.trainer import Trainer
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
LATER = [(1, 3, 29), (2,), tuple(range(V)), (), tuple(range(9, V))]  # as many

pytestmark = pytest.mark.light_compile


def hot_plan(
    devices: int,
    first: int,
    rest: int = 0,
    pooled: bool = False,
    sets: list[tuple[int, ...]] = SETS,
    placement: str = "hot",
) -> Plan:
    """Hot sets of all sizes, the rest in any way; `first` says which table has which set, and `rest` which rest."""
    left, right, some = (0, 2), (2, D), tuple(dict.fromkeys((devices - 1, 0)))
    vectors = POOLED if pooled else Exchange()
    rests = [
        (Segment("row_wise", "rest"),),
        (Segment("table_wise", "rest", left), Segment("row_wise", "rest", right, some)),
        (Segment("column_wise", "rest", exchange=vectors),),
        (Segment("table_wise", "rest", exchange=vectors),),
        (Segment("table_row_wise", "rest", exchange=vectors),),
    ]
    tables = {}
    for number, name in enumerate(OPTIMIZERS):
        ids, others = sets[(number + first) % 5], rests[(number + rest) % 5]
        found = (Segment(placement, RowIds(ids)),) if ids else ()
        tables[name] = found + (others if len(ids) < V else ())
        if not ids:
            tables[name] = tuple(dataclasses.replace(segment, rows="all") for segment in others)
    return Plan(tables)


@functools.cache
def make() -> Problem:
    tables = tuple(TableSpec(name, V, D, optimizer) for name, optimizer in OPTIMIZERS.items())
    return problem_of(tables, FEATURES)


@functools.cache
def oracle() -> Result:
    return run_oracle(make(), np.float64)


# Also without those that are wide, each table meets each set here or in the next test. Pooled vectors lie beside sets
# of all sizes.
@pytest.mark.full
@pytest.mark.parametrize(
    ("devices", "first", "rest", "how"),
    [
        pytest.param(1, 0, 0, {}, marks=pytest.mark.wide),
        pytest.param(2, 1, 2, {"pooled": True}, marks=pytest.mark.wide),
        (3, 2, 1, {"dedup": False, "accumulate": 3, "pooled": True}),
        (8, 4, 3, {"hosts": 2, "replicas": 2, "pooled": True}),
        (4, 0, 2, {"hosts": 2, "placement": "hot_per_host"}),
        pytest.param(8, 1, 3, {"hosts": 2, "pooled": True, "placement": "hot_per_host"}, marks=pytest.mark.wide),
        pytest.param(
            3,
            3,
            1,
            {"dedup": False, "accumulate": 3, "pooled": True, "placement": "hot_per_host"},
            marks=pytest.mark.wide,
        ),
        pytest.param(8, 2, 4, {"hosts": 2, "replicas": 2, "placement": "hot_per_host"}, marks=pytest.mark.wide),
    ],
    ids=["one", "two", "three", "replicas", "2x2 hosts", "2x4 hosts", "one host", "replicas of 2x2 hosts"],
)
def test_it_equals_the_oracle_with_others_from_the_third_step_on(
    devices: int, first: int, rest: int, how: dict[str, Any]
) -> None:
    problem, own = make(), dict(how)
    which = devices // how.get("replicas", 1), first, rest, own.pop("pooled", False)
    placement = own.pop("placement", "hot")
    if parts := own.pop("accumulate", 0):
        problem = dataclasses.replace(problem, options=dataclasses.replace(OPTIONS, accumulate=parts))
    with jax.enable_x64(True):
        before, after = (
            trainer_of(problem, devices, hot_plan(*which, sets, placement), np.float64, **own) for sets in (SETS, LATER)
        )
        state, losses = before.init_state(), []
        for step, inputs in enumerate(inputs_of(problem, before, after)):
            if step == 2:
                homes = homes_of_hot_rows(before.bound), homes_of_hot_rows(after.bound)
                tables, slots = make_swap(before.bound, before.mesh)(state.tables, state.slots, *homes)
                state = dataclasses.replace(state, tables=tables, slots=slots)
            state, metrics = before.train_step(state, inputs)
            losses.append(float(metrics["loss"]))
        compare(Result(losses, *by_row(after, state)), oracle(), loss_rtol=1e-9, atol=1e-9)


def inputs_of(problem: Problem, before: Trainer, after: Trainer) -> list[StepInputs]:
    """The batches, of which the first two are routed by `before` and the others by `after`; the step compiles once."""
    routers = [before.router] * 2 + [after.router] * (len(problem.batches) - 2)
    size, parts = problem.batch_size, problem.options.accumulate
    routed = [InFlight(b, r.route(b, size, parts)) for r, b in zip(routers, problem.batches, strict=True)]
    sizes: dict[str, int] = functools.reduce(grow, (batch.routed.required_capacities for batch in routed), {})
    return [r.complete(r.start(batch, sizes), sizes) for r, batch in zip(routers, routed, strict=True)]


@pytest.mark.full
@pytest.mark.parametrize("devices", [2, 4])
def test_two_runs_are_equal_to_the_bit_and_resume_elsewhere_with_other_hot_rows(devices: int) -> None:
    """From copies on each of two devices to copies on each of two hosts; and from such to ones on each of two devices.

    Each meets other sets, and tables that are placed otherwise.
    """
    problem = make()
    hosts = {2: 1, 4: 2}
    plans = {2: hot_plan(2, 1, 2), 4: hot_plan(4, 3, 1, True, placement="hot_per_host")}

    def trainer(on: int) -> Trainer:
        return trainer_of(problem, on, plans[on], np.float64, hosts=hosts[on])

    with jax.enable_x64(True):
        first = Placed.of(problem, trainer(devices))
        half, again = (load(first.trainer.export(first.steps(first.trainer.init_state(), last=2))) for _ in range(2))
        assert jax.tree.map(np.ndarray.tobytes, half) == jax.tree.map(np.ndarray.tobytes, again)
        placed = Placed.of(problem, trainer(6 - devices))
        truth = dataclasses.replace(oracle(), losses=oracle().losses[2:])
        compare(placed.result(placed.trainer.restore(half, 2), 2), truth, loss_rtol=1e-9, atol=1e-9)


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


@pytest.mark.full
def test_devices_of_a_host_hold_a_copy_together() -> None:
    """On two hosts of two: by the shards, and by the groups and bytes of the collectives of the compiled step."""
    placed = Placed.of(make(), trainer_of(make(), 4, hot_plan(4, 0, placement="hot_per_host"), hosts=2))
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
