"""Divisions among devices: against all there are on small cases, and the bounds that theory gives for one load."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from recjax.planning.balance import Item, Owners, divide


def items_of(*loads: float) -> list[Item]:
    return [Item(np.array([load], np.float64)) for load in loads]


def fullest(items: list[Item], owners: Owners, base_NxK: np.ndarray) -> float:
    """The largest load of any device, added up one by one."""
    sums = base_NxK.tolist()
    for item, devices in zip(items, owners, strict=True):
        for device in devices:
            sums[device] = [have + more for have, more in zip(sums[device], item.loads, strict=True)]
    return max(max(of_device) for of_device in sums)


def least(items: list[Item], base_NxK: np.ndarray) -> float:
    """The least that is possible, by trying everything."""
    N = len(base_NxK)
    choices = [list(itertools.combinations(range(N), item.parts)) for item in items]
    return min(fullest(items, list(owners), base_NxK) for owners in itertools.product(*choices))


def test_by_hand() -> None:
    """The textbook case, 8 7 6 5 4 in two: 17 and 13, where 15 is possible."""
    items, base_NxK = items_of(8, 7, 6, 5, 4), np.zeros((2, 1))
    assert divide(items, base_NxK) == [(0,), (1,), (1,), (0,), (0,)]
    assert fullest(items, divide(items, base_NxK), base_NxK) == 17
    assert least(items, base_NxK) == 15


def test_of_two_loads_the_fuller_counts() -> None:
    """By hand: (4, 4), then (3, 4) apart from it, (4, 1) on the second, (3, 3) on the first: 7 at most."""
    items = [Item(np.array(loads, np.float64)) for loads in ((4, 1), (3, 3), (3, 4), (4, 4))]
    owners = divide(items, np.zeros((2, 2)))
    assert owners == [(1,), (0,), (1,), (0,)]
    assert fullest(items, owners, np.zeros((2, 2))) == 7


def test_a_load_that_an_item_adds_nothing_to_does_not_matter_to_it() -> None:
    """Device 0 has 9 of the second load, and nothing of the first, which is all that the item has."""
    assert divide([Item(np.array([1.0, 0.0]))], np.array([[0.0, 9.0], [2.0, 0.0]])) == [(0,)]


def test_what_devices_have_already_counts() -> None:
    items, base_NxK = items_of(2, 1), np.array([[3.0], [0.0], [1.5]])
    assert divide(items, base_NxK) == [(1,), (2,)]
    assert divide([Item(np.array([1.0]), parts=2)], np.array([[3.0], [0.0], [0.0]])) == [(1, 2)]


def test_parts_lie_on_different_devices() -> None:
    """The first fills the devices that the second leaves, although it would fit better elsewhere."""
    items = [Item(np.array([1.0]), parts=3), Item(np.array([5.0])), Item(np.array([1.0]), parts=4)]
    owners = divide(items, np.zeros((4, 1)))
    assert owners[2] == (0, 1, 2, 3)
    assert sorted((*owners[0], *owners[1])) == [0, 1, 2, 3]


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[Item], np.ndarray]:
    N, K = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    load = st.integers(0, 20).map(float)
    loads = st.lists(load, min_size=K, max_size=K).map(np.array)
    items = draw(st.lists(st.builds(Item, loads, st.integers(1, N)), max_size=12))
    return items, np.array(draw(st.lists(st.lists(load, min_size=K, max_size=K), min_size=N, max_size=N)))


@settings(max_examples=60, deadline=None)
@given(problems())
def test_every_part_has_one_device(problem: tuple[list[Item], np.ndarray]) -> None:
    items, base_NxK = problem
    owners = divide(items, base_NxK)
    for item, devices in zip(items, owners, strict=True):
        assert len(set(devices)) == item.parts and set(devices) <= set(range(len(base_NxK)))
    assert owners == divide(items, base_NxK)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(1, 3))
def test_one_load_is_within_the_bound(loads: list[int], N: int) -> None:
    items, base_NxK = items_of(*loads), np.zeros((N, 1))
    graham = 4 / 3 - 1 / (3 * N)
    assert fullest(items, divide(items, base_NxK), base_NxK) <= graham * least(items, base_NxK) + 1e-9
