"""Tables in bfloat16: rounding without bias, the same bits on every mesh, half the memory."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from support.problems import mesh_of, problem

import recjax
from recjax.data.synthetic.clicks import Synthetic
from recjax.embedding.bind import bind
from recjax.embedding.buffers import initial_rows, initialise
from recjax.embedding.collection import export_tables, import_tables
from recjax.embedding.group import Group
from recjax.embedding.optim import RowWiseAdagrad, Sgd
from recjax.embedding.plan import make_plan
from recjax.embedding.quantize import from_storage, nearest, stochastic
from recjax.embedding.residuals import SparseGradient, UpdateContext
from recjax.embedding.routing import capacity
from recjax.embedding.routing.host import pack, route_on_host
from recjax.embedding.routing.routed import GroupRouting
from recjax.embedding.segment import Exchange
from recjax.embedding.sharded import exchange_of
from recjax.embedding.spec import FeatureSpec, TableSpec
from recjax.errors import ConfigError, TrainingError
from recjax.models.dlrm import DLRMConfig
from recjax.parallel.mesh import put_share
from recjax.planning.compiled_collectives import collectives
from recjax.train import state as states
from recjax.train.build import build_trainer
from recjax.train.module import ModuleDef
from recjax.train.routers import HostRouter, pad
from recjax.train.step import make_train_step
from recjax.train.table_specs import specs

pytestmark = pytest.mark.light_compile(as_text=True)

NARROW = {"dtype": "bfloat16"}
AXES = ("host", "device")


def as_floats(held) -> np.ndarray:
    return np.asarray(held).view(jnp.bfloat16).astype(np.float32)


def neighbours(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The bfloat16 values around x: towards 0, and away from it."""
    low = (np.asarray(x, np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)
    return low, (low.view(np.uint32) + 0x10000).view(np.float32)


@settings(max_examples=60)
@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=4, max_size=4), st.integers(0, 2**16 - 1))
def test_a_value_goes_to_a_neighbour_and_up_for_its_share_of_all_bits(values, drawn):
    """Of the 2^16 possible draws exactly `share` go away from 0: this is what makes the mean exact."""
    x = np.array(values, np.float32)
    low, high = neighbours(x)
    share = x.view(np.uint32) & 0xFFFF
    got = as_floats(stochastic(jnp.asarray(x), jnp.full(4, drawn << 16, jnp.uint32)))
    up = drawn >= 2**16 - share.astype(np.int64)
    assert (got == np.where(up, high, low)).all()


def test_exact_values_stay_and_what_is_not_finite_stays_so():
    x = np.array([1.5, -0.0, 0.0, 3.3895314e38, np.inf, -np.inf, np.nan, 2.0**-130], np.float32)
    x[6] = np.uint32(0x7FFFFFFF).view(np.float32)  # a NaN that a carry would make -0
    for drawn in (0, 2**31, 2**32 - 1):
        got = as_floats(stochastic(jnp.asarray(x), jnp.full(8, drawn, jnp.uint32)))
        assert np.array_equal(got, x, equal_nan=True) and np.signbit(got[1])


def group_of(placement: str, devices: int, names: str = "ab", hosts: int = 1, **more) -> Group:
    more = {"optimizer": Sgd(0.1), **NARROW, **more}
    tables = tuple(TableSpec(n, 20 + 7 * i, 6, **more) for i, n in enumerate(names))
    features = tuple(FeatureSpec(t.name, t.name) for t in tables)
    return bind(make_plan(placement, tables), tables, features, devices, hosts=hosts).groups[0]


@functools.cache
def rounded(
    placement: str, devices: int, names: str = "ab", seed: int = 3, step: int = 5, hosts: int = 1
) -> dict[str, np.ndarray]:
    """All rows of the tables, each value 1 + 2^-8, written once: halfway between two neighbours. By table, [V, D]."""
    group = group_of(placement, devices, names, hosts)
    at = P() if placement == "data_parallel" else P(AXES)

    def body(x):
        homes = jnp.arange(group.rows, dtype=jnp.int32)
        return exchange_of(group).to_storage(x, homes, context_of(seed, jnp.int32(step)), jnp.uint16)

    mapped = jax.jit(jax.shard_map(body, mesh=mesh_of(devices, hosts), in_specs=at, out_specs=at, check_vma=False))
    buffer = mapped(jnp.full((group.parts * group.rows, group.width), 1 + 2.0**-8))
    bound = dataclasses.replace(bind_of(group), groups=(group,))
    exported = export_tables(bound, {group.name: buffer}, {group.name: {}})
    return {name: arrays["rows"].load().astype(np.float32) for name, arrays in exported.items()}


def context_of(seed: int, step: jax.Array) -> UpdateContext:
    return UpdateContext(jnp.float32(1), jnp.float32(1), step, jnp.float32(1), seed)


def bind_of(group: Group):
    tables = tuple(t.spec for t in group.segments)
    return bind(make_plan("row_wise", tables), tables, group.features, group.devices, hosts=group.hosts)


@pytest.mark.parametrize(
    ("placement", "devices", "hosts"),
    [("row_wise", 3, 1), ("table_wise", 2, 1), ("column_wise", 4, 1), ("data_parallel", 2, 1), ("grid", 8, 4)]
    + [("table_row_wise", 4, 2)],
)
def test_the_bits_do_not_depend_on_mesh_plan_or_company(placement, devices, hosts):
    truth = rounded("row_wise", 1)
    got = rounded(placement, devices, hosts=hosts)
    for name in "ab":
        assert (got[name] == truth[name]).all()
        assert 0.2 < (truth[name] > 1 + 2.0**-8).mean() < 0.8
    assert (rounded("row_wise", 1, "a")["a"] == truth["a"]).all()


def test_the_bits_differ_by_seed_step_table_row_and_column():
    truth = rounded("row_wise", 1)
    draws = [truth["a"], truth["b"][:20], rounded("row_wise", 1, seed=4)["a"], rounded("row_wise", 1, step=6)["a"]]
    flat = np.array([(d > 1.002).ravel() for d in draws], np.float64) * 2 - 1
    n = flat.shape[1]  # 120 fair coins: sums of products have a standard deviation of sqrt(120)
    products = flat @ flat.T
    assert np.abs(products[np.triu_indices(4, 1)]).max() < 4.5 * np.sqrt(n)
    a = (truth["b"] > 1.002) * 2.0 - 1
    for one in (a @ a.T, a.T @ a):  # rows among each other, columns among each other
        size = a.size // len(one)
        assert np.abs(one[np.triu_indices(len(one), 1)]).max() < 5 * np.sqrt(size)


def test_means_over_steps_are_those_of_the_values():
    """4096 draws for each of 27 x 6 values; the mean is within 5 standard deviations of the value, for all of them."""
    group, steps = group_of("row_wise", 1, "a"), 4096
    x = np.random.default_rng(0).uniform(1, 2, (group.rows, 6)).astype(np.float32)

    def body(x):
        slots = jnp.arange(group.rows, dtype=jnp.int32)

        def one(step):
            held = exchange_of(group).to_storage(x, slots, context_of(0, step), jnp.uint16)
            return from_storage(held).astype(jnp.float32)

        return jnp.mean(jax.lax.map(one, jnp.arange(steps, dtype=jnp.int32), batch_size=64), axis=0)

    mapped = jax.jit(jax.shard_map(body, mesh=mesh_of(1), in_specs=P(AXES), out_specs=P(AXES), check_vma=False))
    low, high = neighbours(x)
    share = (x - low) / (high - low)
    deviation = (high - low) * np.sqrt(share * (1 - share) / steps)
    assert (np.abs(np.asarray(mapped(x)) - x) <= 5 * deviation + 1e-6).all()
    assert np.abs(np.asarray(nearest(jnp.asarray(x), jnp.uint16).view(jnp.bfloat16), np.float32) - x).max() > 1e-3


@pytest.mark.parametrize(
    ("placement", "rounding", "every_row"),
    [
        ("row_wise", "stochastic", False),
        ("row_wise", "nearest", False),
        ("row_wise", "stochastic", True),
        ("data_parallel", "stochastic", False),
    ],
)
def test_small_updates_arrive_in_the_mean_and_untouched_rows_never_move(placement, rounding, every_row):
    """400 steps of 2^-12 on rows of 1, each an eighth of half a step: nearest stays at 1, stochastic goes along."""
    group = group_of(placement, 1, "a", rounding=rounding, optimizer=Sgd(0.1, every_row=every_row))
    R = group.rows
    start = np.full((R, 6), 1, np.float32)
    start[1::2] = -0.0  # untouched, of odd sign
    touched = np.arange(0, R, 2, dtype=np.int32)

    def body(table):
        def one(step, table):
            if placement == "data_parallel":
                mask = jnp.zeros(R, bool).at[touched].set(True)
                given = mask, jnp.full((R, 6), -(2.0**-12) * 10)
            else:
                given = jnp.asarray(touched), jnp.full((len(touched), 6), -(2.0**-12) * 10)
            context = UpdateContext(jnp.float32(1), jnp.float32(1), step, jnp.float32(1), 7)
            exchange = exchange_of(group)
            proposed = exchange.propose(table, {}, SparseGradient(*given), context)
            return exchange.write(table, {}, proposed, jnp.asarray(True))[0]

        return jax.lax.fori_loop(0, 400, one, table)

    at = P() if placement == "data_parallel" else P(AXES)
    mapped = jax.jit(jax.shard_map(body, mesh=mesh_of(1), in_specs=at, out_specs=at, check_vma=False))
    end = as_floats(mapped(nearest(jnp.asarray(start), jnp.uint16)))
    assert (end[1::2].view(np.uint32) == start[1::2].view(np.uint32)).all()
    if rounding == "nearest":
        assert (end[touched] == 1).all()
    else:  # a random walk of 400 steps: 60 values, each with a standard deviation of at most 400^0.5 * 2^-8
        assert abs(end[touched].mean() - (1 + 400 * 2.0**-12)) < 5 * 20 * 2.0**-8 / np.sqrt(60)


def test_initial_values_are_the_nearest_and_checkpoints_hold_bfloat16():
    tables = tuple(TableSpec(n, 50, 6, RowWiseAdagrad(0.1), **NARROW) for n in "ab")
    features = tuple(FeatureSpec(t.name, t.name) for t in tables)
    saved = None
    for placement, devices in (("row_wise", 2), ("column_wise", 2)):
        bound, mesh = bind(make_plan(placement, tables), tables, features, devices), mesh_of(devices)
        buffers, slots = initialise(bound, mesh, 1)
        (group,) = bound.groups
        assert buffers[group.name].dtype == jnp.uint16 and slots[group.name]["sum_of_squares"].dtype == jnp.float32
        exported = {t: {k: v.load() for k, v in a.items()} for t, a in export_tables(bound, buffers, slots).items()}
        for table in group.segments:
            rows = exported[table.spec.name]["rows"]
            assert rows.dtype == jnp.bfloat16
            truth = np.asarray(initial_rows(1, table.spec.name, jnp.arange(50), 6, table.spec.scale))
            assert (rows[table.order.position(np.arange(50))] == truth.astype(jnp.bfloat16)).all()
        if saved:  # onto another mesh and plan, and out again
            again = export_tables(bound, *import_tables(bound, mesh, saved))
            assert (again["a"]["rows"].load().view(np.uint16) == saved["a"]["rows"].view(np.uint16)).all()
        saved = exported
    wide = tuple(dataclasses.replace(t, dtype="float32") for t in tables)
    bound = bind(make_plan("row_wise", wide), wide, features, 2)
    with pytest.raises(TrainingError, match="holds shape .50, 6., bfloat16 for 'rows' .* needs shape .50, 6., float32"):
        import_tables(bound, mesh_of(2), saved)


def test_fetched_rows_are_float32():
    for placement in ("row_wise", "data_parallel"):
        group = group_of(placement, 1, "a")
        slots = np.arange(4, dtype=np.int32).reshape(1, 1, 4)
        table = nearest(jnp.arange(group.rows * 6, dtype=jnp.float32).reshape(-1, 6) / 8, jnp.uint16)
        body = jax.shard_map(
            lambda t, s, g=group: exchange_of(g).fetch(t, GroupRouting(s, None))[0],
            mesh=mesh_of(1),
            in_specs=(P() if placement == "data_parallel" else P(AXES), P(AXES)),
            out_specs=P(AXES),
        )
        rows = jax.jit(body)(table, slots)
        assert rows.dtype == jnp.float32 and (rows == as_floats(table)[:4]).all()


def test_tables_of_another_dtype_lie_apart():
    tables = (
        TableSpec("a", 9, 4, Sgd(0.1)),
        TableSpec("b", 9, 4, Sgd(0.1), **NARROW),
        TableSpec("c", 9, 4, Sgd(0.1), rounding="nearest"),
        TableSpec("d", 9, 4, Sgd(0.1), rounding="nearest", **NARROW),
    )
    bound = bind(make_plan("row_wise", tables), tables, tuple(FeatureSpec(n, n) for n in "abcd"), 2)
    assert {g.name: [t.spec.name for t in g.segments] for g in bound.groups} == {
        "row_wise_D4_sgd": ["a", "c"],
        "row_wise_D4_bfloat16_stochastic_sgd": ["b"],
        "row_wise_D4_bfloat16_nearest_sgd": ["d"],
    }


def test_settings():
    source = Synthetic(rows=(30, 40), train_rows=10).open()
    own = ("embedding.tables.sparse_0.dtype=float32", "embedding.tables.sparse_1.rounding=nearest")
    config = recjax.load("synthetic", "embedding.dtype=bfloat16", *own)
    tables, _ = specs(config, source.schema)
    assert [(t.dtype, t.rounding) for t in tables] == [("float32", "stochastic"), ("bfloat16", "nearest")]
    wide = recjax.load("synthetic", "compute_dtype=float64", "embedding.tables.sparse_1.dtype=bfloat16")
    with pytest.raises(ConfigError, match="compute_dtype is float64, but table 'sparse_1' is to hold bfloat16"):
        build_trainer(wide, source)


@pytest.mark.full
def test_the_compiled_step_holds_half_and_widens_no_table():
    """Of the step as it is compiled: bytes of tables, and no float32 of a table's shape; and it trains, near float32.

    With rows and gradients of int8 on the way.
    """

    def built(dtype: str, precision: Any) -> Any:
        source = Synthetic(rows=(40_000, 300), ids_per_bag=(1, 2), train_rows=300).open()
        made = problem(
            source,
            DLRMConfig(bottom=(8,), top=(8, 1)),
            RowWiseAdagrad(0.05),
            8,
            steps=2,
            batch_size=64,
            tx=optax.sgd(0.1),
        )
        tables = tuple(dataclasses.replace(t, dtype=dtype) for t in made.tables)
        plan = make_plan("row_wise", tables, Exchange(precision, precision))
        bound = bind(plan, tables, made.features, 2)
        model, mesh = made.build(np.float32), mesh_of(2)
        state = states.create(model, bound, mesh, made.tx, 0, np.float32)
        counted = [route_on_host(b, bound, 64) for b in made.batches]
        capacities: dict[str, int] = {}
        for c in counted:
            capacities = capacity.grow(capacities, c.required_capacities)
        router = HostRouter(bound, mesh, np.float32)
        inputs = [put_share(pad(c, pack(c, bound, capacities), router), mesh) for c in counted]
        step = make_train_step(ModuleDef.of(model), bound, mesh, made.tx).lower(state, inputs[0]).compile()
        before = {n: np.asarray(x) for n, x in state.tables.items()}
        losses = []
        for one in inputs:
            state, metrics = step(state, one)
            losses.append(float(metrics["loss"]))
        return bound.groups[0], step, losses, (before, state)

    wide, step32, losses32, _ = built("float32", "float32")
    group, step16, losses16, (before, state) = built("bfloat16", "int8")
    memory32, memory16 = step32.memory_analysis(), step16.memory_analysis()
    saved = group.rows * group.width * 2
    assert memory32.argument_size_in_bytes - memory16.argument_size_in_bytes == saved
    assert memory32.alias_size_in_bytes - memory16.alias_size_in_bytes == saved
    assert memory16.temp_size_in_bytes < memory32.temp_size_in_bytes + saved / 4
    wire = [c for c in collectives(step16.as_text()) if c.kind == "all-to-all"]
    assert {c.phase: c.shapes[0][0] for c in wire} == {
        "id_exchange": "s32",
        "row_exchange": "u8",
        "grad_exchange": "u8",
    }
    assert re.search(rf"u16\[{group.rows},{group.width}\]\S* parameter\(", step16.as_text())
    assert not re.search(rf"f32\[{group.rows},{group.width}\]", step16.as_text())
    assert losses16 != losses32 and np.allclose(losses16, losses32, rtol=1e-2)
    moved = before[group.name] != np.asarray(state.tables[group.name])
    assert 0 < moved.any(axis=1).sum() < 600
