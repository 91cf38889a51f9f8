"""Sizes of the routing arrays: enough, tight, few."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.routing import build

from recjax.embedding.routing.capacity import CapacityLadder, Kind, Kinds, grow, largest, rung, shrink

needs = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 10**9), max_size=4)


def test_the_ladder_has_steps_of_five_percent_and_few_rungs():
    rungs = sorted({rung(need) for need in range(10_000)})
    assert rungs[:6] == [8, 16, 24, 32, 40, 48]
    assert all(size % 8 == 0 for size in rungs)
    assert all(above <= max(below + 8, 1.05 * below) for below, above in zip(rungs, rungs[1:], strict=False))
    assert len(rungs) < 120
    assert all(rung(size) == size for size in rungs)


@given(needs, st.lists(needs, max_size=5))
def test_sizes_rise_only_when_they_must_and_always_suffice(start, requests):
    sizes = grow({}, start)
    for asked in requests:
        before, sizes = sizes, grow(sizes, asked)
        assert before.keys() | asked.keys() == sizes.keys()
        for name, size in sizes.items():
            need = asked.get(name, 0)
            assert size >= max(need, before.get(name, 0), 8)
            if name in before and before[name] >= need:
                assert size == before[name]
            else:
                assert size <= 1.03 * 1.05 * need + 8
    assert grow(sizes, {}) == sizes


def test_growing_leaves_its_input_alone():
    sizes = {"a": 8}
    assert grow(sizes, {"a": 9, "b": 0}) == {"a": 16, "b": 8}
    assert sizes == {"a": 8}


@given(needs, st.lists(needs, min_size=1, max_size=5))
def test_sizes_fall_to_what_a_period_needed_if_that_is_a_fifth_less(start, requests):
    sizes, peaks = grow({}, start), {}
    for asked in requests:
        sizes, peaks = grow(sizes, asked), largest(peaks, asked)
    fallen = shrink(sizes, peaks)
    assert fallen.keys() == sizes.keys()
    for name, size in fallen.items():
        most = max(asked.get(name, 0) for asked in requests)
        assert most <= size <= sizes[name]
        lowest = rung(int(1.03 * most))
        assert size == (lowest if lowest < 0.8 * sizes[name] else sizes[name])
    for asked in requests:  # the same batches again change nothing
        assert grow(fallen, asked) == fallen | {n: s for n, s in grow({}, asked).items() if n not in fallen}


BOTH = Kinds((Kind(14.0, 1.15, 1.5, names=frozenset("ab")), Kind(0.0, 1.05, 1.1, names=frozenset("xy"))))


def test_sizes_of_a_kind_rise_at_once_and_others_stay():
    sizes = {"a": 1000, "b": 2000, "x": 1000, "y": 2000, "alone": 1000}
    assert grow(sizes, {"a": 1000, "x": 900}, BOTH) == sizes
    risen = grow(sizes, {"a": 1100}, BOTH)
    assert risen == sizes | {"a": rung(1150), "b": rung(2300)}  # 15% at least
    risen = grow(sizes, {"a": 3000}, BOTH)
    assert risen == sizes | {"a": rung(3090), "b": rung(3000)}  # the others by half at most
    risen = grow(sizes, {"y": 2300}, BOTH)
    assert risen == sizes | {"y": rung(2369), "x": rung(1100)}
    assert grow(sizes, {"alone": 1500}, BOTH) == sizes | {"alone": rung(1545)}


def test_few_ids_begin_with_more_room_than_many():
    found = grow({}, {"a": 400, "b": 400_000, "x": 400, "z": 50}, BOTH)
    assert found == {"a": rung(680), "b": rung(412_000), "x": rung(412), "z": rung(51)}
    assert grow({}, {"a": 1}, BOTH) == {"a": 8}  # at most three times as much


def test_sizes_of_a_kind_fall_at_once_if_it_pays():
    sizes = {"a": 1000, "b": 100_000, "x": 1000}
    assert shrink(sizes, {"a": 100, "b": 90_000, "x": 900}, BOTH) == sizes
    assert shrink(sizes, {"a": 100, "b": 10_000, "x": 100}, BOTH) == {"a": rung(240), "b": rung(11_400), "x": rung(103)}


def test_many_jagged_features_take_few_programs():
    """26 features of lognormal bags, 8 devices of 512 samples; alone each takes several, and their sets many more."""
    rng = np.random.default_rng(0)
    names = [f"f{n}" for n in range(26)]
    counts = np.exp(rng.normal(np.log(10) - 0.5, 1, (60, 8, 26, 512))).astype(int).sum(axis=3).max(axis=1)

    def programs(kinds):
        ladder = CapacityLadder(kinds=kinds)
        sizes = [ladder.fit(dict(zip(names, needs, strict=True))) for needs in counts.tolist()]
        assert all(
            size[n] >= need
            for size, needs in zip(sizes, counts, strict=True)
            for n, need in zip(names, needs, strict=True)
        )
        return len({tuple(size.items()) for size in sizes})

    assert programs(Kinds((Kind(14.0, 1.15, 1.5, names=frozenset(names)),))) <= 2 < 10 < programs(Kinds())


def lognormal_needs(steps: int, rng: np.random.Generator) -> np.ndarray:
    """Most ids that one of 8 devices has of each of 26 features, in bags of ten on average, 64 samples: [steps, 26]."""
    sums = []
    for _ in range(8):
        bags = rng.standard_normal((min(steps, 2000) * 26, 64), np.float32) + np.float32(math.log(10) - 0.5)
        sums.append(np.floor(np.exp(bags, out=bags), out=bags).sum(axis=1))
    if steps > 2000:  # of the same sums, in other company
        sums = [rng.choice(of_device, steps * 26) for of_device in sums]
    return np.max(sums, axis=0).reshape(steps, 26).astype(np.int64)


@pytest.mark.parametrize(
    ("steps", "growth", "seed", "most"),
    [(2000, 0.0, 0, 3), (2000, 0.0, 2, 3), pytest.param(20_000, 0.1, 0, 4, marks=pytest.mark.full)],
)
def test_few_samples_of_many_jagged_features_take_few_programs(steps, growth, seed, most):
    """Also where bags, and rows on the wire, grow slowly."""
    names, rng = [f"f{n}" for n in range(26)], np.random.default_rng(seed)
    rows_S = rng.uniform(900, 1500) * rng.normal(1, 0.021, steps)  # first sizes lie anywhere between two rungs
    counts = np.column_stack([lognormal_needs(steps, rng), rows_S])
    counts = (counts * (1 + growth * np.arange(steps) / steps)[:, None]).astype(int)
    ladder, programs = CapacityLadder(kinds=Kinds.of_names(names, (), ["rows"])), set()
    for needs in counts.tolist():
        needed = dict(zip([*names, "rows"], needs, strict=True))
        sizes = ladder.fit(needed)
        assert all(sizes[name] >= need for name, need in needed.items())
        programs.add(tuple(sizes.values()))
    assert len(programs) <= most


def test_periods_in_which_sizes_may_fall_grow_longer():
    """Batches 0 to 3, 4 to 11, 12 to 27, 28 to 59, and so on; each but the last of these needs much once."""
    ladder = CapacityLadder(period=4)
    sizes = [ladder.fit({"a": 1000 if step in (0, 5, 13, 29) else 100})["a"] for step in range(130)]
    assert [step for step in range(1, 130) if sizes[step] < sizes[step - 1]] == [124]


def test_where_one_size_rises_all_get_room_above_their_peaks():
    kinds = Kinds((Kind(0.0, 1.2, 1.5, names=frozenset("ab")), Kind(0.0, 1.1, 1.1, names=frozenset("x"))))
    sizes, peaks = {"a": 1000, "x": 1000, "alone": 1000}, {"a": 900, "x": 990, "alone": 1000}
    assert grow(sizes, {"a": 990}, kinds, peaks) == sizes
    risen = grow(sizes, {"a": 1100}, kinds, peaks)
    assert risen == sizes | {"a": rung(1200), "x": rung(1089)}
    assert grow(sizes, {"alone": 1100}, kinds, peaks) == {"a": rung(1080), "x": rung(1089), "alone": rung(1133)}


def test_the_kinds_of_a_bound_plan():
    tables = [(40, 2, "row_wise"), (9, 2, "data_parallel")]
    features = [(0, 3, "sum", False), (0, None, "mean", True), (1, None, "none", False), (1, None, "sum", False)]
    bound = build(tables, features, 2)
    jagged, ids, lists = (kind.names for kind in Kinds.of(bound).kinds)
    assert jagged == {lookup.name for lookup in bound.lookups if lookup.spec.bag is None} and len(jagged) == 3
    assert {group.name for group in bound.groups} < lists and not jagged & lists and not ids
