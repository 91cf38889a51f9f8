"""Routing on the devices against routing on the host, whose arrays test_routing_host.py checks by brute force."""

import collections
import dataclasses
import re
from typing import Any

import jax
import numpy as np
import pytest
from support.problems import mesh_of
from support.routing import THIRD, apart, build, make_batch

from recjax.embedding.layout import BoundPlan
from recjax.embedding.routing import capacity
from recjax.embedding.routing.host import route_on_host
from recjax.embedding.segment import RowIds, Segment
from recjax.parallel.mesh import sharded
from recjax.train.routers import DeviceRouter, HostRouter, InFlight

pytestmark = pytest.mark.light_compile

TABLES = [
    (40, 2, "row_wise"),
    (THIRD, 2, "table_wise"),
    (7, 2, "column_wise"),
    (9, 3, "data_parallel"),
    (5, 2, "row_wise"),
    (8, 3, "grid"),
    (9, 2, "table_row_wise"),
]
FEATURES = [
    (0, 3, "sum", False),
    (0, None, "mean", True),
    (1, None, "sum", False),
    (1, 1, "mean", False),
    (2, 2, "none", True),
    (3, None, "none", False),
    (4, 1, "sum", False),
    (5, None, "mean", False),
    (6, 2, "sum", False),
]
HOT = RowIds((0, 1, 2, 39))
SPLIT = [
    (
        40,
        4,
        (
            Segment("row_wise", HOT, owners=(2, 0)),
            Segment("table_wise", "rest", columns=(0, 1)),
            Segment("row_wise", "rest", columns=(1, 4)),
        ),
    ),
    (50, 2, (Segment("data_parallel", HOT), Segment("table_wise", RowIds((5, 49))), Segment("row_wise", "rest"))),
    (40, 2, (Segment("hot", HOT), Segment("row_wise", "rest"))),
]
OF_SPLIT = [
    (0, 3, "sum", False),
    (0, None, "mean", True),
    (0, None, "none", False),
    (1, None, "sum", False),
    (1, 2, "none", True),
    (2, 2, "sum", False),
    (2, None, "mean", False),
]


def equal(found: object, expected: object) -> None:
    (left, kind), (right, same) = jax.tree.flatten(found), jax.tree.flatten(expected)
    assert str(kind) == str(same)
    for a, b in zip(left, right, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        assert a.dtype == b.dtype and a.sharding.is_equivalent_to(b.sharding, a.ndim)


@pytest.mark.full
@pytest.mark.parametrize(
    ("of", "devices", "hosts", "parts", "dedup"),
    [
        ((TABLES, FEATURES), 3, 1, 2, True),
        ((TABLES, FEATURES), 3, 1, 1, False),
        ((TABLES, FEATURES), 6, 2, 1, True),
        ((SPLIT, OF_SPLIT), 3, 1, 2, True),
        ((SPLIT, OF_SPLIT), 6, 2, 1, True),
    ],
    ids=["parts", "no dedup", "hosts", "split", "split, hosts"],
)
def test_both_give_the_same_arrays(of: Any, devices: int, hosts: int, parts: int, dedup: bool) -> None:
    bound = build(*of, devices, hosts)
    bound = dataclasses.replace(bound, groups=tuple(dataclasses.replace(g, dedup=dedup) for g in bound.groups))
    mesh = mesh_of(devices, hosts)
    host, device = (make(bound, mesh, np.float32) for make in (HostRouter, DeviceRouter))
    sizes: dict[str, int] = {}
    for seed, size in ((0, 20), (1, 23), (2, 1)):  # two batches of several sizes use one program
        batch = make_batch(bound, size, seed)
        expected = InFlight(batch, host.route(batch, 23, parts))
        sizes = capacity.grow(sizes, expected.routed.required_capacities)
        inputs, needs, fits = apart(device, device.put([InFlight(batch, device.route(batch, 23, parts))], sizes))
        assert needs.items() <= expected.routed.required_capacities.items() and fits
        equal(inputs, apart(host, host.put([expected], sizes))[0])
        assert inputs.labels_B.sharding.is_equivalent_to(sharded(mesh), 1)


def test_short_capacities_are_refused_or_told() -> None:
    """The host refuses sizes that it knows to be short; of all others the program tells how large they must be."""
    bound: BoundPlan = build(TABLES, FEATURES, 3)
    device = DeviceRouter(bound, mesh_of(3), np.float32)
    batch = make_batch(bound, 20, 0)
    routed = device.route(batch, 23, 1)
    required = route_on_host(batch, bound, 23).required_capacities
    assert {f.name for f in bound.features if f.bag is None} == routed.required_capacities.keys()
    for name, need in required.items():
        short = {**required, name: need - 1}
        if name in routed.required_capacities:
            with pytest.raises(ValueError, match=re.escape(f"{{'{name}': ({need}, {need - 1})}}; grow")):
                device.put([InFlight(batch, routed)], short)
        else:
            _, needs, fits = apart(device, device.put([InFlight(batch, routed)], short))
            assert needs[name] == need and not fits


def test_one_device_has_room_for_every_batch() -> None:
    bound: BoundPlan = build(TABLES, FEATURES, 1)
    device = DeviceRouter(bound, mesh_of(1), np.float32)
    batch = make_batch(bound, 23, 0)
    routed = device.route(batch, 23, 1)
    inputs, needs, fits = apart(device, device.put([InFlight(batch, routed)], routed.required_capacities))
    assert needs == {} and fits is None
    on_host = HostRouter(bound, mesh_of(1), np.float32)
    required, rooms = on_host.route(batch, 23, 1).required_capacities, dict(routed.required_capacities)
    for group in bound.listing:
        (room,) = inputs.routing.groups[group.name].slots_NxOxC.shape[2:]
        ids: dict[str, int] = collections.Counter()
        for source in group.sources:
            ids[source.feature.table] += inputs.routing.features[source.feature.name].inverse.size
        rows = {segment.spec.name: segment.spec.rows for segment in group.segments}
        assert required[group.name] <= room == sum(min(count, rows[table]) for table, count in ids.items())
        rooms[group.name] = room
    equal(inputs, apart(on_host, on_host.put([InFlight(batch, on_host.route(batch, 23, 1))], rooms))[0])


def test_the_host_only_measures_bags() -> None:
    bound = build(TABLES, FEATURES, 3)
    batch = make_batch(bound, 20, 0)
    measured = DeviceRouter(bound, mesh_of(3), np.float32).route(batch, 23, 1)
    counted = route_on_host(batch, bound, 23)
    jagged = {f.name for f in bound.features if f.bag is None}
    assert measured.required_capacities == {name: counted.required_capacities[name] for name in jagged}
