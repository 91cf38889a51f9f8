"""One device's share of lookup and update, against NumPy and the oracle; the exchanges on a small mesh."""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from support.problems import ON_ONE_HOST, mesh_of

from recjax.data.batch import Bags, Batch
from recjax.embedding import segment_sums
from recjax.embedding.bind import bind
from recjax.embedding.layout import BoundPlan, Group
from recjax.embedding.optim import SlotSpec
from recjax.embedding.plan import make_plan
from recjax.embedding.pooling import pool
from recjax.embedding.reference import bag_matrix
from recjax.embedding.residuals import SparseGradient, UpdateContext
from recjax.embedding.routing import capacity
from recjax.embedding.routing.host import pack, route_on_host
from recjax.embedding.routing.routed import FeatureRouting, RoutedBatch, Routing
from recjax.embedding.sharding.local import coalesce
from recjax.embedding.spec import FeatureSpec, TableSpec
from recjax.errors import ConfigError
from recjax.parallel.mesh import BATCH_AXES, sharded

pytestmark = pytest.mark.light_compile

D = 3


@dataclasses.dataclass(frozen=True)
class Counting:
    """Subtracts the gradient; counts how often a row was touched, even by a zero gradient, and sums its gradients."""

    kind: ClassVar[str] = "counting"
    row_wise: ClassVar[bool] = False
    every_row: bool = False

    def slots(self, dim):
        return {"touches": SlotSpec(0.0), "sums": SlotSpec(0.0, (dim,))}

    def apply(self, rows_UxD, slots, grads_UxD, at):
        return rows_UxD - grads_UxD, {"touches": slots["touches"] + 1, "sums": slots["sums"] + grads_UxD}


jit_coalesce = functools.partial(jax.jit, static_argnums=(2, 3))(coalesce)


@functools.partial(jax.jit, static_argnums=(2,))
def jit_coalesce_by_segments(slots, grads, rows):
    with pytest.MonkeyPatch.context() as patch:  # while it is traced
        patch.setattr(segment_sums, "target_platform", lambda: "gpu")
        return coalesce(slots, grads, rows, slots.shape[0] + 1)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([(1, 1), (9, 1000), (64, 5), (64, 1000)]), st.floats(0, 1), st.integers(0, 2**32))
@example((1, 1), 1.0, 0)
@example((64, 5), 1.0, 0)  # nothing but marks of "nothing here"
@example((64, 1000), 0.0, 0)  # mostly distinct
@example((64, 5), 0.0, 0)  # mostly duplicates
def test_coalesce_sums_equal_slots(sizes, empty, seed):
    M, rows = sizes
    rng = np.random.default_rng(seed)
    slots = rng.integers(0, rows, M).astype(np.int32)
    slots[rng.random(M) < empty] = rows
    grads = rng.integers(-1000, 1000, (M, D)).astype(np.float32)  # whole numbers add up exactly in any order
    unique, sums = map(np.asarray, jit_coalesce(slots, grads, rows, 2))
    assert unique.dtype == np.int32 and unique.shape == (M,) and sums.shape == (M, D)
    assert (np.diff(unique) > 0).all()  # what the scatter is promised
    used = unique < rows
    np.testing.assert_array_equal(unique[used], np.unique(slots[slots < rows]))
    expected = np.zeros((rows + 1, D), np.float32)
    np.add.at(expected, slots, grads)
    np.testing.assert_array_equal(sums[used], expected[unique[used]])
    same, by_segments = jit_coalesce_by_segments(slots, grads, rows)
    np.testing.assert_array_equal(same, unique)
    np.testing.assert_array_equal(by_segments[used], sums[used])


def test_coalesce_adds_in_the_order_of_arrival():
    """A fixed order keeps repeated runs bit-identical; float32 sums of thousands of numbers show any other order."""
    rng = np.random.default_rng(0)
    slots, grads = rng.integers(0, 3, 4096).astype(np.int32), rng.normal(size=(4096, D)).astype(np.float32)
    expected = np.zeros((3, D), np.float32)
    np.add.at(expected, slots, grads)
    assert (expected != np.array([grads[slots == i][::-1].cumsum(axis=0)[-1] for i in range(3)])).any()
    np.testing.assert_array_equal(np.asarray(jit_coalesce(slots, grads, 9, 2)[1])[:3], expected)


def test_a_single_list_is_coalesced_already():
    slots = np.array([1, 4, 7, 9, 9], np.int32)
    grads = np.arange(5 * D, dtype=np.float32).reshape(5, D) * (slots < 9)[:, None]
    unique, sums = map(np.asarray, jit_coalesce(slots, grads, 9, 1))
    assert unique.tolist() == [1, 4, 7, 12, 13]
    np.testing.assert_array_equal(sums, grads)


def test_slots_beyond_the_buffer_stay_within_int32():
    slots, grads = jax.ShapeDtypeStruct((16,), jnp.int32), jax.ShapeDtypeStruct((16, D), jnp.float32)
    with pytest.raises(ConfigError, match=r"2,147,483,632 rows .* 16 row gradients .*at most 2,147,483,647 \(int32\)"):
        jax.eval_shape(lambda s, g: coalesce(s, g, 2**31 - 16, 2), slots, grads)
    jax.eval_shape(lambda s, g: coalesce(s, g, 2**31 - 17, 2), slots, grads)


# Lookup of every kind of feature.

COUNTING: Any = Counting()
TABLES = (TableSpec("a", 7, D, COUNTING), TableSpec("b", 11, D, COUNTING))
FEATURES = (
    FeatureSpec("one", "a"),
    FeatureSpec("one_weighted", "b", 1, "mean", True),
    FeatureSpec("three", "b", 3),
    FeatureSpec("three_mean", "a", 3, "mean", True),
    FeatureSpec("jagged", "a", None),
    FeatureSpec("jagged_mean", "b", None, "mean", True),
)


def make(devices: int, plan: str, batch_size: int, size: int) -> tuple[BoundPlan, Batch, RoutedBatch, Routing]:
    rng = np.random.default_rng(size)
    bound = bind(make_plan(plan, TABLES), TABLES, FEATURES, devices)
    bags = {}
    for f in FEATURES:
        lengths = rng.integers(0, 4, size).astype(np.int32) if f.bag is None else None
        shape = int(lengths.sum()) if f.bag is None else (size, f.bag)
        ids = rng.integers(0, 5, shape)  # of 7 and 11 rows: some stay untouched
        bags[f.name] = Bags(ids, lengths, rng.normal(size=shape).astype(np.float32) if f.weighted else None)
    batch = Batch(np.zeros((size, 1), np.float32), bags, np.zeros(size, np.float32), np.ones(size, np.float32))
    counted = route_on_host(batch, bound, batch_size)
    return bound, batch, counted, pack(counted, bound, capacity.grow({}, counted.required_capacities))


def buffer_of(group: Group, tables: dict[str, np.ndarray], padding: float) -> np.ndarray:
    """The group's buffer [O * R, ...] from whole tables in row order."""
    tail = next(iter(tables.values())).shape[1:]
    buffer = np.full((group.owners * group.rows, *tail), padding, np.float32)
    for table in group.segments:
        owner, slot, _ = table.locate(np.arange(table.spec.rows))
        buffer[owner * group.rows + slot] = tables[table.spec.name]
    return buffer


def pooled_alone(feature, rows, routing, samples):
    return pool((feature,), rows, {feature.name: routing}, samples)[feature.name]


@pytest.mark.full
def test_pooling_is_the_oracles_matrix_product():
    """And its gradient the transposed product. The batch is short, so whole devices have nothing but padding."""
    devices = 3
    bound, batch, counted, routing = make(devices, "row_wise", 12, 7)
    (group,) = bound.groups
    rng = np.random.default_rng(0)
    tables = {t.name: rng.normal(size=(t.rows, D)).astype(np.float32) for t in TABLES}
    buffer = buffer_of(group, tables, np.nan).reshape(group.owners, group.rows, D)
    b = counted.local
    slots = routing.groups[group.name].slots_NxOxC
    for feature in FEATURES:
        spec = next(t for t in TABLES if t.name == feature.table)
        matrix = np.zeros((devices * b, spec.rows))
        matrix[: batch.size] = bag_matrix(batch.bags[feature.name], batch.size, spec.rows, feature.pooling)
        upstream = rng.normal(size=(devices * b, D)).astype(np.float32)
        gradient = np.zeros_like(buffer)
        for n in range(devices):
            owner = np.arange(group.owners)[:, None]
            held = slots[n] < group.rows
            rows = np.where(held[..., None], buffer[owner, np.where(held, slots[n], 0)], 0).reshape(-1, D)
            mine = jax.tree.map(lambda x, n=n: np.split(x, devices)[n], routing.features[feature.name])
            pooled, backward = jax.vjp(lambda r, m=mine, f=feature: pooled_alone(f, r, m, b), jnp.asarray(rows))
            expected = matrix[n * b : (n + 1) * b] @ tables[feature.table]
            np.testing.assert_allclose(pooled, expected, rtol=1e-5, atol=1e-6)
            (into,) = backward(jnp.asarray(upstream[n * b : (n + 1) * b]))
            into = np.asarray(into).reshape(*slots[n].shape, D)
            assert not into[~held].any()  # padding gets no gradient
            np.add.at(gradient, (np.broadcast_to(owner, held.shape)[held], slots[n][held]), into[held])
        truth = {t.name: np.zeros((t.rows, D), np.float32) for t in TABLES}
        truth[feature.table] = matrix.T @ upstream
        np.testing.assert_allclose(gradient.reshape(-1, D), buffer_of(group, truth, 0), rtol=1e-5, atol=1e-6)


def test_an_empty_bag_pools_to_zeros_even_beside_nan():
    rows = jnp.asarray([[1.0, 2.0], [np.nan, np.nan]])
    jagged = FeatureRouting(np.array([0, 0, 2, 2]), None, np.array([0, 0, 3, 3]))  # bags of 2, 0 and 0 ids
    assert pooled_alone(FeatureSpec("f", "t", None), rows, jagged, 3).tolist() == [[2, 4], [0, 0], [0, 0]]
    fixed = FeatureRouting(np.array([[0], [2]]), np.array([[3.0], [0.0]], np.float32), None)
    assert pooled_alone(FeatureSpec("f", "t", 1), rows, fixed, 2).tolist() == [[3, 6], [0, 0]]


# The exchanges.


def by_device(group: Group, whole: np.ndarray) -> np.ndarray:
    """A column-wise buffer [N * R, W], padded with NaN, from all columns [R, D]."""
    parts = []
    for piece in group.pieces(group.segments[0]):
        part = np.full((group.rows, group.width), np.nan, np.float32)
        part[:, : piece.last - piece.first] = whole[:, piece.first : piece.last]
        parts.append(part)
    return np.concatenate(parts)


@pytest.mark.parametrize("plan", ON_ONE_HOST)
@pytest.mark.parametrize("devices", [1, 3, 4])
def test_rows_arrive_and_gradients_go_home(devices, plan):
    """Fetched rows are the ones asked for, and every row's gradients meet in one sum, whichever device sent them."""
    bound, _, _, routing = make(devices, plan, 12, 11)
    (group,) = bound.groups
    mesh = mesh_of(devices)
    slots = routing.groups[group.name].slots_NxOxC
    N, owners, C = slots.shape
    rng = np.random.default_rng(0)
    # row "names": every slot of the buffer holds its own global number, and every column a hundredth more
    whole = (np.arange(owners * group.rows)[:, None] + np.arange(D) / 100).astype(np.float32)
    buffer = by_device(group, whole) if plan == "column_wise" else whole
    grads = rng.integers(-9, 9, (N * owners * C, D)).astype(np.float32)

    def exchange(table, asked, grads):
        rows, arrived = group.sharding.fetch(group, table, asked)
        return rows, *group.sharding.send_gradients(group, arrived, grads)

    table_spec = P() if plan == "data_parallel" else P(BATCH_AXES)
    mapped = jax.shard_map(
        exchange,
        mesh=mesh,
        in_specs=(table_spec, P(BATCH_AXES), P(BATCH_AXES)),
        out_specs=(P(BATCH_AXES), table_spec, table_spec),
    )
    on_mesh = jax.device_put((routing.groups[group.name], grads), sharded(mesh, BATCH_AXES))
    rows, touched, sums = map(np.asarray, jax.jit(mapped)(buffer, *on_mesh))

    held = slots < group.rows
    number = np.arange(owners)[None, :, None] * group.rows + slots  # global number of every slot asked for
    truth_rows = np.where(held[..., None], whole[number * held], 0)
    np.testing.assert_array_equal(rows.reshape(N, owners, C, D), truth_rows)

    truth, touches = np.zeros((owners * group.rows, D)), np.zeros(owners * group.rows)
    np.add.at(truth, number[held], grads.reshape(N, owners, C, D)[held])
    np.add.at(touches, number[held], 1)
    if plan == "data_parallel":
        np.testing.assert_array_equal(sums, truth)
        np.testing.assert_array_equal(touched, touches > 0)
        return
    if plan == "column_wise":  # all devices have the same rows
        marks, parts = np.split(touched, N), np.split(sums, N)
        assert all((m == marks[0]).all() for m in marks)
        columns = [s[:, : p.last - p.first] for s, p in zip(parts, group.pieces(group.segments[0]), strict=True)]
        touched, sums = marks[0], np.concatenate(columns, axis=1)
    found = {}
    for owner, (u, s) in enumerate(zip(np.split(touched, owners), np.split(sums, owners), strict=True)):
        found.update({owner * group.rows + int(k): g.tolist() for k, g in zip(u, s, strict=True) if k < group.rows})
    assert found == {int(k): truth[k].tolist() for k in np.flatnonzero(touches)}


# The update.


def bits(x: jax.Array) -> list[Any]:
    return np.asarray(x).view(np.uint32).tolist()


@pytest.mark.parametrize("ok", [True, False])
@pytest.mark.parametrize("plan", ["row_wise", "data_parallel"])
def test_only_touched_rows_change(plan, ok):
    """A zero gradient touches too. Values that arithmetic would alter (-0.0, NaN, denormal) show any other write."""
    (group,) = bind(make_plan(plan, TABLES), TABLES, FEATURES, 3).groups
    R = group.rows
    odd = np.array([-0.0, np.nan, 1e-42, 3.0], np.float32)
    table = np.resize(odd, (R, D))
    counts = np.resize(odd, R)
    touched, grads = [1, 2, R - 1], [[0, 0, 0], [1, 2, 3], [4, 0, 4]]
    table[touched], counts[touched] = 10, 5
    if plan == "row_wise":
        unique = np.array([*touched, R, R + 4, R + 5], np.int32)
        sums = np.array([*grads, [7, 7, 7], [np.nan] * 3, [8, 8, 8]], np.float32)
    else:
        unique, sums = np.zeros(R, bool), np.full((R, D), 9, np.float32)
        unique[touched], sums[touched] = True, grads
    one = jnp.float32(1)

    @jax.jit
    def updated(*given):
        return group.sharding.write(group, *given, group.sharding.propose(group, *given), jnp.asarray(ok))

    context = UpdateContext(one, one, jnp.int32(0), one)
    new, slots = updated(table, {"touches": counts, "sums": table}, SparseGradient(unique, sums), context)
    expected, expected_counts, expected_sums = table.copy(), counts.copy(), table.copy()
    if ok:
        expected[touched] -= np.array(grads, np.float32)
        expected_counts[touched] += 1
        expected_sums[touched] += np.array(grads, np.float32)
    assert new.dtype == slots["touches"].dtype == jnp.float32
    assert bits(new) == bits(expected)
    assert bits(slots["touches"]) == bits(expected_counts)
    assert bits(slots["sums"]) == bits(expected_sums)


@pytest.mark.parametrize("plan", ["row_wise", "data_parallel"])
def test_a_row_in_the_batch_is_touched_once_whatever_its_gradient(plan):
    """From routing to slots: zero gradients everywhere, and rows that several devices and features ask for."""
    devices = 4
    bound, batch, _, routing = make(devices, plan, 12, 11)
    (group,) = bound.groups
    mesh = mesh_of(devices)

    def step(table, counts, asked):
        rows, arrived = group.sharding.fetch(group, table, asked)
        gradient = group.sharding.send_gradients(group, arrived, jnp.zeros_like(rows))
        slots = {"touches": counts, "sums": jnp.zeros_like(table)}
        one = jnp.float32(1)
        given = (group, table, slots, gradient, UpdateContext(one, one, jnp.int32(0), one))
        return group.sharding.write(*given, group.sharding.propose(*given), jnp.asarray(True))

    spec = P(BATCH_AXES) if plan == "row_wise" else P()
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(spec, spec, P(BATCH_AXES)), out_specs=(spec, spec))
    tables = {t.name: np.arange(t.rows * D, dtype=np.float32).reshape(-1, D) for t in TABLES}
    buffer = buffer_of(group, tables, -1)
    asked = jax.device_put(routing.groups[group.name], sharded(mesh, BATCH_AXES))
    new, slots = jax.jit(mapped)(buffer, np.zeros(len(buffer), np.float32), asked)
    np.testing.assert_array_equal(new, buffer)
    in_batch = {}
    for t in TABLES:
        ids = np.concatenate([batch.bags[f.name].ids.ravel() for f in FEATURES if f.table == t.name])
        in_batch[t.name] = np.isin(np.arange(t.rows), ids).astype(np.float32)
        assert 0 < in_batch[t.name].sum() < t.rows
    np.testing.assert_array_equal(slots["touches"], buffer_of(group, in_batch, 0))


def test_a_feature_that_is_not_pooled_keeps_its_rows_apart():
    rows = jnp.asarray([[1.0, 2.0], [3.0, 4.0]])
    routing = FeatureRouting(np.array([[1, 0, 2], [2, 2, 2]]), None, None)  # 2: no id
    sequence = pooled_alone(FeatureSpec("f", "t", None, "none"), rows, routing, 2)
    assert sequence.rows_BxHxD.tolist() == [[[3, 4], [1, 2], [0, 0]], [[0, 0]] * 3]
    assert sequence.mask_BxH.tolist() == [[True, True, False], [False] * 3]
