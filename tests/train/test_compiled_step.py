"""Invariants 4 and 5, read from the compiled program: the claimed collectives, and no table-sized temporary."""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.problems import mesh_of, to_host
from support.routing import locate
from support.small_steps import ADAGRAD, B, D, built, make, placed_once

from recjax.embedding.collection import export_tables
from recjax.embedding.layout import ACROSS
from recjax.embedding.optim import Adam, RowWiseAdagrad, Sgd
from recjax.embedding.plan import Plan
from recjax.embedding.segment import Segment
from recjax.embedding.sharding import ColumnSharding, ReplicatedSharding, RowSharding
from recjax.parallel.mesh import BATCH_AXES
from recjax.planning.compiled_collectives import collectives, members, wire_bytes
from recjax.train.dense import Replicated
from recjax.train.routers import place_all
from recjax.train.step import PLAIN, StepOptions
from recjax.utils.hlo import read_program
from recjax.utils.lazy_arrays import load

pytestmark = [pytest.mark.full, pytest.mark.light_compile(as_text=True)]


@pytest.mark.smoke
def test_row_wise_step_has_exactly_the_claimed_collectives() -> None:
    placed = placed_once(8, "row_wise")
    found = collectives(placed.compiled.as_text())
    assert collections.Counter((c.phase, c.kind) for c in found) == {
        ("id_exchange", "all-to-all"): 1,
        ("row_exchange", "all-to-all"): 1,
        ("grad_exchange", "all-to-all"): 1,
        ("dense_grads", "all-reduce"): 1,
        ("finite_check", "all-reduce"): 1,
    }
    assert {c.group_size for c in found} == {8}
    (group,) = placed.trainer.bound.groups
    C = placed.capacities[group.name]
    bytes_of = {c.phase: c.result_bytes for c in found}
    assert bytes_of["id_exchange"] == 8 * C * 4
    assert bytes_of["row_exchange"] == bytes_of["grad_exchange"] == 8 * C * D * 4
    parameters = sum(x.size for x in jax.tree.leaves(placed.start().dense))
    assert bytes_of["dense_grads"] == (parameters + 2) * 4  # and the sums of w*l and of w
    assert bytes_of["finite_check"] == 4  # how much is bad on the worst device


def test_table_wise_step_has_the_collectives_of_a_row_wise_one() -> None:
    placed = placed_once(3, "table_wise")
    found = collectives(placed.compiled.as_text())
    assert collections.Counter((c.phase, c.kind) for c in found) == {
        ("id_exchange", "all-to-all"): 1,
        ("row_exchange", "all-to-all"): 1,
        ("grad_exchange", "all-to-all"): 1,
        ("dense_grads", "all-reduce"): 1,
        ("finite_check", "all-reduce"): 1,
    }


@pytest.mark.parametrize("optimizer", [Sgd(0.1), ADAGRAD])
def test_column_wise_step_has_exactly_the_claimed_collectives(optimizer: Sgd | RowWiseAdagrad) -> None:
    """Also where D = 8 is no multiple of the 3 devices, which hold 3, 3 and 2 columns."""
    placed = built(make((900, 37, 2000), optimizer), 3, "column_wise")
    found = collectives(placed.compiled.as_text())
    means = {("sparse_update", "all-reduce"): 1} if isinstance(optimizer, RowWiseAdagrad) else {}
    assert collections.Counter((c.phase, c.kind) for c in found) == {
        ("id_exchange", "all-gather"): 1,
        ("row_exchange", "all-to-all"): 1,
        ("grad_exchange", "all-to-all"): 1,
        ("dense_grads", "all-reduce"): 1,
        ("finite_check", "all-reduce"): 1,
        **means,
    }
    (group,) = placed.trainer.bound.groups
    C = placed.capacities[group.name]
    bytes_of = {c.phase: c.result_bytes for c in found}
    assert bytes_of["id_exchange"] == 3 * C * 4
    assert bytes_of["row_exchange"] == bytes_of["grad_exchange"] == 3 * C * 3 * 4
    if means:
        assert bytes_of["sparse_update"] == 3 * C * 4


def test_across_hosts_travels_what_must_and_no_more() -> None:
    """2 hosts of 4 devices, a table of each way to spread: two steps, [hosts, K] across, least bytes, in place."""
    made = make((50_000, 50_000, 50_000))
    placements = dict(zip((t.name for t in made.tables), ("row_wise", "column_wise", "grid"), strict=True))
    placed = built(made, 8, Plan({name: (Segment(p),) for name, p in placements.items()}), hosts=2)
    compiled, inputs = placed.compiled, placed.inputs[0]
    hlo = compiled.as_text() or ""
    inside, across = [[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 4], [1, 5], [2, 6], [3, 7]]
    found = collections.defaultdict(list)
    for c in collectives(hlo):
        if c.kind != "all-reduce":
            found[c.phase, c.kind, "across" if members(c.groups, 8) == across else "inside"].append(c.result_bytes)
            assert members(c.groups, 8) in (inside, across)
    by_placement = {group.segments[0].placement: group for group in placed.trainer.bound.groups}
    C = {p: placed.capacities[g.name] for p, g in by_placement.items()}
    K = {p: placed.capacities[g.name + ACROSS] for p, g in by_placement.items()}
    W = {"row_wise": D, "column_wise": 1, "grid": 4}
    rows = (
        sorted(2 * K[p] * W[p] * 4 for p in W),
        sorted(4 * C[p] * V * 4 for p, V in (("row_wise", D), ("column_wise", 2), ("grid", D))),
    )
    assert {key: sorted(sizes) for key, sizes in found.items()} == {
        ("id_exchange", "all-to-all", "across"): [2 * K["row_wise"] * 4],
        ("id_exchange", "all-gather", "across"): sorted(2 * K[p] * 4 for p in ("column_wise", "grid")),
        ("row_exchange", "all-to-all", "across"): rows[0],
        ("row_exchange", "all-to-all", "inside"): rows[1],
        ("grad_exchange", "all-to-all", "across"): rows[0],
        ("grad_exchange", "all-to-all", "inside"): rows[1],
    }

    # The least possible: each distinct row once for each host that asks, if any of it lives on another one.
    ids_bytes = values = 0
    for feature in made.features:
        group, bags = by_placement[placements[feature.table]], made.batches[0].bags[feature.reads]
        lengths = bags.ids.shape[1] if bags.lengths is None else bags.lengths
        host_L = np.repeat(np.arange(B), lengths) // placed.routed[0].local // 4
        owner_L, _ = locate(group, feature.table, bags.ids.ravel())
        pairs = set(zip(host_L.tolist(), bags.ids.ravel().tolist(), owner_L.tolist(), strict=True))
        if type(group.sharding) is RowSharding:
            away = sum(owner // 4 != host for host, _, owner in pairs)
            ids_bytes, values = ids_bytes + away * 4, values + away * D
        else:  # 4 devices of the other host have columns of it, or one has; and of the 8 columns 4 are there
            askers = 4 if type(group.sharding) is ColumnSharding else 1
            ids_bytes, values = ids_bytes + len(pairs) * askers * 4, values + len(pairs) * 4
    lines = wire_bytes(hlo, placed.trainer.bound, inputs.routing, 4)
    useful: collections.Counter[str] = collections.Counter()
    for w in lines:
        useful[w["phase"]] += round(w["across_useful_bytes"] * 8)
    assert (useful["id_exchange"], useful["row_exchange"]) == (ids_bytes, values * 4)
    assert useful["grad_exchange"] == useful["row_exchange"]
    assert all(w["useful_bytes"] <= w["padded_bytes"] and w["across_padded_bytes"] <= w["padded_bytes"] for w in lines)

    memory = compiled.memory_analysis()
    shards = [g.rows * g.width * 4 for g in placed.trainer.bound.groups]
    assert memory.temp_size_in_bytes < min(shards) == 200_000
    for g in placed.trainer.bound.groups:
        assert not re.search(rf"f32\[{g.rows},{g.width}\]\S* copy\(", hlo)


def test_clipping_adds_one_number_and_accumulation_nothing() -> None:
    def found(options: StepOptions) -> tuple[collections.Counter[str], int]:
        placed = placed_once(4, "row_wise", options)
        compiled = collectives(placed.compiled.as_text())
        return collections.Counter(c.kind for c in compiled), sum(c.result_bytes for c in compiled)

    kinds, size = found(PLAIN)
    # XLA may move the sums of the loss or the weights from one all-reduce to another, so the sizes are added up
    assert found(StepOptions(clip_norm=1.0)) == (kinds + collections.Counter(["all-reduce"]), size + 4)
    assert found(StepOptions(accumulate=5)) == (kinds, size)  # 25 samples a device, as without parts


def test_no_loop_of_a_cpu_joins_a_bucket_and_sums() -> None:
    """Such a loop takes the sums for each number of the bucket."""

    def inside(x: jax.Array) -> jax.Array:
        grads = [x.T @ x, x.sum(keepdims=True)[0]]
        sums, *rest = Replicated(2**20).reduce(grads, (x * x).sum(), x.max(), [0, 1])
        return jnp.concatenate([*(leaf.ravel() for leaf in sums), jnp.stack(rest)])

    x = np.random.default_rng(0).integers(-9, 9, (8, 4)).astype(np.float32)
    mapped = jax.shard_map(inside, mesh=mesh_of(2), in_specs=jax.P(BATCH_AXES), out_specs=jax.P())
    compiled = jax.jit(mapped).lower(x).compile()
    each = [[half.T @ half, half.sum(), (half * half).sum(), half.max()] for half in np.split(x, 2)]
    expected = np.concatenate([np.ravel(a + b) for a, b in zip(*each, strict=True)])
    np.testing.assert_array_equal(compiled(x), expected)
    for loop in read_program(compiled.as_text() or "").computations.values():
        if any(i.opcode == "reduce" for i in loop.instructions.values()):  # at most of the loss and the weight
            assert all(i.arrays[0].size <= 2 for i in loop.instructions.values() if i.opcode == "concatenate")


def test_data_parallel_step_only_reduces() -> None:
    placed = placed_once(8, "data_parallel")
    found = collectives(placed.compiled.as_text())
    assert {c.kind for c in found} == {"all-reduce"}
    assert {c.phase for c in found} <= {"grad_exchange", "dense_grads"}  # XLA may combine the two into one
    parameters = sum(x.size for x in jax.tree.leaves(placed.start().dense))
    assert sum(c.result_bytes for c in found) == ((900 + 37 + 2000) * (D + 1) + parameters + 2) * 4


def test_a_mixed_plan_exchanges_once_per_group() -> None:
    placed = built(make((9000, 37, 12000)), 4, "auto")
    assert [type(g.sharding) for g in placed.trainer.bound.groups] == [RowSharding, ReplicatedSharding]
    found = collectives(placed.compiled.as_text())
    assert collections.Counter(c.phase for c in found if c.kind == "all-to-all") == {
        "id_exchange": 1,
        "row_exchange": 1,
        "grad_exchange": 1,
    }
    assert {c.kind for c in found} == {"all-to-all", "all-reduce"}


def test_prediction_only_fetches() -> None:
    placed = placed_once(8, "row_wise")
    found = collectives(placed.trainer.predict_program.lower(placed.start(), placed.inputs[0]).compile().as_text())
    assert collections.Counter(c.phase for c in found) == {"id_exchange": 1, "row_exchange": 1}


@pytest.mark.parametrize(
    ("plan", "optimizer"),
    [
        pytest.param("row_wise", ADAGRAD, marks=pytest.mark.wide),
        ("row_wise", Adam(0.05, l2=0.01)),
        pytest.param("table_wise", ADAGRAD, marks=pytest.mark.wide),
        ("column_wise", ADAGRAD),
    ],
)
def test_temporaries_do_not_grow_with_the_table(plan: str, optimizer: RowWiseAdagrad | Adam) -> None:
    def temporary(V: int) -> tuple[int, str, str]:
        placed = built(make((V, 37, 2000), optimizer), 8, plan)
        # equal capacities, so that nothing but the table differs
        batch = placed.trainer.route(placed.routed[0].batch, B)
        (placed.inputs[0],), _ = place_all(placed.trainer.router, [batch], dict.fromkeys(placed.capacities, 512))
        (group,) = placed.trainer.bound.groups
        compiled = placed.compiled
        return (
            compiled.memory_analysis().temp_size_in_bytes,
            str(compiled.as_text()),
            rf"f32\[{group.rows},{group.width}\]",
        )

    small, _, _ = temporary(10_000)
    large, text, shard = temporary(1_000_000)
    assert large - small < 16_384  # a shard of the larger table is 4 MB at least
    assert re.search(rf"{shard}\S* parameter\(", text)  # the pattern does find the donated shard ...
    assert not re.search(rf"{shard}\S* copy\(", text)  # ... and nothing copies it
    assert "input_output_alias" in text


@pytest.mark.parametrize("plan", ["row_wise", "data_parallel"])
def test_tables_stay_in_place_even_after_a_copy_to_the_host(plan: str) -> None:
    placed = placed_once(8, plan)
    (group,) = placed.trainer.bound.groups
    state = placed.start()

    def addresses() -> list[int]:
        return [s.data.unsafe_buffer_pointer() for s in state.tables[group.name].addressable_shards]

    before, read = addresses(), []
    for k in range(3):
        to_host(state, placed.trainer.bound)  # what a checkpoint does before an asynchronous save
        read.append(export_tables(placed.trainer.bound, state.tables, state.slots))  # and what it may still hold then
        load(read[-1])
        state, _ = placed.trainer.train_step(state, placed.inputs[k])
        if plan == "row_wise":
            assert addresses() == before


@pytest.mark.smoke
@pytest.mark.fresh_compile
def test_two_runs_are_bit_identical() -> None:
    """With tables that are spread, and some of which each device has a copy."""

    def run() -> bytes:
        placed = built(make((9000, 37, 12000)), 8, "auto")
        assert [type(g.sharding) for g in placed.trainer.bound.groups] == [RowSharding, ReplicatedSharding]
        state = placed.start()
        for k in range(3):
            state, metrics = placed.trainer.train_step(state, placed.inputs[k])
        host = to_host(state, placed.trainer.bound)
        return b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves((host, metrics)))

    assert run() == run()
