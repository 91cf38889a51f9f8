"""Routing loses nothing and invents nothing: every sample's ids and weights are read back from the arrays alone."""

import collections

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.routing import THIRD, build, make_batch

from recjax.data.batch import Bags, Batch
from recjax.data.synthetic.stream import CRITEO_KAGGLE_ROWS, ZipfStream
from recjax.embedding.bind import bind
from recjax.embedding.group import Group
from recjax.embedding.layout import ACROSS, BoundPlan
from recjax.embedding.optim import Sgd
from recjax.embedding.plan import make_plan
from recjax.embedding.routing import capacity
from recjax.embedding.routing.host import pack, route_on_host
from recjax.embedding.routing.keys import distinct
from recjax.embedding.routing.routed import Routing
from recjax.embedding.segment import PLACEMENTS
from recjax.embedding.sharding import ColumnSharding, GridSharding, RowSharding
from recjax.embedding.spec import FeatureSpec, TableSpec

LARGEST = 2**31 - 1
Bag = list[tuple[int, float]]  # (row, weight), in no particular order

FEATURES = st.lists(
    st.tuples(
        st.integers(0, 2),  # table
        st.sampled_from([None, None, 1, 2, 3]),  # bag
        st.sampled_from(["sum", "mean", "none"]),
        st.booleans(),  # weighted
    ),
    min_size=1,
    max_size=5,
)
TABLES = st.lists(
    st.tuples(st.sampled_from([1, 2, 7, 40, THIRD]), st.sampled_from([2, 3]), st.sampled_from(PLACEMENTS)),
    min_size=3,
    max_size=3,
)


def bags_of(batch: Batch, feature: FeatureSpec, dtype: type) -> list[Bag]:
    """What the input says, sample by sample."""
    bags, out, start = batch.bags[feature.name], [], 0
    for i in range(batch.size):
        length = bags.ids.shape[1] if bags.lengths is None else int(bags.lengths[i])
        ids = bags.ids.ravel()[start : start + length].tolist()
        weights = [1.0] * length if bags.weights is None else bags.weights.ravel()[start : start + length].tolist()
        out.append(
            [
                (r, float(dtype(w / length if feature.pooling == "mean" else w)))
                for r, w in zip(ids, weights, strict=True)
            ]
        )
        start += length
    return out


def row_at_slot(group: Group, owner: int, slot: int) -> tuple[str, int]:
    """The (table, row) that lives at a slot of an owner's buffer."""
    for table in group.segments:
        position = int(table.split.start(owner)) + slot - table.offsets[owner]
        if table.split.start(owner) <= position < table.split.start(owner + 1):
            return table.spec.name, int(table.order.row(np.int64(position)))
    raise AssertionError("the slot is padding")


def check_groups(routing: Routing, bound: BoundPlan) -> None:
    """Shapes, types, and slots that are distinct, counted, and followed by nothing but R."""
    for group in bound.groups:
        slots, counts = routing.groups[group.name].slots_NxOxC, routing.groups[group.name].counts_NxO
        assert slots.dtype == counts.dtype == np.int32
        assert slots.shape[:2] == counts.shape == (bound.devices, group.num_peers if group.two_step else group.owners)
        for asked, n in zip(slots.reshape(-1, slots.shape[2]), counts.ravel(), strict=True):
            assert len(set(asked[:n])) == n and (asked[:n] >= 0).all() and (asked[:n] < group.rows).all()
            assert (asked[n:] == group.rows).all()


def asked_of(group: Group, routing: Routing, n: int, place: int, capacity: int) -> tuple[int, int]:
    """The (owner, slot) whose row device n finds at a place among those that it fetched."""
    of = routing.groups[group.name]
    which, c = divmod(place, capacity)
    if not group.two_step:
        return which, int(of.slots_NxOxC[n, which, c])
    host, device = divmod(n, group.per_host)
    relay = host * group.per_host + which
    _, asks, across = of.slots_NxOxC.shape
    of_host, k = divmod(int(of.inside_NxExC[relay, device, c]), across)
    assert of_host < asks
    sharding = type(group.sharding)
    owner = {RowSharding: of_host * group.per_host + which, GridSharding: which, ColumnSharding: 0}[sharding]
    if sharding is ColumnSharding:  # other relays have other columns of the same rows
        for x in of.slots_NxOxC, of.inside_NxExC:
            same = x.reshape(group.hosts, group.per_host, *x.shape[1:])
            assert (same == same[:, :1]).all()
    return owner, int(of.slots_NxOxC[relay, of_host, k])


def read_back(
    routing: Routing, bound: BoundPlan, local: int, parts: int
) -> tuple[dict[str, list[Bag]], dict[str, set[tuple[int, int]]]]:
    """The bags of all N * b samples, by feature; and the (device, place) pairs that some id uses, by group."""
    found: dict[str, list[Bag]] = {}
    used: dict[str, set[tuple[int, int]]] = collections.defaultdict(set)
    N, size = bound.devices * parts, local // parts
    for group in bound.groups:
        of = routing.groups[group.name]
        C = (of.inside_NxExC if group.two_step else of.slots_NxOxC).shape[2]
        nothing = group.num_row_lists * C
        for feature in group.features:
            f = routing.features[feature.name]
            assert f.inverse.dtype == np.int32
            inverse = f.inverse.reshape(N, -1)
            segments = np.repeat(np.arange(size), inverse.shape[1] // size)
            segments = np.tile(segments, (N, 1)) if f.segments is None else f.segments.reshape(N, -1)
            assert segments.shape == inverse.shape
            weights = np.ones(inverse.shape) if f.weights is None else f.weights.reshape(inverse.shape)
            samples: list[Bag] = [[] for _ in range(N * size)]
            for n in range(N):
                for place, segment, weight in zip(inverse[n], segments[n], weights[n], strict=True):
                    if place == nothing:
                        assert f.segments is None or segment == size
                        assert f.weights is None or weight == 0
                        continue
                    assert 0 <= place < nothing
                    used[group.name].add((n // parts, int(place)))
                    table, row = row_at_slot(group, *asked_of(group, routing, n // parts, int(place), C))
                    assert table == feature.table
                    samples[n * size + segment].append((row, float(weight)))
            found[feature.name] = samples
    return found, used


def check_relays(group: Group, routing: Routing, used: set[tuple[int, int]], capacity: int) -> None:
    """A host asks each owner for each row once that some device of it uses, and for none else; marks differ."""
    of, E = routing.groups[group.name], group.per_host
    rows = {(n // E, *asked_of(group, routing, n, place, capacity)) for n, place in used}
    relays = E if type(group.sharding) is ColumnSharding else 1  # which all ask for the same
    assert of.counts_NxO.sum() == len(rows) * relays
    inside = of.inside_NxExC.reshape(-1, capacity)
    assert inside.dtype == np.int32 and (np.diff(inside, axis=1) > 0).all()
    asks, across = of.slots_NxOxC.shape[1:]
    assert (inside < asks * across).sum() == len(used) * relays


@settings(max_examples=120, deadline=None)
@given(
    TABLES,
    FEATURES,
    st.integers(1, 6),
    st.sampled_from([1, 1, 2, 3]),
    st.integers(1, 13),
    st.integers(1, 3),
    st.integers(0, 12),
    st.integers(0, 2**32),
)
@example([(40, 2, "row_wise")] * 3, [(0, None, "mean", True), (0, 2, "sum", False)], 4, 1, 10, 1, 7, 1)
@example([(LARGEST, 2, "row_wise")] * 3, [(0, 3, "sum", False), (0, None, "sum", False)], 1, 1, 5, 1, 0, 4)
@example(
    [(40, 2, "grid"), (7, 2, "column_wise"), (7, 3, "table_row_wise")],
    [(t, 3, "sum", False) for t in range(3)],
    2,
    3,
    13,
    1,
    1,
    2,
)
def test_every_bag_can_be_read_back(tables, features, per_host, hosts, batch_size, parts, missing, seed):
    devices = per_host * hosts
    bound = build(tables, features, devices, hosts)
    batch = make_batch(bound, max(1, batch_size - missing), seed)
    dtype = np.float64 if seed % 5 == 0 else np.float32
    counted = route_on_host(batch, bound, batch_size, parts)
    b = counted.local
    assert b % parts == 0 and batch_size <= devices * b < batch_size + devices * parts

    tight = dict(counted.required_capacities)
    for capacities in (
        capacity.grow({}, tight),
        capacity.grow(capacity.grow({}, tight), {k: v + 9 for k, v in tight.items()}),
    ):
        routing = pack(counted, bound, capacities, dtype)
        check_groups(routing, bound)
        found, used = read_back(routing, bound, b, parts)
        for feature in bound.features:
            expected = bags_of(batch, feature, dtype) + [[]] * (devices * b - batch.size)
            if feature.pooling == "none":
                assert found[feature.name] == expected  # in order
            assert [collections.Counter(s) for s in found[feature.name]] == [collections.Counter(s) for s in expected]
            weights = routing.features[feature.name].weights
            assert weights is None or weights.dtype == dtype
            assert (weights is None) == (feature.pooling != "mean" and not feature.weighted)

        for group in bound.groups:
            C, of = capacities[group.name], routing.groups[group.name]
            lists = np.zeros((devices, group.num_row_lists), int)
            for n, place in used[group.name]:
                lists[n, place // C] += 1
            assert counted.required_capacities[group.name] == lists.max()
            if group.two_step:
                check_relays(group, routing, used[group.name], C)
                assert counted.required_capacities[group.name + ACROSS] == of.counts_NxO.max()
            else:  # each distinct row once, and none that no id uses
                np.testing.assert_array_equal(of.counts_NxO, lists)

    jagged = [f.name for f in bound.features if f.bag is None]
    across = {g.name + ACROSS for g in bound.groups if g.two_step}
    assert counted.required_capacities.keys() == {g.name for g in bound.groups} | across | set(jagged)
    for name in jagged:
        lengths = np.pad(batch.bags[name].lengths, (0, devices * b - batch.size))
        sums = lengths.reshape(devices * parts, b // parts).sum(axis=1)
        assert counted.required_capacities[name] == sums.max()


def test_a_batch_by_hand():
    tables = (TableSpec("t", 4, 2, Sgd()),)
    features = (FeatureSpec("x", "t"), FeatureSpec("y", "t", None, "mean"))
    bound = bind(make_plan("row_wise", tables), tables, features, 2)
    # position of each row: so rows 0 and 3 live on device 0, rows 2 and 1 on device 1
    assert bound.groups[0].segments[0].order.position(np.arange(4)).tolist() == [0, 3, 2, 1]
    bags = {
        "x": Bags(np.array([[0], [3], [2]])),
        "y": Bags(np.array([1, 1, 3, 2, 0, 0]), np.array([3, 0, 3], np.int32)),
    }
    batch = Batch(np.zeros((3, 1), np.float32), bags, np.zeros(3, np.float32), np.ones(3, np.float32))
    counted = route_on_host(batch, bound, 4)
    group = bound.groups[0].name
    assert counted.required_capacities == {group: 2, "y": 3}
    routing = pack(counted, bound, {group: 3, "y": 4})
    # device 0 wants rows 0, 3 (slots 0, 1) of owner 0 and row 1 (slot 1) of owner 1; device 1 wants row 0, and row 2
    R = 2
    assert routing.groups[group].slots_NxOxC.tolist() == [[[0, 1, R], [1, R, R]], [[0, R, R], [0, R, R]]]
    assert routing.groups[group].counts_NxO.tolist() == [[2, 1], [1, 1]]
    x, y = routing.features["x"], routing.features["y"]
    assert x.inverse.tolist() == [[0], [1], [3], [6]] and x.weights is None and x.segments is None
    assert y.inverse.tolist() == [3, 3, 1, 6, 3, 0, 0, 6]
    assert y.segments.tolist() == [0, 0, 0, 2, 0, 0, 0, 2]
    np.testing.assert_allclose(y.weights, np.array([1, 1, 1, 0, 1, 1, 1, 0]) / 3, rtol=1e-7)


def test_routing_only_depends_on_its_batch():
    """Worker threads count batches in any order, and a shorter batch is no other problem."""
    bound = build([(40, 2, "row_wise")] * 3, [(0, None, "sum", False), (1, 2, "sum", True)], 3)
    batches = [make_batch(bound, size, size) for size in (10, 4, 10, 1)]
    first = [route_on_host(batch, bound, 10) for batch in batches]
    again = [route_on_host(batch, bound, 10) for batch in reversed(batches)][::-1]
    for a, b in zip(first, again, strict=True):
        assert a.required_capacities == b.required_capacities
        for name in a.keys:
            np.testing.assert_array_equal(a.keys[name], b.keys[name])


@pytest.mark.parametrize("exponent", [1.1, 1.5])
def test_padding_is_at_most_a_quarter_of_the_useful_bytes(exponent: float) -> None:
    """Criteo Kaggle's rows, 4096 samples on 8 devices: what leaves a device as compiled, over what must."""
    source = ZipfStream(rows=CRITEO_KAGGLE_ROWS, exponent=exponent, distinct_blocks=6, train_rows=6 * 4096).open()
    specs = tuple(TableSpec(f.name, f.rows, 16, Sgd()) for f in source.schema.features)
    bound = bind(make_plan("row_wise", specs), specs, tuple(FeatureSpec(t.name, t.name) for t in specs), 8)
    (group,) = bound.groups
    sizes: dict[str, int] = {}
    for block in range(6):
        batch = source.read("train", block)
        counted = route_on_host(batch, bound, 4096)
        sizes = capacity.grow(sizes, counted.required_capacities)
        least = set()  # rows that some device must get from another
        for table in group.segments:
            ids = batch.bags[table.spec.name].ids.ravel()
            owners, _, _ = table.locate(ids)
            asking = np.arange(4096) // 512
            away = owners != asking
            least |= {(table.spec.name, *x) for x in zip(asking[away], owners[away], ids[away], strict=True)}
        useful = pack(counted, bound, sizes).groups[group.name].counts_NxO
        assert useful.sum() - np.trace(useful) == len(least)
        assert 8 * 7 * sizes[group.name] <= 1.25 * len(least)


def test_short_capacities_are_refused():
    bound = build([(40, 2, "row_wise")] * 3, [(0, None, "sum", False), (1, 2, "sum", True)], 3)
    counted = route_on_host(make_batch(bound, 10, 1), bound, 10)
    assert len(counted.required_capacities) == 2
    pack(counted, bound, counted.required_capacities)  # exactly enough
    for name, need in counted.required_capacities.items():
        assert need > 1
        with pytest.raises(ValueError, match=rf"{{'{name}': \({need}, {need - 1}\)}}; grow them"):
            pack(counted, bound, {**counted.required_capacities, name: need - 1})
        with pytest.raises(ValueError, match="None"):
            pack(counted, bound, {k: v for k, v in counted.required_capacities.items() if k != name})


def test_one_data_feature_in_two_tables():
    tables = (TableSpec("t", 40, 4, Sgd()), TableSpec("first", 40, 1, Sgd()))
    features = (FeatureSpec("x", "t", None), FeatureSpec("x.first", "first", None, source="x"))
    bound = bind(make_plan("row_wise", tables), tables, features, 2)
    bags = {"x": Bags(np.array([3, 9, 3]), np.array([2, 0, 1], np.int32))}
    batch = Batch(np.zeros((3, 1), np.float32), bags, np.zeros(3, np.float32), np.ones(3, np.float32))
    counted = route_on_host(batch, bound, 3)
    found, _ = read_back(pack(counted, bound, capacity.grow({}, counted.required_capacities)), bound, counted.local, 1)
    assert [sorted(s) for s in found["x"]] == [sorted(s) for s in found["x.first"]]
    assert sorted(found["x"][0]) == [(3, 1.0), (9, 1.0)]


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([1, 2, 2**16, 2**16 + 1, 2**31, 2**40]), st.integers(0, 50), st.integers(0, 99))
@example(2**40, 5000, 0)
@example(2**31, 5000, 0)
def test_distinct_keys_are_those_of_sorting_them_whole(limit, size, seed):
    rng = np.random.default_rng(seed)
    pool = np.append(rng.integers(0, limit, max(1, size // 3)), [0, limit - 1])  # so that some are equal
    keys = rng.choice(pool, size).astype(np.int32 if limit <= 2**31 else np.int64)
    found, inverse = distinct(keys, limit)
    expected, expected_inverse = np.unique(keys, return_inverse=True)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(inverse, expected_inverse)
    assert found.dtype == keys.dtype and inverse.dtype == np.int32
