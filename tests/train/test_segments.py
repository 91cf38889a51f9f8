"""The contract for tables in several segments: rows apart, columns apart, both, on owners of any kind.

Optimizers that ask for means over rows, one of which has a momentum that tells which rows were touched; all poolings;
the batches, clipping and schedule of support/contract.py; compared with the dense oracle.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support.contract import DATA, OPTIONS, STEPS, B, Net, V, make_batch
from support.few_programs import few
from support.problems import Placed, Problem, Result, compare, run_oracle, run_sharded, trainer_of

from recjax.config.train import DenseAdagrad
from recjax.embedding.optim import PartialRowWiseAdam, RowWiseAdagrad
from recjax.embedding.plan import Plan
from recjax.embedding.routing.ordered import SlotLookup
from recjax.embedding.segment import Exchange, RowIds, Segment
from recjax.embedding.sharded import ShardedEmbeddings
from recjax.embedding.spec import FeatureSpec, TableSpec
from recjax.parallel.mesh import BATCH_AXES
from recjax.planning.assign import Demand, Way, as_plan
from recjax.planning.compiled_collectives import collectives
from recjax.planning.loads import Workload
from recjax.planning.profile import Profile, TableUse
from recjax.train.inputs import InputStream
from recjax.train.routers import StepInputs
from recjax.train.state import TrainState
from recjax.train.step import state_specs
from recjax.utils.lazy_arrays import load

pytestmark = [pytest.mark.full, pytest.mark.light_compile]

D = 4
OPTIMIZERS: dict[str, Any] = {
    "adagrad": RowWiseAdagrad(0.2, l2=0.01, weight_decay=0.1),
    "adam": PartialRowWiseAdam(0.05, l2=0.01),
    "every_row": RowWiseAdagrad(0.2, l2=0.01, every_row=True),
}
FEATURES: dict[str, tuple[str, str, Any]] = {  # table, data feature, pooling
    "one": ("adagrad", "one", "sum"),
    "sequence": ("adagrad", "jagged_weighted", "none"),
    "mean": ("adam", "jagged", "mean"),
    "weighted": ("adam", "three", "sum"),
    "every row": ("every_row", "three", "sum"),
}
HOT, WARM = RowIds((0, 1, 2, 5, 30)), RowIds((3, 4, 9))


def splits(devices: int) -> list[tuple[Segment, ...]]:
    """Ways to split a table among `devices`, in one to four segments."""
    left, right, last = (0, 2), (2, D), devices - 1
    some = tuple(dict.fromkeys((last, 0)))
    return [
        (Segment("table_wise", columns=left, owners=last), Segment("table_wise", columns=right, owners=0)),
        (
            Segment("row_wise", HOT, owners=some),
            Segment("table_wise", "rest", columns=left),
            Segment("row_wise", "rest", columns=right),
        ),
        (Segment("row_wise", columns=right, owners=some), Segment("column_wise", columns=left)),
        (
            Segment("data_parallel", HOT, columns=right),
            Segment("table_wise", HOT, columns=left),
            Segment("column_wise", "rest", columns=(0, 1)),
            Segment("row_wise", "rest", columns=(1, D)),
        ),
        (Segment("data_parallel", HOT), Segment("row_wise", "rest")),
        (Segment("grid", columns=right), Segment("table_row_wise", columns=left)),
        (Segment("table_wise", HOT), Segment("row_wise", WARM), Segment("column_wise", "rest", owners=some)),
        (Segment("row_wise"),),
    ]


def split_plan(devices: int, first: int) -> Plan:
    """Neighbouring tables split in different ways, beginning with `first`."""
    ways = splits(devices)
    return Plan({name: ways[(number + first) % len(ways)] for number, name in enumerate(OPTIMIZERS)})


@functools.cache
def make() -> Problem:
    return Problem(
        [make_batch(step) for step in range(STEPS)],
        B,
        tuple(TableSpec(name, V, D, optimizer) for name, optimizer in OPTIMIZERS.items()),
        tuple(
            FeatureSpec(name, table, DATA[source][0], pooling, DATA[source][1], source)
            for name, (table, source, pooling) in FEATURES.items()
        ),
        Net(),
        2,
        DenseAdagrad(0.1, l2=0.01, weight_decay=0.1).build(),
        options=OPTIONS,
    )


@functools.cache
def oracle() -> Result:
    return run_oracle(make(), np.float64)


# Each of the eight ways is met in one of those that are not wide.
@pytest.mark.parametrize(
    ("devices", "first", "how"),
    [
        pytest.param(1, 0, {}, marks=pytest.mark.wide),
        pytest.param(2, 1, {}, marks=pytest.mark.wide),
        (3, 7, {"dedup": False}),
        (4, 2, {"hosts": 2}),
        (8, 5, {"hosts": 2, "replicas": 2}),
    ],
)
def test_tables_in_several_segments_equal_the_oracle(devices: int, first: int, how: dict[str, int]) -> None:
    plan = split_plan(devices // how.get("replicas", 1), first)
    with jax.enable_x64(True):
        result = run_sharded(make(), devices, plan, np.float64, **how)
        compare(result, oracle(), loss_rtol=1e-9, atol=1e-9)


def test_ways_that_a_planner_mixes_equal_the_oracle() -> None:
    """A table whose rows travel, one whose owner pools, and one that every device copies."""
    ways: dict[str, Way] = {"adagrad": "rows", "adam": "pooled", "every_row": "copy"}
    uses = {name: TableUse(2.0, V / 2) for name in OPTIMIZERS}
    demand = Demand(make().tables, make().features, Workload(Profile(uses, "a test"), B, 4), Exchange(kind="auto"))
    plan = as_plan(demand, ways, dict.fromkeys(ways, "a reason"))
    kinds = {name: (segments[0].placement, segments[0].exchange.kind) for name, segments in plan.tables.items()}
    assert kinds == {
        "adagrad": ("row_wise", "rows"),
        "adam": ("table_wise", "pooled"),
        "every_row": ("data_parallel", "rows"),
    }
    with jax.enable_x64(True):
        result = run_sharded(make(), 4, plan, np.float64)
        compare(result, oracle(), loss_rtol=1e-9, atol=1e-9)


def test_columns_of_tables_of_any_width_share_a_buffer() -> None:
    """Tables of 4 and 6 columns in ranges of 2, on three devices: means divide by the columns of the own table."""
    rules = {"some": OPTIMIZERS["adagrad"], "every": OPTIMIZERS["every_row"]}
    tables = tuple(TableSpec(f"{name} {dim}", V, dim, rule) for name, rule in rules.items() for dim in (4, 6))
    features = tuple(
        FeatureSpec(f"{source} {table.name}", table.name, DATA[source][0], "sum", DATA[source][1], source)
        for table, source in zip(tables, ("one", "jagged", "three", "jagged_weighted"), strict=True)
    )
    ranges: list[dict[str, Any]] = [
        {"placement": "table_wise", "owners": 1},
        {"placement": "row_wise", "owners": (2, 0)},
        {"placement": "row_wise"},
    ]
    segments = [Segment(**how, columns=(2 * n, 2 * n + 2)) for n, how in enumerate(ranges)]
    plan = Plan({table.name: tuple(segments[: table.dim // 2]) for table in tables})
    problem = dataclasses.replace(make(), tables=tables, features=features)
    assert sum(g.divides_row_means for g in trainer_of(problem, 3, plan).bound.groups) == len(rules)
    with jax.enable_x64(True):
        result = run_sharded(problem, 3, plan, np.float64)
        compare(result, run_oracle(problem, np.float64), loss_rtol=1e-9, atol=1e-9)


def test_pooled_bits_equal_those_of_undivided_tables() -> None:
    """In float32, for fixed, jagged, weighted and un-pooled bags. XLA may round what the dense part makes of them."""
    found: list[dict[str, Any]] = []
    for plan in ("row_wise", split_plan(3, 1), split_plan(3, 3)):
        trainer = trainer_of(make(), 3, plan)
        embeddings = ShardedEmbeddings(trainer.bound)

        def pooled(state: TrainState, inputs: StepInputs, embeddings: Any = embeddings) -> Any:
            rows, _ = embeddings.fetch(state.tables, inputs.routing, len(inputs.labels_B))
            return embeddings.pool(rows, None, inputs.routing, inputs.labels_B.shape[0])

        specs = (state_specs(trainer.bound), P(BATCH_AXES))
        program = jax.jit(jax.shard_map(pooled, mesh=trainer.mesh, in_specs=specs, out_specs=P(BATCH_AXES)))
        placed = Placed.of(make(), trainer)
        found.append(program(placed.start(), placed.inputs[0]))
    for other in found[1:]:
        for name, whole in found[0].items():
            # A sequence's capacity is the same, since it is that of the longest bag.
            for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(other[name]), strict=True):
                assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), name


@pytest.mark.wide  # so are three programs in `test_bits_do_not_depend_on_slots`
def test_two_runs_are_equal_to_the_bit() -> None:
    placed = Placed.of(make(), trainer_of(make(), 3, split_plan(3, 1)))
    ends = [load(placed.trainer.export(placed.steps(placed.start()))) for _ in range(2)]
    assert jax.tree.map(np.ndarray.tobytes, ends[0]) == jax.tree.map(np.ndarray.tobytes, ends[1])


@pytest.mark.parametrize(
    ("devices", "plan", "how"),
    [pytest.param(3, 3, {}, marks=pytest.mark.wide), (8, 1, {"hosts": 2})],
    ids=["three", "hosts"],
)
def test_rows_in_any_slot_equal_the_oracle(devices: int, plan: int, how: dict[str, int]) -> None:
    """A random permutation of the slots of every part, resumed in the middle under another one and another plan."""
    problem = make()
    with jax.enable_x64(True):
        first = Placed.of(problem, trainer_of(problem, 2, split_plan(2, 0), np.float64))
        half = load(first.trainer.export(first.steps(first.start(), last=2)))
        then = trainer_of(problem, devices, split_plan(devices, plan), np.float64, mapped=2, **how)
        truth = dataclasses.replace(oracle(), losses=oracle().losses[2:])
        compare(Placed.of(problem, then).result(then.restore(half, 2), 2), truth, loss_rtol=1e-9, atol=1e-9)


def test_bits_do_not_depend_on_slots() -> None:
    """Nor on how far the input stream looks ahead: clipping, stochastic rounding, initial values."""
    problem = make()
    tables = tuple(
        dataclasses.replace(t, dtype="bfloat16", optimizer=dataclasses.replace(t.optimizer, every_row=False))
        for t in problem.tables
    )
    problem = dataclasses.replace(problem, tables=tables)
    ends = []
    for mapped, ahead in ((None, 0), (1, 0), (2, 4)):
        trainer = trainer_of(problem, 2, split_plan(2, 3), mapped=mapped)
        stages = () if mapped is None else (SlotLookup(trainer.bound, trainer.maps, ahead),)
        routed = [trainer.route(batch, B) for batch in problem.batches]
        stream = InputStream(lambda _, routed=routed: iter(routed), trainer.router, B, B * STEPS, None, stages)  # type: ignore[misc]
        state = trainer.init_state()
        with few():
            for inputs in stream:
                state, metrics = trainer.train_step(state, inputs)
                assert bool(metrics["ok"])
        ends.append(jax.tree.map(np.ndarray.tobytes, load(trainer.export(state))))
    assert ends[1:] == ends[:1] * 2


def test_rows_split_by_columns_send_two_floats_for_each_row_asked_for() -> None:
    """There and back, for C rows of each of three owners; nothing else in that phase."""
    whole = {name: (Segment("row_wise"),) for name in OPTIMIZERS}
    placed = Placed.of(make(), trainer_of(make(), 3, Plan(whole | {"adagrad": splits(3)[0]})))
    (group,) = (group for group in placed.trainer.bound.groups if group.divides_row_means)
    found = [c for c in collectives(placed.compiled.as_text()) if "row_statistic" in c.phases]
    C = placed.capacities[group.name]
    assert [(c.kind, c.result_bytes, c.phases) for c in found] == [("all-to-all", 3 * C * 4, ("row_statistic",))] * 2
